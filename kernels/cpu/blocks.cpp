// Linears and SwiGLU over a team's shares of the weight rows.
#include "blocks.h"

#include <algorithm>
#include <new>

namespace neuronmm {
namespace {

constexpr int kBlock = 64;  // gate and up rows between two evaluations of silu; a prompt's need no blocks

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
    const Rows rows{memory_.get() + used_, size(1, n)};
    used_ += size(batch, n);
    return rows;
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
        worker.kernels.rows(a, worker.begin(a.rows), worker.end(a.rows), x.data, x.stride, batch, p.middle.data,
                            p.middle.stride, nullptr, false);
        factors = true;
    }
    if (factors) worker.sync();
    for (const Projection& p : group) {
        const Matrix& last = p.linear.last();
        const Rows& in = p.linear.low_rank() ? owner_of_a(p, group).middle : x;
        worker.kernels.rows(last, worker.begin(last.rows), worker.end(last.rows), in.data, in.stride, batch, p.y.data,
                            p.y.stride, p.linear.bias, add);
    }
}

void swiglu(const Worker& worker, const SwiGLU& mlp, Rows x, int batch, Rows y, bool add) {
    const Kernels& kernels = worker.kernels;
    const Linear* linears[] = {&mlp.gate, &mlp.up};
    const bool shared = mlp.up.shares_a(mlp.gate);
    const Rows middles[] = {mlp.gate_middle, shared ? mlp.gate_middle : mlp.up_middle};
    for (int i = 0; i < (shared ? 1 : 2); i++) {
        const Matrix& a = linears[i]->a;
        if (linears[i]->low_rank())
            kernels.rows(a, worker.begin(a.rows), worker.end(a.rows), x.data, x.stride, batch, middles[i].data,
                         middles[i].stride, nullptr, false);
    }
    if (mlp.gate.low_rank() || mlp.up.low_rank()) worker.sync();

    const int n = mlp.gate.last().rows, end = worker.end(n), block = batch > kMaxBatch ? n : kBlock;
    const Rows results[] = {mlp.hidden, mlp.up_hidden};
    for (int begin = worker.begin(n); begin < end; begin += block) {
        const int stop = std::min(begin + block, end);
        for (int i = 0; i < 2; i++) {
            const Rows& in = linears[i]->low_rank() ? middles[i] : x;
            kernels.rows(linears[i]->last(), begin, stop, in.data, in.stride, batch, results[i].data, results[i].stride,
                         linears[i]->bias, false);
        }
        for (int b = 0; b < batch; b++)
            kernels.swiglu(mlp.hidden.row(b) + begin, mlp.up_hidden.row(b) + begin, stop - begin);
    }
    worker.sync();
    project(worker, {{mlp.down, mlp.down_middle, y}}, mlp.hidden, batch, add);
}

}  // namespace neuronmm
