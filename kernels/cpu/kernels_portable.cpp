// The kernels for any processor, in vectors of 128 bits: what x86-64 and aarch64 both have.
#define NEURONMM_LANES 4
#include "kernels_impl.h"

const neuronmm::Kernels* neuronmm::kernels_portable() {
    static constexpr Kernels kernels = table("portable", nullptr, nullptr);
    return &kernels;
}
