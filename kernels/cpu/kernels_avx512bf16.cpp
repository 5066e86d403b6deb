// The kernels for avx512bf16; the build gives this file, and no other, the flags for it.
#include "kernels.h"

#if defined(__x86_64__)
#define NEURONMM_LANES 16
#include "kernels_impl.h"

const neuronmm::Kernels* neuronmm::kernels_avx512bf16() {
    static constexpr Kernels kernels = table("avx512bf16");
    return &kernels;
}
#else
const neuronmm::Kernels* neuronmm::kernels_avx512bf16() { return nullptr; }
#endif
