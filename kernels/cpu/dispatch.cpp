// The run-time choice of the instruction set.
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "kernels.h"

namespace neuronmm {
namespace {

bool runs(const Kernels* kernels) {
    if (!kernels) return false;
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (kernels == kernels_avx512bf16() || kernels == kernels_avx512bf16_fp32())
        return avx512 && __builtin_cpu_supports("avx512bf16");
    if (kernels == kernels_avx512()) return avx512;
    if (kernels == kernels_avx2()) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return true;
}

// Whether the bf16 dot product multiplies at half of fp32's rate: that of Intel's cores, where AMD's has twice fp32's. A
// single row waits for memory and gains by it everywhere; many rows do not.
bool slow_dot_product() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

// The best this processor runs, or the named one; null if there is none.
const Kernels* find(const char* name) {
    const Kernels *dot = kernels_avx512bf16(), *fp32 = kernels_avx512bf16_fp32();
    if (slow_dot_product()) std::swap(dot, fp32);
    for (const Kernels* kernels : {dot, fp32, kernels_avx512(), kernels_avx2(), kernels_portable()})
        if (runs(kernels) && (!name || !std::strcmp(name, kernels->name))) return kernels;
    return nullptr;
}

std::atomic<const Kernels*> chosen{find(nullptr)};

}  // namespace

const Kernels& active() { return *chosen.load(std::memory_order_acquire); }

}  // namespace neuronmm

const char* neuronmm_isa() { return neuronmm::active().name; }

int neuronmm_set_isa(const char* name) {
    const neuronmm::Kernels* kernels = neuronmm::find(name);
    if (!kernels) return -1;
    neuronmm::chosen.store(kernels, std::memory_order_release);
    return 0;
}
