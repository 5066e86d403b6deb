// The kernels for avx512bf16; the build gives this file, and no other, the flags for it.
#include "kernels.h"

#if defined(__x86_64__)
#define NEURONMM_LANES 16
#include "gemm_amx_impl.h"
#include "gemm_float_impl.h"

const neuronmm::Kernels* neuronmm::kernels_avx512bf16() {
    static constexpr Kernels kernels = table("avx512bf16", gemm_nt_by<Bf16DotScheme>, gemm_nn_by<Bf16DotScheme>);
    return &kernels;
}

const neuronmm::Kernels* neuronmm::kernels_avx512bf16_fp32() {
    static constexpr Kernels kernels = table("avx512bf16+fp32", gemm_nt_by<Fp32Scheme>, gemm_nn_by<Fp32Scheme>);
    return &kernels;
}
#else
const neuronmm::Kernels* neuronmm::kernels_avx512bf16() { return nullptr; }
const neuronmm::Kernels* neuronmm::kernels_avx512bf16_fp32() { return nullptr; }
#endif

#if defined(NEURONMM_AMX)
const neuronmm::Kernels* neuronmm::kernels_avx512bf16_amx() {
    static constexpr Kernels kernels = table("avx512bf16+amx", gemm_nt_by<AmxScheme>, gemm_nn_by<AmxScheme>);
    return &kernels;
}
#else
const neuronmm::Kernels* neuronmm::kernels_avx512bf16_amx() { return nullptr; }
#endif
