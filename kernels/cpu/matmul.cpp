// One matmul of a phase, in whatever form its linear is.
#include "matmul.h"

#include "pivots.h"
#include "spare.h"

namespace neuronmm {

constexpr int kScattered = 64;                // rows multiplied together before their results go to scattered outputs
constexpr int kScatterStride = kScattered + 16;  // a power of two would make the batch compete for the same cache sets

void round_columns(const Kernels& kernels, Rows rows, int begin, int end, int n, int batch) {
    if (!rows.rounded) return;
    for (int b = 0; b < batch; b++) {
        uint16_t* to = rows.rounded + b * rows.stride;
        kernels.narrow(rows.row(b) + begin, kBFloat16, end - begin, to + begin);
        if (end == n) to[n] = 0;  // the GEMMs read columns in pairs
    }
}

int MatMul::rows_before(int n) const { return row_form ? n - pivots_before(*row_form, n) : n; }

void Multiplier::multiply(const MatMul& p, const Matrix& m, int begin, int end, float* y, size_t ldy, const float* bias,
                          bool add) {
    if (begin >= end) return;
    if (p.x.rounded) {
        kernels_.gemm_nt(m, begin, end, p.x.rounded, p.x.stride, batch_, y, ldy, bias, add);
        return;
    }
    if (!prepared_ || prepared_->x.data != p.x.data || prepared_->m->type != m.type || prepared_->m->cols != m.cols)
        inputs_ = kernels_.prepare(p.x.data, p.x.stride, m.cols, batch_, m.type);
    prepared_ = &p;
    kernels_.gemv(m, begin, end, inputs_, batch_, y, ldy, bias, add);
}

// y[to] (+)= value + bias[to]
static inline void put(const MatMul& p, float* y, int to, float value) {
    if (p.bias) value += p.bias[to];
    y[to] = p.add ? y[to] + value : value;
}

void Multiplier::rows(const MatMul& p, int begin, int end) {
    if (p.row_form) return p.row_form->pivots ? rows_between_pivots(p, begin, end) : rows_around_range(p, begin, end);
    if (p.column_form)
        for (int b = 0; b < batch_; b++) {
            const float* pivots = p.x.row(b) + p.m->cols;
            std::copy(pivots + begin, pivots + end, p.y.row(b) + begin);
        }
    multiply(p, *p.m, begin, end, p.y.data, p.y.stride, p.bias, p.add || p.column_form);
    if (p.round) round_columns(kernels_, p.y, begin, end, p.m->rows, batch_);
}

void Multiplier::rows_around_range(const MatMul& p, int begin, int end) {
    const int first = p.row_form->first, rank = p.row_form->a.rows;
    multiply(p, *p.m, begin, std::min(end, first), p.y.data, p.y.stride, p.bias, p.add);
    multiply(p, *p.m, std::max(begin, first), end, p.y.data + rank, p.y.stride, p.bias ? p.bias + rank : nullptr,
             p.add);
}

void Multiplier::rows_between_pivots(const MatMul& p, int begin, int end) {
    static thread_local Spare<float> spare;
    float* block = spare.reserve(static_cast<size_t>(batch_) * kScatterStride);
    const Linear& linear = *p.row_form;
    const int rank = linear.a.rows;
    int output = output_of_row(linear, begin), pivot = output - begin;
    for (int from = begin; from < end; from += kScattered) {
        const int n = std::min(kScattered, end - from);
        int outputs[kScattered];
        for (int i = 0; i < n; i++) {
            for (; pivot < rank && linear.pivots[pivot] == output; pivot++) output++;
            outputs[i] = output++;
        }
        const Matrix part{static_cast<const char*>(p.m->data) + from * p.m->row_bytes(),
                          p.m->scale ? p.m->scale + from : nullptr, n, p.m->cols, p.m->type};
        multiply(p, part, 0, n, block, kScatterStride, nullptr, false);
        for (int b = 0; b < batch_; b++) {
            const float* values = block + b * kScatterStride;
            float* y = p.y.row(b);
            for (int i = 0; i < n; i++) put(p, y, outputs[i], values[i]);
        }
    }
}

void Multiplier::pivots(const MatMul& p, int begin, int end) const {
    const Linear& linear = *p.row_form;
    for (int b = 0; b < batch_; b++) {
        const float* h = p.x.row(b);
        float* y = p.y.row(b);
        if (linear.pivots)
            for (int i = begin; i < end; i++) put(p, y, linear.pivots[i], h[i]);
        else
            for (int i = begin; i < end; i++) put(p, y, linear.first + i, h[i]);
    }
}

void Multiplier::outputs(const MatMul& p, int begin, int end) {
    const int from = p.rows_before(begin), to = p.rows_before(end);
    if (p.row_form) pivots(p, begin - from, end - to);
    rows(p, from, to);
}

}  // namespace neuronmm
