// The blocks a decoder layer is made of, run by a team: each worker takes its share of the weight rows, and then what is
// left of the others' shares.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <memory>

#include "team.h"

namespace neuronmm {

// fp32 rows that a phase writes and the next one reads: row b begins at data + b * stride. More than kMaxBatch rows that a
// matrix is multiplied with stand beside themselves in bf16, in rows of as many elements.
struct Rows {
    float* data;
    size_t stride;
    uint16_t* rounded = nullptr;

    float* row(int b) const { return data + b * stride; }
};

// Round columns begin to end of `batch` rows of n, where they are kept rounded.
void round_columns(const Kernels& kernels, Rows rows, int begin, int end, int n, int batch);

// Memory for one call, kept for the next one of the same thread. Only grows.
class Scratch {
public:
    // Room for `floats` values in all; forgets what was taken before.
    void reserve(size_t floats);
    // batch rows of n values, every row on a cache line of its own; many of them with room to be kept rounded.
    Rows take(int batch, int n);
    // Values that `take` uses for batch rows of n. Rows of a power of two would share their cache sets, hence one line more.
    static size_t size(int batch, int n) {
        const size_t floats = batch * stride(n);
        return batch > kMaxBatch ? floats + floats / 2 : floats;
    }
    static size_t stride(int n) { return (n + 15) / 16 * 16 + 16; }

private:
    std::unique_ptr<float, decltype(&std::free)> memory_{nullptr, &std::free};
    size_t capacity_ = 0, used_ = 0;
};

// The largest rank of these linears; 0 when all are dense.
int max_rank(std::initializer_list<const Linear*> linears);

// One linear of a group that shares its input, its rank-r intermediate and its result.
struct Projection {
    const Linear& linear;
    Rows middle, y;
};

// y = linear(x) for every projection of the group: all A factors, each once, one barrier, then all B factors and dense
// weights. A projection that shares its A with an earlier one reads that one's intermediate and leaves its own alone.
// `add` adds to y. There is no barrier at the end.
void project(const Worker& worker, std::initializer_list<Projection> group, Rows x, int batch, bool add = false);

// y (+)= down(silu(gate(x)) * up(x)). Gate and up may share their A, which is then read once; `hidden` takes the product,
// `up_hidden` is room for one factor of it. Of a prompt, gate and up run as one pass over blocks of rows that stay in the
// cache. One barrier before each phase that needs another's rows, none at the end.
struct SwiGLU {
    const Linear &gate, &up, &down;
    Rows gate_middle, up_middle, hidden, up_hidden, down_middle;
};
void swiglu(const Worker& worker, const SwiGLU& mlp, Rows x, int batch, Rows y, bool add);

}  // namespace neuronmm
