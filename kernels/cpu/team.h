// The threads of one call. They are OpenMP's threads, the ones torch uses: two pools would spin on the same cores. A
// barrier separates the phases of a call; it is cheaper than a new parallel region.
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

// Work-stealing queue of one worker for one phase. The owner pops from the front, so that it reads weights
// sequentially; idle workers steal from the back. A phase number prevents stealing from a worker that is in another
// phase.
class alignas(64) WorkQueue {
public:
    // For the owner: start the next phase with items [first, end); replace the items in the same phase; pop at most
    // `most`.
    void start_phase(int first, int end);
    void restart(int first, int end);
    bool pop(int most, int& first, int& end);
    // For the thief: steal the second half of the remaining items if it holds at least `least`. `to` is the thief's
    // queue.
    bool steal(const WorkQueue& to, int least, int& first, int& end);

private:
    std::atomic<uint64_t> state_{0};  // phase (16 bits), first (24 bits), end (24 bits)
};

// One thread of a team.
struct Worker {
    const Kernels& kernels;
    int id, count;
    Barrier& barrier;
    WorkQueue* queues;  // [count]

    void sync() const {
        if (count > 1) barrier.wait(count);
    }
    // Call visit(first, end) for at most `block` items at a time: first for this worker's items, then for items stolen
    // from others. Every worker of the team must call this, and a barrier must follow before the results are used.
    template <class Visit>
    void each(int first, int end, int block, const Visit& visit) const {
        WorkQueue& queue = queues[id];
        queue.start_phase(first, end);
        for (bool more = true; more;) {
            while (queue.pop(block, first, end)) visit(first, end);
            more = false;
            for (int i = 1; i < count && !more; i++) more = queues[(id + i) % count].steal(queue, block, first, end);
            if (more) queue.restart(first, end);
        }
    }
    // This worker's part of n items is [begin(n), end(n)).
    int begin(int n) const { return static_cast<int>(static_cast<int64_t>(n) * id / count); }
    int end(int n) const { return static_cast<int>(static_cast<int64_t>(n) * (id + 1) / count); }
};

// Run `work` on up to `threads` threads and wait for all of them. Calls from several threads take turns, because two
// teams would spin on the same cores.
void run_team(int threads, const std::function<void(const Worker&)>& work);

}  // namespace neuronmm
