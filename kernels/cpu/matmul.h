// One matmul of a phase, in whatever form its linear is: a GEMV for a decode step, a GEMM for a prefill.
#pragma once

#include "kernels.h"

namespace neuronmm {

// fp32 activations [batch, n] that one phase writes and the next one reads; row b begins at data + b * stride. For GEMMs,
// of more than kMaxBatch rows, `rounded` holds a bf16 copy with the same stride; the integer GEMM reads `data`. Without
// the copy a GEMV takes kMaxBatch rows at a time.
struct Rows {
    float* data;
    size_t stride;
    uint16_t* rounded = nullptr;

    float* row(int b) const { return data + b * stride; }
};

// Update columns [begin, end) of the bf16 copy of `batch` rows of n values, if there is one.
void round_columns(const Kernels& kernels, Rows rows, int begin, int end, int n, int batch);

// y (+)= m x + bias.
struct MatMul {
    const Matrix* m;
    Rows x, y;
    const float* bias;
    bool add;
    bool round;  // also update the bf16 copy of y, because another matmul reads it
    // m is the factor b of this linear in row form: y gets x at the pivots and m x at the other outputs.
    const Linear* row_form = nullptr;
    // m is the factor a of a linear in column form: y gets x[m.cols ...] + m x[0 ... m.cols).
    bool column_form = false;

    // What is added to y: y itself, or nothing.
    Strided accumulated() const { return {add ? y.data : nullptr, y.stride}; }
    // The number of rows of m that belong to the outputs before n.
    int rows_before(int n) const;
};

// Multiplies for one worker. Inputs are prepared once and reused while they stay the same: those of two matmuls, because
// a prefill computes gate and up in turns.
class Multiplier {
public:
    Multiplier(const Kernels& kernels, int batch) : kernels_(kernels), batch_(batch) {}

    // Multiply rows [begin, end) of m. Scattered pivots are copied together with the row before them.
    void rows(const MatMul& p, int begin, int end);
    // Copy pivots [begin, end) of a linear in row form to their outputs, which are a range.
    void pivots(const MatMul& p, int begin, int end) const;
    // Compute outputs [begin, end).
    void outputs(const MatMul& p, int begin, int end);

private:
    struct Prepared {
        const float* x = nullptr;
        int type = 0, cols = 0;
        Inputs inputs{};
    };

    // Rows [begin, end) of `m` to y; `m` is p.m or a part of it.
    void multiply(const MatMul& p, const Matrix& m, int begin, int end, float* y, size_t ldy, const float* bias,
                  Strided addend);
    // The rows of x in the form that `m` needs.
    Inputs prepared(Rows x, const Matrix& m);
    void rows_around_range(const MatMul& p, int begin, int end);
    void outputs_among_pivots(const MatMul& p, int begin, int end);

    const Kernels& kernels_;
    int batch_;
    Prepared prepared_[kSlots];
    int next_ = 0;
};

}  // namespace neuronmm
