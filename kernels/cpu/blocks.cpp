// Linears and SwiGLU over a team's shares of the weight rows.
#include "blocks.h"

#include <algorithm>
#include <new>

namespace neuronmm {
namespace {

constexpr int kBlock = 64;  // gate and up rows between two evaluations of silu

// The first projection of the group with this one's A, maybe itself.
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
        if (end == n) to[n] = 0;  // gemm takes columns in pairs
    }
}

// y (+)= rows begin to end of m times x, plus bias.
static void multiply(const Worker& worker, const Matrix& m, int begin, int end, Rows x, int batch, Rows y,
                     const float* bias, bool add) {
    const Kernels& kernels = worker.kernels;
    if (x.rounded)
        kernels.gemm(m, begin, end, x.rounded, x.stride, batch, y.data, y.stride, bias, add);
    else
        kernels.rows(m, begin, end, x.data, x.stride, batch, y.data, y.stride, bias, add);
}

// This worker's share of m times x, for another product.
static void multiply_share(const Worker& worker, const Matrix& m, Rows x, int batch, Rows y) {
    const int begin = worker.begin(m.rows), end = worker.end(m.rows);
    multiply(worker, m, begin, end, x, batch, y, nullptr, false);
    round_columns(worker.kernels, y, begin, end, m.rows, batch);
}

int max_rank(std::initializer_list<const Linear*> linears) {
    int rank = 0;
    for (const Linear* linear : linears)
        if (linear->low_rank()) rank = std::max(rank, linear->a.rows);
    return rank;
}

void project(const Worker& worker, std::initializer_list<Projection> group, Rows x, int batch, bool add) {
    bool factors = false;
    for (const Projection& p : group) {
        const Matrix& a = p.linear.a;
        if (!p.linear.low_rank() || &owner_of_a(p, group) != &p) continue;
        multiply_share(worker, a, x, batch, p.middle);
        factors = true;
    }
    if (factors) worker.sync();
    for (const Projection& p : group) {
        const Matrix& last = p.linear.last();
        const Rows& in = p.linear.low_rank() ? owner_of_a(p, group).middle : x;
        multiply(worker, last, worker.begin(last.rows), worker.end(last.rows), in, batch, p.y, p.linear.bias, add);
    }
}

void swiglu(const Worker& worker, const SwiGLU& mlp, Rows x, int batch, Rows y, bool add) {
    const Kernels& kernels = worker.kernels;
    const Linear* linears[] = {&mlp.gate, &mlp.up};
    const bool shared = mlp.up.shares_a(mlp.gate);
    const Rows middles[] = {mlp.gate_middle, shared ? mlp.gate_middle : mlp.up_middle};
    for (int i = 0; i < (shared ? 1 : 2); i++) {
        if (linears[i]->low_rank()) multiply_share(worker, linears[i]->a, x, batch, middles[i]);
    }
    if (mlp.gate.low_rank() || mlp.up.low_rank()) worker.sync();

    const int n = mlp.gate.last().rows, end = worker.end(n);
    const Rows results[] = {mlp.hidden, mlp.up_hidden};
    for (int begin = worker.begin(n); begin < end; begin += kBlock) {
        const int stop = std::min(begin + kBlock, end);
        for (int i = 0; i < 2; i++) {
            const Rows& in = linears[i]->low_rank() ? middles[i] : x;
            multiply(worker, linears[i]->last(), begin, stop, in, batch, results[i], linears[i]->bias, false);
        }
        for (int b = 0; b < batch; b++)
            kernels.swiglu(mlp.hidden.row(b) + begin, mlp.up_hidden.row(b) + begin, stop - begin);
        round_columns(kernels, mlp.hidden, begin, stop, n, batch);
    }
    worker.sync();
    project(worker, {{mlp.down, mlp.down_middle, y}}, mlp.hidden, batch, add);
}

}  // namespace neuronmm
