// Linears and SwiGLU, with the weight rows split over a team of workers.
#include "blocks.h"

#include <algorithm>
#include <limits>
#include <new>

#include "pivots.h"

namespace neuronmm {
namespace {

constexpr int64_t kBlock = 16 << 10;  // bytes of weights that a worker pops at a time
constexpr int64_t kManyBlock = 256 << 10;  // the same for more than kMaxBatch rows: it stays in the cache between them
constexpr int kSwigluRows = 64;       // outputs of gate and up that a prefill computes before it evaluates SwiGLU
constexpr int kVector = 16;           // most outputs that a GEMM computes in one vector
constexpr int kSwigluCost = 64;       // bytes of weights that a prefill multiplies in about the time of one SwiGLU

// The matmuls between two barriers. Their weight rows form one list, which is split over the workers by bytes. A worker
// thus reads one long contiguous part; each new start would wait for memory.
struct Phase {
    MatMul matmuls[3];
    int count = 0;
    int64_t bytes = 0, widest = 1;

    // Bytes of a row. A matrix without columns still has rows to visit.
    static int64_t row_bytes(const Matrix& m) { return std::max<int64_t>(m.row_bytes(), 1); }

    void add(const MatMul& p) {
        matmuls[count++] = p;
        bytes += p.m->rows * row_bytes(*p.m);
        widest = std::max(widest, row_bytes(*p.m));
    }
    // Index of the first row of the list that begins at byte `at` or later.
    int row_at(int64_t at) const {
        int row = 0;
        for (int i = 0; i < count; i++) {
            const Matrix& m = *matmuls[i].m;
            const int64_t rows = (at + row_bytes(m) - 1) / row_bytes(m);
            row += static_cast<int>(std::clamp<int64_t>(rows, 0, m.rows));
            at -= m.rows * row_bytes(m);
        }
        return row;
    }
    // In a prefill, worker `id` computes the outputs of gate and up from this one on, of n. A pivot costs SwiGLU only.
    int swiglu_begin(int n, int id, int workers) const {
        const auto cost = [&](int output) {
            int64_t sum = static_cast<int64_t>(output) * kSwigluCost;
            for (int i = 0; i < count; i++) sum += matmuls[i].rows_before(output) * row_bytes(*matmuls[i].m);
            return sum;
        };
        const int64_t share = cost(n) * id / workers;
        int begin = 0;
        for (int end = n; begin < end;) {
            const int middle = (begin + end) / 2;
            if (cost(middle) < share)
                begin = middle + 1;
            else
                end = middle;
        }
        return begin < n ? begin / kVector * kVector : n;  // a multiple of Matrix::kTile
    }
    // In a prefill, the end of the block of outputs of gate and up from `begin` on, of n: kSwigluRows or up to twice as
    // many, with which the rows fill the GEMM's vectors best.
    int swiglu_end(int begin, int n) const {
        int best = begin;
        double least = std::numeric_limits<double>::infinity();
        for (int length = kSwigluRows; length <= 2 * kSwigluRows; length += kVector) {
            const int end = std::min(begin + length, n);
            int64_t cost = 0;
            for (int i = 0; i < count; i++) {
                const int rows = matmuls[i].rows_before(end) - matmuls[i].rows_before(begin);
                cost += (rows + kVector - 1) / kVector * row_bytes(*matmuls[i].m);
            }
            if (cost < least * (end - begin)) best = end, least = static_cast<double>(cost) / (end - begin);
        }
        return best;
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
    capacity_ = 0;  // until the memory is there
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

// Run this worker's part of the phase. In a prefill a worker pops all its rows at once, because the GEMM is faster on
// many rows.
static void run(const Worker& worker, const Phase& phase, int batch) {
    Multiplier multiplier(worker.kernels, batch);
    for (int i = 0; i < phase.count; i++)
        if (const Linear* linear = phase.matmuls[i].row_form; linear && contiguous(*linear))
            multiplier.pivots(phase.matmuls[i], worker.begin(linear->a.rows), worker.end(linear->a.rows));
    const int first = phase.row_at(phase.bytes * worker.id / worker.count);
    const int last = phase.row_at(phase.bytes * (worker.id + 1) / worker.count);
    const int64_t bytes = batch > kMaxBatch ? kManyBlock : kBlock;
    const int64_t block = phase.matmuls[0].x.rounded ? last - first : bytes / phase.widest;
    worker.each(first, last, static_cast<int>(std::max<int64_t>(block, 1)), [&](int begin, int end) {
        for (int i = 0; i < phase.count; i++) {
            const Matrix& m = *phase.matmuls[i].m;
            const auto whole = [&](int row) { return std::clamp((row + m.tile() - 1) / m.tile() * m.tile(), 0, m.rows); };
            const int rows = m.rows, from = whole(std::max(begin, 0)), to = whole(end);
            if (from < to) multiplier.rows(phase.matmuls[i], from, to);
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
static Phase multiply_a_factors(const Worker& worker, std::initializer_list<Projection> group, Rows x, int batch,
                                bool add) {
    Phase factors, last;
    for (const Projection& p : group) {
        const Projection& owner = owner_of_a(p, group);
        const Linear& l = p.linear;
        if (l.low_rank() && &owner == &p)
            factors.add({&l.a, x, p.ax, nullptr, false, true, nullptr, l.form == kColumns});
        last.add({&l.last(), l.low_rank() ? owner.ax : x, p.y, l.bias, add, false, l.form == kRows ? &l : nullptr});
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
    const int n = mlp.gate.out();
    const auto combine = [&](int begin, int end) {
        for (int b = 0; b < batch; b++)
            kernels.swiglu(mlp.hidden.row(b) + begin, mlp.up_hidden.row(b) + begin, end - begin);
        round_columns(kernels, mlp.hidden, begin, end, n, batch);
    };
    const Phase both = multiply_a_factors(
        worker, {{mlp.gate, mlp.gate_ax, mlp.hidden}, {mlp.up, mlp.up_ax, mlp.up_hidden}}, x, batch, false);
    if (x.rounded) {
        Multiplier multiplier(kernels, batch);
        const int last = both.swiglu_begin(n, worker.id + 1, worker.count);
        for (int begin = both.swiglu_begin(n, worker.id, worker.count), end; begin < last; begin = end) {
            end = both.swiglu_end(begin, last);
            for (int i = 0; i < both.count; i++) multiplier.outputs(both.matmuls[i], begin, end);
            combine(begin, end);
        }
    } else {
        run(worker, both, batch);
        worker.sync();
        combine(worker.begin(n), worker.end(n));
    }
    worker.sync();
    project(worker, {{mlp.down, mlp.down_ax, y}}, mlp.hidden, batch, add);
}

}  // namespace neuronmm
