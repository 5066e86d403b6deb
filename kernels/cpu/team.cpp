// Threads and the barrier between phases.
#include "team.h"

#include <mutex>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace neuronmm {
namespace {

constexpr int kSpins = 256;  // some 10 microseconds; then the core goes to whoever holds the others up

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

struct Job {
    const Kernels& kernels;
    const std::function<void(const Worker&)>& work;
    Barrier barrier;
    std::atomic<int> finished{0};
};

}  // namespace

void Barrier::wait(int count) {
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
        if (spins < kSpins)
            pause();
        else
            std::this_thread::yield();
    }
}

// The job is handed over, and its end awaited, through atomics: the order of memory then follows from this code alone,
// which the thread sanitizer can check; OpenMP's own synchronisation is invisible to it.
void run_team([[maybe_unused]] int threads, const std::function<void(const Worker&)>& work) {
    static std::mutex turn;
    const std::lock_guard<std::mutex> lock(turn);
    Job job{active(), work, {}, {}};
#ifdef _OPENMP
    if (threads > 1 && !omp_in_parallel()) {
        static std::atomic<Job*> shared{nullptr};
        shared.store(&job, std::memory_order_release);
#pragma omp parallel num_threads(threads) 
        {
            Job& mine = *shared.load(std::memory_order_acquire);
            mine.work({mine.kernels, omp_get_thread_num(), omp_get_num_threads(), mine.barrier});
            mine.finished.fetch_add(1, std::memory_order_release);
        }
        (void)job.finished.load(std::memory_order_acquire);
        return;
    }
#endif
    work({job.kernels, 0, 1, job.barrier});
}

}  // namespace neuronmm

int neuronmm_threaded() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
