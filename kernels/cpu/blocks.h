// The blocks of a decoder layer, run by a team of workers. Each worker multiplies its part of the weight rows, then
// steals rows from workers that are not done.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <memory>

#include "matmul.h"
#include "team.h"

namespace neuronmm {

// Memory of one call, reused by the next call of the same thread. It only grows.
class Scratch {
public:
    // Reserve room for `floats` values and release everything taken before.
    void reserve(size_t floats);
    // Take `batch` rows of n values, each aligned to a cache line; more than kMaxBatch rows get a bf16 copy behind them.
    Rows take(int batch, int n);
    // Number of floats that `take` uses. Each row is one cache line longer than needed: rows whose distance is a power
    // of two would compete for the same cache sets.
    static size_t size(int batch, int n) {
        const size_t floats = batch * stride(n);
        return batch > kMaxBatch ? floats + (floats / 2 + 15) / 16 * 16 : floats;
    }
    static size_t stride(int n) { return (n + 15) / 16 * 16 + 16; }

private:
    std::unique_ptr<float, decltype(&std::free)> memory_{nullptr, &std::free};
    size_t capacity_ = 0, used_ = 0;
};

// The largest rank of these linears; 0 when all are dense.
int max_rank(std::initializer_list<const Linear*> linears);

// One linear of a group with the same input; `ax` is its rank-r intermediate A x, `y` its result.
struct Projection {
    const Linear& linear;
    Rows ax, y;
};

// y = linear(x) for every projection of the group: first all A factors, then one barrier, then all B factors and dense
// weights. A shared A is multiplied once, into the `ax` of the first projection that has it. `add` accumulates into y.
// There is no barrier at the end.
void project(const Worker& worker, std::initializer_list<Projection> group, Rows x, int batch, bool add = false);

// y (+)= down(silu(gate(x)) * up(x)). A shared A of gate and up is read once. `hidden` receives silu(gate(x)) * up(x),
// `up_hidden` receives up(x). In a prefill, gate and up run block by block of weight rows, so that their outputs are
// still in the cache for SwiGLU. Barriers separate the phases; there is none at the end.
struct SwiGLU {
    const Linear &gate, &up, &down;
    Rows gate_ax, up_ax, hidden, up_hidden, down_ax;
};
void swiglu(const Worker& worker, const SwiGLU& mlp, Rows x, int batch, Rows y, bool add);

}  // namespace neuronmm
