// What one instruction set provides, and the choice among the sets.
#pragma once

#include <cstddef>

#include "core.h"

namespace neuronmm {

// Rows of inputs as `rows` takes them for one type of matrix.
struct Inputs {
    const void* data;
    size_t stride;
};

struct Kernels {
    const char* name;
    // fp32 rows x[b * ldx] brought into that form; good until the same thread's next call.
    Inputs (*prepare)(const float* x, size_t ldx, int cols, int batch, int type);
    // y[b * ldy + i] = m[i] . x[b] + bias[i] for begin <= i < end, up to kMaxBatch rows; `add` adds it to what is there.
    void (*rows)(const Matrix& m, int begin, int end, Inputs x, int batch, float* y, size_t ldy, const float* bias,
                 bool add);
    // gate[i] = silu(gate[i]) * up[i]
    void (*swiglu)(float* gate, const float* up, int n);
    // scores[i] = softmax(scores * scale)[i]
    void (*softmax)(float* scores, int n, float scale);
    // out[j] = sum over i of weights[i] * m[i][j]
    void (*weighted_sum)(const Matrix& m, const float* weights, float* out);
    // out[i] = x[i] * weight[i] / rms(x)
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
    // RoPE of one head of 2 * half elements, in place; cos and sin likewise.
    void (*rotate)(float* head, const float* cos, const float* sin, int half);
    // Element type to fp32 and back, to the nearest even.
    void (*widen)(const void* from, int type, int n, float* to);
    void (*narrow)(const float* from, int type, int n, void* to);
    // The same as `rows` and `weighted_sum` for any number of rows of x, in bf16, of bf16 and int8 matrices: y[b] = m . x[b]
    // and y[b] = x[b] . m. Of an odd number of columns in x another follows, zero. Null where other libraries do better.
    void (*gemm)(const Matrix& m, int begin, int end, const uint16_t* x, size_t ldx, int batch, float* y, size_t ldy,
                 const float* bias, bool add);
    void (*mix)(const Matrix& m, const uint16_t* x, size_t ldx, int batch, float* y, size_t ldy);
};

// One each per translation unit; null where it was not built for.
const Kernels* kernels_avx512bf16();
const Kernels* kernels_avx512bf16_fp32();  // the same but for `gemm` and `mix`, in fp32
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_portable();

// The kernels in use.
const Kernels& active();

}  // namespace neuronmm
