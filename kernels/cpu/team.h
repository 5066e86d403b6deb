// The threads of one call. They are OpenMP's, which torch uses too: a pool of our own beside torch's would have both
// spin on the same cores. The phases inside a call are separated by a barrier of our own, cheaper than a new region.
#pragma once

#include <atomic>
#include <cstdint>
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

// What is left of one worker's items of a phase. The owner takes from the front, so that it reads on in one direction;
// whoever has nothing left takes from the back. Phases are counted: nobody takes from a worker that is in another one.
class alignas(64) Share {
public:
    // For the owner: the next phase begins, with items first to end; these instead, in the same phase; take at most so many.
    void begin(int first, int end);
    void refill(int first, int end);
    bool take(int most, int& first, int& end);
    // For others: the second half of what is left, if that is so many at least.
    bool give(const Share& to, int least, int& first, int& end);

private:
    std::atomic<uint64_t> state_{0};  // the phase, first and end in 16, 24 and 24 bits
};

// One thread of a team.
struct Worker {
    const Kernels& kernels;
    int id, count;
    Barrier& barrier;
    Share* shares;  // [count]

    void sync() const {
        if (count > 1) barrier.wait(count);
    }
    // visit(first, end) for at most `block` items at a time: this worker's own, first to end, and then others' that are left.
    // Every worker of the team has to come to this, and a barrier has to follow before the results are used.
    template <class Visit>
    void each(int first, int end, int block, const Visit& visit) const {
        Share& mine = shares[id];
        mine.begin(first, end);
        for (bool more = true; more;) {
            while (mine.take(block, first, end)) visit(first, end);
            more = false;
            for (int i = 1; i < count && !more; i++) more = shares[(id + i) % count].give(mine, block, first, end);
            if (more) mine.refill(first, end);
        }
    }
    // This worker's share of n items begins at begin(n) and ends at end(n).
    int begin(int n) const { return static_cast<int>(static_cast<int64_t>(n) * id / count); }
    int end(int n) const { return static_cast<int>(static_cast<int64_t>(n) * (id + 1) / count); }
};

// Run `work` on up to `threads` threads and wait for all. Calls from several threads take turns: two teams on the same
// cores would only spin against each other.
void run_team(int threads, const std::function<void(const Worker&)>& work);

}  // namespace neuronmm
