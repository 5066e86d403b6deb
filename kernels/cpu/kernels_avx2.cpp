// The kernels for avx2; the build gives this file, and no other, the flags for it.
#include "kernels.h"

#if defined(__x86_64__)
#define NEURONMM_LANES 8
#include "gemm_float_impl.h"
#include "gemm_integer_impl.h"

const neuronmm::Kernels* neuronmm::kernels_avx2() {
    static constexpr Kernels kernels = table("avx2", gemm_nt_by<Fp32Scheme>, gemm_nn_by<Fp32Scheme>, gemm_integer);
    return &kernels;
}
#else
const neuronmm::Kernels* neuronmm::kernels_avx2() { return nullptr; }
#endif
