// The threads of one call. They are OpenMP's, which torch uses too: a pool of our own beside torch's would have both
// spin on the same cores. The phases inside a call are separated by a barrier of our own, cheaper than a new region.
#pragma once

#include <atomic>
#include <functional>

#include "kernels.h"

namespace neuronmm {

class Barrier {
public:
    void wait(int count);

private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
};

// One thread of a team.
struct Worker {
    const Kernels& kernels;
    int id, count;
    Barrier& barrier;

    void sync() const {
        if (count > 1) barrier.wait(count);
    }
    // This worker's share of n items begins at begin(n) and ends at end(n).
    int begin(int n) const { return static_cast<int>(static_cast<int64_t>(n) * id / count); }
    int end(int n) const { return static_cast<int>(static_cast<int64_t>(n) * (id + 1) / count); }
};

// Run `work` on up to `threads` threads and wait for all. Calls from several threads take turns: two teams on the same
// cores would only spin against each other.
void run_team(int threads, const std::function<void(const Worker&)>& work);

}  // namespace neuronmm
