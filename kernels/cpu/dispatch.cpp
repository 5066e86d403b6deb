// Choice of the instruction set at run time.
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace neuronmm {
namespace {

// Whether the processor has AMX for bf16 and the system lets this process use it. Linux must be asked first: the tiles
// add 8 KiB to the state that it saves per thread (Documentation/arch/x86/xstate.rst of Linux).
bool amx() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr unsigned kTiles = 1u << 24, kBf16 = 1u << 22;
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, which headers before Linux 5.16 lack
    constexpr int kTileData = 18;               // the number of the state component
    unsigned a, b, c, d;
    const bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles) && (d & kBf16);
    return has && !syscall(SYS_arch_prctl, kRequestPermission, kTileData);
#else
    return false;
#endif
}

bool runs(const Kernels* kernels) {
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (kernels == kernels_avx512bf16_amx()) return bf16 && amx();
    if (kernels == kernels_avx512bf16() || kernels == kernels_avx512bf16_fp32()) return bf16;
    if (kernels == kernels_avx512()) return avx512;
    if (kernels == kernels_avx2()) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return true;
}

// Whether the bf16 dot product runs at half the fp32 rate, as on Intel's cores (on AMD's it runs at twice the fp32
// rate). A single row is bound by memory and gains from the instruction everywhere; many rows do not.
bool slow_dot_product() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

// The kernels of that name, or the best for null, if this processor runs them; otherwise null.
const Kernels* find(const char* name) {
    const Kernels *dot = kernels_avx512bf16(), *fp32 = kernels_avx512bf16_fp32();
    if (slow_dot_product()) std::swap(dot, fp32);
    for (const Kernels* kernels :
         {kernels_avx512bf16_amx(), dot, fp32, kernels_avx512(), kernels_avx2(), kernels_portable()})
        if (kernels && (!name || !std::strcmp(name, kernels->name)) && runs(kernels)) return kernels;
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

#ifndef NEURONMM_SOURCES
#define NEURONMM_SOURCES ""
#endif

const char* neuronmm_sources() { return NEURONMM_SOURCES; }

int neuronmm_types() { return neuronmm::kInt4 + 1; }

void neuronmm_struct_sizes(int64_t* sizes) {
    using namespace neuronmm;
    const size_t all[] = {sizeof(Matrix), sizeof(Linear), sizeof(Layer), sizeof(Model)};
    for (size_t i = 0; i < 4; i++) sizes[i] = static_cast<int64_t>(all[i]);
}
