// Linears and SwiGLU, with the weight rows split over a team of workers.
#include "blocks.h"

#include <algorithm>
#include <new>

namespace neuronmm {
namespace {

constexpr int64_t kBlock = 16 << 10;  // bytes of weights that a worker pops at a time
constexpr int kSwigluRows = 64;       // weight rows of gate and up that a prefill multiplies before it evaluates SwiGLU

// y (+)= m x + bias. `round`: also update the bf16 copy of y, because another matmul reads it.
struct MatMul {
    const Matrix* m;
    Rows x, y;
    const float* bias;
    bool add, round;
};

// The matmuls between two barriers. Their weight rows form one list, which is split over the workers by bytes. A worker
// thus reads one long contiguous part; each new start would wait for memory.
struct Phase {
    MatMul matmuls[3];
    int count = 0;
    int64_t bytes = 0, widest = 1;

    void add(const MatMul& p) {
        matmuls[count++] = p;
        bytes += p.m->rows * p.m->row_bytes();
        widest = std::max(widest, p.m->row_bytes());
    }
    // Index of the first row of the list that begins at byte `at` or later.
    int row_at(int64_t at) const {
        int row = 0;
        for (int i = 0; i < count; i++) {
            const Matrix& m = *matmuls[i].m;
            const int64_t rows = (at + m.row_bytes() - 1) / m.row_bytes();
            row += static_cast<int>(std::clamp<int64_t>(rows, 0, m.rows));
            at -= m.rows * m.row_bytes();
        }
        return row;
    }
};

// The first projection of the group that has the same A as `p`; possibly `p` itself.
const Projection& owner_of_a(const Projection& p, std::initializer_list<Projection> group) {
    return *std::find_if(group.begin(), group.end(), [&](const Projection& other) {
        return &other == &p || other.linear.shares_a(p.linear);
    });
}

}  // namespace

void Scratch::reserve(size_t floats) {
    used_ = 0;
    if (floats <= capacity_) return;
    const size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
    memory_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
    if (!memory_) throw std::bad_alloc();
    capacity_ = floats;
}

Rows Scratch::take(int batch, int n) {
    float* data = memory_.get() + used_;
    used_ += size(batch, n);
    return {data, stride(n), batch > kMaxBatch ? reinterpret_cast<uint16_t*>(data + batch * stride(n)) : nullptr};
}

void round_columns(const Kernels& kernels, Rows rows, int begin, int end, int n, int batch) {
    if (!rows.rounded) return;
    for (int b = 0; b < batch; b++) {
        uint16_t* to = rows.rounded + b * rows.stride;
        kernels.narrow(rows.row(b) + begin, kBFloat16, end - begin, to + begin);
        if (end == n) to[n] = 0;  // the GEMMs read columns in pairs
    }
}

// Run this worker's part of the phase. Inputs are prepared once and reused while they stay the same. In a prefill a
// worker pops all its rows at once, because the GEMM is faster on many rows.
static void run(const Worker& worker, const Phase& phase, int batch) {
    const Kernels& kernels = worker.kernels;
    const bool prefill = phase.matmuls[0].x.rounded;
    const MatMul* prepared = nullptr;
    Inputs inputs{};
    const auto multiply = [&](const MatMul& p, int begin, int end) {
        if (prefill) {
            kernels.gemm_nt(*p.m, begin, end, p.x.rounded, p.x.stride, batch, p.y.data, p.y.stride, p.bias, p.add);
        } else {
            if (!prepared || prepared->x.data != p.x.data || prepared->m->type != p.m->type)
                inputs = kernels.prepare(p.x.data, p.x.stride, p.m->cols, batch, p.m->type);
            prepared = &p;
            kernels.gemv(*p.m, begin, end, inputs, batch, p.y.data, p.y.stride, p.bias, p.add);
        }
        if (p.round) round_columns(kernels, p.y, begin, end, p.m->rows, batch);
    };
    const int first = phase.row_at(phase.bytes * worker.id / worker.count);
    const int last = phase.row_at(phase.bytes * (worker.id + 1) / worker.count);
    const int64_t block = prefill ? last - first : kBlock / phase.widest;
    worker.each(first, last, static_cast<int>(std::max<int64_t>(block, 1)), [&](int begin, int end) {
        for (int i = 0; i < phase.count; i++) {
            const int rows = phase.matmuls[i].m->rows, from = std::max(begin, 0), to = std::min(end, rows);
            if (from < to) multiply(phase.matmuls[i], from, to);
            begin -= rows, end -= rows;
        }
    });
}

int max_rank(std::initializer_list<const Linear*> linears) {
    int rank = 0;
    for (const Linear* linear : linears)
        if (linear->low_rank()) rank = std::max(rank, linear->a.rows);
    return rank;
}

// Multiply the A factors of the group, if there are any, and wait at a barrier. Returns the remaining phase: B factors
// and dense weights.
static Phase multiply_a_factors(const Worker& worker, std::initializer_list<Projection> group, Rows x, int batch, bool add) {
    Phase factors, last;
    for (const Projection& p : group) {
        const Projection& owner = owner_of_a(p, group);
        if (p.linear.low_rank() && &owner == &p) factors.add({&p.linear.a, x, p.ax, nullptr, false, true});
        last.add({&p.linear.last(), p.linear.low_rank() ? owner.ax : x, p.y, p.linear.bias, add, false});
    }
    if (factors.count) {
        run(worker, factors, batch);
        worker.sync();
    }
    return last;
}

void project(const Worker& worker, std::initializer_list<Projection> group, Rows x, int batch, bool add) {
    run(worker, multiply_a_factors(worker, group, x, batch, add), batch);
}

void swiglu(const Worker& worker, const SwiGLU& mlp, Rows x, int batch, Rows y, bool add) {
    const Kernels& kernels = worker.kernels;
    const int n = mlp.gate.last().rows, first = worker.begin(n), last = worker.end(n);
    const auto combine = [&](int begin, int end) {
        for (int b = 0; b < batch; b++)
            kernels.swiglu(mlp.hidden.row(b) + begin, mlp.up_hidden.row(b) + begin, end - begin);
        round_columns(kernels, mlp.hidden, begin, end, n, batch);
    };
    const Phase both = multiply_a_factors(
        worker, {{mlp.gate, mlp.gate_ax, mlp.hidden}, {mlp.up, mlp.up_ax, mlp.up_hidden}}, x, batch, false);
    if (x.rounded) {
        for (int begin = first; begin < last; begin += kSwigluRows) {
            const int end = std::min(begin + kSwigluRows, last);
            for (int i = 0; i < both.count; i++) {
                const MatMul& p = both.matmuls[i];
                kernels.gemm_nt(*p.m, begin, end, p.x.rounded, p.x.stride, batch, p.y.data, p.y.stride, p.bias, false);
            }
            combine(begin, end);
        }
    } else {
        run(worker, both, batch);
        worker.sync();
        combine(first, last);
    }
    worker.sync();
    project(worker, {{mlp.down, mlp.down_ax, y}}, mlp.hidden, batch, add);
}

}  // namespace neuronmm
