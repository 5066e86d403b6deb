// Threads and the barrier between phases.
#include "team.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace neuronmm {
namespace {

constexpr int kSpins = 256;  // about 10 microseconds; then the thread yields its core to the one it waits for

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

struct Job {
    const Kernels& kernels;
    const std::function<void(const Worker&)>& work;
    std::vector<WorkQueue> queues;
    Barrier barrier;
    std::atomic<int> finished{0};
};

constexpr int kBits = 24;
constexpr uint64_t kMask = (1u << kBits) - 1;

inline uint64_t pack(uint64_t phase, int first, int end) {
    return phase << 2 * kBits | static_cast<uint64_t>(first) << kBits | static_cast<uint64_t>(end);
}
inline uint64_t phase_of(uint64_t state) { return state >> 2 * kBits; }
inline int first_of(uint64_t state) { return static_cast<int>(state >> kBits & kMask); }
inline int end_of(uint64_t state) { return static_cast<int>(state & kMask); }

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

// Relaxed memory order is enough here: barriers publish a phase's inputs and results.
void WorkQueue::start_phase(int first, int end) {
    state_.store(pack(phase_of(state_.load(std::memory_order_relaxed)) + 1, first, end), std::memory_order_relaxed);
}

void WorkQueue::restart(int first, int end) {
    state_.store(pack(phase_of(state_.load(std::memory_order_relaxed)), first, end), std::memory_order_relaxed);
}

bool WorkQueue::pop(int most, int& first, int& end) {
    uint64_t state = state_.load(std::memory_order_relaxed);
    do {
        first = first_of(state), end = end_of(state);
        if (first >= end) return false;
        if (end - first > most) end = first + most;
    } while (!state_.compare_exchange_weak(state, pack(phase_of(state), end, end_of(state)),
                                           std::memory_order_relaxed));
    return true;
}

bool WorkQueue::steal(const WorkQueue& to, int least, int& first, int& end) {
    const uint64_t phase = phase_of(to.state_.load(std::memory_order_relaxed));
    uint64_t state = state_.load(std::memory_order_relaxed);
    do {
        end = end_of(state), first = end - (end - first_of(state)) / 2;
        if (phase_of(state) != phase || end - first < least) return false;
    } while (!state_.compare_exchange_weak(state, pack(phase, first_of(state), first), std::memory_order_relaxed));
    return true;
}

// Atomics hand over the job and signal its end, although OpenMP synchronises too: the thread sanitizer can check
// atomics but does not see OpenMP's synchronisation.
void run_team(int threads, const std::function<void(const Worker&)>& work) {
    static std::mutex turn;
    const std::lock_guard<std::mutex> lock(turn);
    Job job{active(), work, std::vector<WorkQueue>(std::max(threads, 1)), {}, {}};
#ifdef _OPENMP
    if (threads > 1 && !omp_in_parallel()) {
        static std::atomic<Job*> shared{nullptr};
        shared.store(&job, std::memory_order_release);
#pragma omp parallel num_threads(threads)
        {
            Job& mine = *shared.load(std::memory_order_acquire);
            mine.work({mine.kernels, omp_get_thread_num(), omp_get_num_threads(), mine.barrier, mine.queues.data()});
            mine.finished.fetch_add(1, std::memory_order_release);
        }
        (void)job.finished.load(std::memory_order_acquire);
        return;
    }
#endif
    work({job.kernels, 0, 1, job.barrier, job.queues.data()});
}

}  // namespace neuronmm

int neuronmm_threaded() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
