// One matmul of a phase, in whatever form its linear is.
#include "matmul.h"

#include "pivots.h"
#include "spare.h"

namespace neuronmm {

constexpr int kTogether = 64;               // rows multiplied before their results go among scattered pivots
constexpr int kTogetherStride = kTogether + 16;  // a power of two would make the batch compete for the same cache sets
constexpr int kInterleaved = 64;            // most outputs of one call of `interleave`

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
                          Strided addend) {
    if (begin >= end) return;
    const bool integer = kernels_.gemm_integer && (m.type == kInt8x16 || m.type == kInt4);
    if (p.x.rounded && !integer)
        kernels_.gemm_nt(m, begin, end, p.x.rounded, p.x.stride, batch_, y, ldy, bias, addend);
    else if (p.x.rounded)
        kernels_.gemm_integer(m, begin, end, prepared(p.x, m), batch_, y, ldy, bias, addend);
    else if (batch_ <= kMaxBatch)
        kernels_.gemv(m, begin, end, prepared(p.x, m), batch_, y, ldy, bias, addend);
    else  // the weights of this call are read again from the cache
        for (int b = 0; b < batch_; b += kMaxBatch) {
            const int n = std::min(kMaxBatch, batch_ - b);
            const Inputs x = kernels_.prepare(p.x.row(b), p.x.stride, m.cols, n, m.type, 0);
            const Strided added{addend.row(b), addend.stride};
            kernels_.gemv(m, begin, end, x, n, y + b * ldy, ldy, bias, added);
        }
}

Inputs Multiplier::prepared(Rows x, const Matrix& m) {
    for (const Prepared& p : prepared_)
        if (p.x == x.data && p.type == m.type && p.cols == m.cols) return p.inputs;
    Prepared& p = prepared_[next_];
    p = {x.data, m.type, m.cols, kernels_.prepare(x.data, x.stride, m.cols, batch_, m.type, next_)};
    next_ = (next_ + 1) % kSlots;
    return p.inputs;
}

void Multiplier::rows(const MatMul& p, int begin, int end) {
    if (p.row_form) {
        const Linear& linear = *p.row_form;
        if (contiguous(linear)) return rows_around_range(p, begin, end);
        return outputs_among_pivots(p, begin ? output_of_row(linear, begin) : 0, output_of_row(linear, end));
    }
    const Strided pivots{p.x.data + p.m->cols, p.x.stride};
    multiply(p, *p.m, begin, end, p.y.data, p.y.stride, p.bias, p.column_form ? pivots : p.accumulated());
    if (p.round) round_columns(kernels_, p.y, begin, end, p.m->rows, batch_);
}

void Multiplier::rows_around_range(const MatMul& p, int begin, int end) {
    const int first = output_of_pivot(*p.row_form, 0), rank = p.row_form->a.rows;
    const Strided before = p.accumulated(), after{before.data ? before.data + rank : nullptr, before.stride};
    multiply(p, *p.m, begin, std::min(end, first), p.y.data, p.y.stride, p.bias, before);
    multiply(p, *p.m, std::max(begin, first), end, p.y.data + rank, p.y.stride, p.bias ? p.bias + rank : nullptr,
             after);
}

// Outputs [begin, end) of a linear whose pivots are scattered. Some rows at a time are multiplied into a buffer, whose
// values are then written together with the pivots, in the order of the outputs.
void Multiplier::outputs_among_pivots(const MatMul& p, int begin, int end) {
    static thread_local Spare<float> spare;
    float* buffer = spare.reserve(static_cast<size_t>(batch_) * kTogetherStride);
    const Linear& linear = *p.row_form;
    const int rank = linear.a.rows, last = p.rows_before(end);
    int row = p.rows_before(begin), pivot = begin - row;
    for (int output = begin; output < end;) {
        const int first = row, n = std::min(kTogether, last - first);
        const Matrix part{static_cast<const char*>(p.m->data) + first * p.m->row_bytes(),
                          p.m->scale ? p.m->scale + first : nullptr, n, p.m->cols, p.m->type};
        multiply(p, part, 0, n, buffer, kTogetherStride, nullptr, {});
        for (int count = -1; count;) {  // until the next output is a row that is not multiplied
            uint64_t bits = 0;
            int pivots = 0;
            for (count = 0; count < kInterleaved && output + count < end; count++) {
                const bool is_pivot = pivot + pivots < rank && linear.pivots[pivot + pivots] == output + count;
                if (!is_pivot && row + count - pivots == first + n) break;
                bits |= static_cast<uint64_t>(is_pivot) << count;
                pivots += is_pivot;
            }
            kernels_.interleave({buffer + (row - first), kTogetherStride}, {p.x.data + pivot, p.x.stride}, bits, count,
                                p.bias ? p.bias + output : nullptr, p.add, batch_, p.y.data + output, p.y.stride);
            output += count, pivot += pivots, row += count - pivots;
        }
    }
}

void Multiplier::pivots(const MatMul& p, int begin, int end) const {
    const int first = output_of_pivot(*p.row_form, 0);
    for (int i = begin; i < end; i += kInterleaved) {
        const Strided h{p.x.data + i, p.x.stride};
        kernels_.interleave(h, h, ~uint64_t{0}, std::min(kInterleaved, end - i), p.bias ? p.bias + first + i : nullptr,
                            p.add, batch_, p.y.data + first + i, p.y.stride);
    }
}

void Multiplier::outputs(const MatMul& p, int begin, int end) {
    if (p.row_form && !contiguous(*p.row_form)) return outputs_among_pivots(p, begin, end);
    const int from = p.rows_before(begin), to = p.rows_before(end);
    if (p.row_form) pivots(p, begin - from, end - to);
    rows(p, from, to);
}

}  // namespace neuronmm
