// The kernels for avx512; the build gives this file, and no other, the flags for it.
#include "kernels.h"

#if defined(__x86_64__)
#define NEURONMM_LANES 16
#include "gemm_float_impl.h"

const neuronmm::Kernels* neuronmm::kernels_avx512() {
    static constexpr Kernels kernels = table("avx512", gemm_nt_by<Fp32Scheme>, gemm_nn_by<Fp32Scheme>);
    return &kernels;
}
#else
const neuronmm::Kernels* neuronmm::kernels_avx512() { return nullptr; }
#endif
