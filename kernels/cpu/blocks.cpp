// Linears and SwiGLU over a team's shares of the weight rows.
#include "blocks.h"

#include <algorithm>
#include <new>

namespace neuronmm {
namespace {

constexpr int64_t kBlock = 16 << 10;  // bytes of weights that a worker takes at a time
constexpr int kPromptRows = 64;       // gate and up rows of a prompt between two evaluations of silu

// y (+)= m x + bias; `round`: y is an input of another product.
struct Product {
    const Matrix* m;
    Rows x, y;
    const float* bias;
    bool add, round;
};

// The matrices that are multiplied between two barriers. Their rows are one list, shared out by bytes, so that a worker
// reads one long stretch: wherever it begins anew, it waits for memory.
struct Phase {
    Product products[3];
    int count = 0;
    int64_t bytes = 0, widest = 1;

    void add(const Product& p) {
        products[count++] = p;
        bytes += p.m->rows * p.m->row_bytes();
        widest = std::max(widest, p.m->row_bytes());
    }
    // The first row of the list that begins at or behind this byte of it.
    int row_at(int64_t at) const {
        int row = 0;
        for (int i = 0; i < count; i++) {
            const Matrix& m = *products[i].m;
            const int64_t rows = (at + m.row_bytes() - 1) / m.row_bytes();
            row += static_cast<int>(std::clamp<int64_t>(rows, 0, m.rows));
            at -= m.rows * m.row_bytes();
        }
        return row;
    }
};

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

// Multiply what this worker gets of the phase. Inputs are prepared once, as long as they stay the same; a prompt's rows
// are taken all at once, which its GEMM does better with.
static void run(const Worker& worker, const Phase& phase, int batch) {
    const Kernels& kernels = worker.kernels;
    const bool prompt = phase.products[0].x.rounded;
    const Product* prepared = nullptr;
    Inputs inputs{};
    const auto multiply = [&](const Product& p, int begin, int end) {
        if (prompt) {
            kernels.gemm(*p.m, begin, end, p.x.rounded, p.x.stride, batch, p.y.data, p.y.stride, p.bias, p.add);
        } else {
            if (!prepared || prepared->x.data != p.x.data || prepared->m->type != p.m->type)
                inputs = kernels.prepare(p.x.data, p.x.stride, p.m->cols, batch, p.m->type);
            prepared = &p;
            kernels.rows(*p.m, begin, end, inputs, batch, p.y.data, p.y.stride, p.bias, p.add);
        }
        if (p.round) round_columns(kernels, p.y, begin, end, p.m->rows, batch);
    };
    const int first = phase.row_at(phase.bytes * worker.id / worker.count);
    const int last = phase.row_at(phase.bytes * (worker.id + 1) / worker.count);
    const int64_t block = prompt ? last - first : kBlock / phase.widest;
    worker.each(first, last, static_cast<int>(std::max<int64_t>(block, 1)), [&](int begin, int end) {
        for (int i = 0; i < phase.count; i++) {
            const int rows = phase.products[i].m->rows, from = std::max(begin, 0), to = std::min(end, rows);
            if (from < to) multiply(phase.products[i], from, to);
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

// The products with the A factors of the group, if any, and a barrier behind them; the result is what is left to do.
static Phase begin_group(const Worker& worker, std::initializer_list<Projection> group, Rows x, int batch, bool add) {
    Phase factors, last;
    for (const Projection& p : group) {
        const Projection& owner = owner_of_a(p, group);
        if (p.linear.low_rank() && &owner == &p) factors.add({&p.linear.a, x, p.middle, nullptr, false, true});
        last.add({&p.linear.last(), p.linear.low_rank() ? owner.middle : x, p.y, p.linear.bias, add, false});
    }
    if (factors.count) {
        run(worker, factors, batch);
        worker.sync();
    }
    return last;
}

void project(const Worker& worker, std::initializer_list<Projection> group, Rows x, int batch, bool add) {
    run(worker, begin_group(worker, group, x, batch, add), batch);
}

void swiglu(const Worker& worker, const SwiGLU& mlp, Rows x, int batch, Rows y, bool add) {
    const Kernels& kernels = worker.kernels;
    const int n = mlp.gate.last().rows, first = worker.begin(n), last = worker.end(n);
    const auto combine = [&](int begin, int end) {
        for (int b = 0; b < batch; b++)
            kernels.swiglu(mlp.hidden.row(b) + begin, mlp.up_hidden.row(b) + begin, end - begin);
        round_columns(kernels, mlp.hidden, begin, end, n, batch);
    };
    const Phase both = begin_group(
        worker, {{mlp.gate, mlp.gate_middle, mlp.hidden}, {mlp.up, mlp.up_middle, mlp.up_hidden}}, x, batch, false);
    if (x.rounded) {
        for (int begin = first; begin < last; begin += kPromptRows) {
            const int end = std::min(begin + kPromptRows, last);
            for (int i = 0; i < both.count; i++) {
                const Product& p = both.products[i];
                kernels.gemm(*p.m, begin, end, p.x.rounded, p.x.stride, batch, p.y.data, p.y.stride, p.bias, false);
            }
            combine(begin, end);
        }
    } else {
        run(worker, both, batch);
        worker.sync();
        combine(first, last);
    }
    worker.sync();
    project(worker, {{mlp.down, mlp.down_middle, y}}, mlp.hidden, batch, add);
}

}  // namespace neuronmm
