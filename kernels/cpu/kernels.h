// The kernels of one instruction set, and the choice of the set.
#pragma once

#include <cstddef>

#include "core.h"

namespace neuronmm {

// Input rows in the form that `gemv`, or `gemm_integer`, needs for one element type of the matrix.
struct Inputs {
    const void* data;
    size_t stride;
};

// fp32 rows, or none where `data` is null; row b begins at data + b * stride.
struct Strided {
    const float* data;
    size_t stride;

    const float* row(int b) const { return data ? data + b * stride : nullptr; }
};

constexpr int kCacheLine = 64;  // bytes
constexpr int kSlots = 2;  // prepared inputs that a thread keeps at once: a prefill computes gate and up in turns

struct Kernels {
    const char* name;
    // Convert fp32 rows x[b * ldx] to the form that matrices of `type` need: for `gemv`, or for `gemm_integer` if there
    // are more than kMaxBatch rows. The result is valid until the same thread calls this again with the same slot, which
    // is below kSlots.
    Inputs (*prepare)(const float* x, size_t ldx, int cols, int batch, int type, int slot);
    // y[b * ldy + i] = m[i] . x[b] + bias[i] + addend[b][i] for begin <= i < end and up to kMaxBatch rows b. bias and
    // addend.data may be null; the addend may be y.
    void (*gemv)(const Matrix& m, int begin, int end, Inputs x, int batch, float* y, size_t ldy, const float* bias,
                 Strided addend);
    // y[b * ldy + i] (+)= v + bias[i] for 0 <= i < n <= 64, where v is the next value of ones[b] if bit i of `bits` is
    // set, and of zeros[b] otherwise. bias may be null; `add` accumulates. A vector of either may be read past the last
    // value in use.
    void (*interleave)(Strided zeros, Strided ones, uint64_t bits, int n, const float* bias, bool add, int batch,
                       float* y, size_t ldy);
    // gate[i] = silu(gate[i]) * up[i]
    void (*swiglu)(float* gate, const float* up, int n);
    // out[b] = softmax(keys . q[b] * scale) . values for `count` queries, which follow each other, as the outputs do;
    // scores[b * lds ...] gets the probabilities. The scale is positive.
    void (*attend)(const Matrix& keys, const Matrix& values, const float* q, int count, float scale, float* scores,
                   size_t lds, float* out);
    // scores[i] = softmax(scores * scale)[i], with a positive scale
    void (*softmax)(float* scores, int n, float scale);
    // out[i] = x[i] * weight[i] / rms(x)
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
    // RoPE in place of one head; head, cos and sin have 2 * half elements.
    void (*rotate)(float* head, const float* cos, const float* sin, int half);
    // Convert an element type to fp32, and fp32 to an element type (round to nearest even).
    void (*widen)(const void* from, int type, int n, float* to);
    void (*narrow)(const float* from, int type, int n, void* to);
    // GEMMs of any number of bf16 rows x: `gemm_nt` is `gemv` for them, y = x m^T, with bf16, int8 and int4 matrices, and
    // `gemm_nn` is y = x m with bf16 ones. If x has an odd number of columns, one zero column follows. Null if other
    // libraries are faster.
    void (*gemm_nt)(const Matrix& m, int begin, int end, const uint16_t* x, size_t ldx, int batch, float* y, size_t ldy,
                    const float* bias, Strided addend);
    void (*gemm_nn)(const Matrix& m, const uint16_t* x, size_t ldx, int batch, float* y, size_t ldy);
    // `gemv` for more than kMaxBatch rows and matrices that multiply activations rounded to 16 bits. Null if `gemm_nt`
    // is faster.
    void (*gemm_integer)(const Matrix& m, int begin, int end, Inputs x, int batch, float* y, size_t ldy,
                         const float* bias, Strided addend);
};

// One function per translation unit; it returns null if this build lacks the instruction set.
const Kernels* kernels_avx512bf16();
const Kernels* kernels_avx512bf16_fp32();  // the same with `gemm_nt` and `gemm_nn` in fp32
const Kernels* kernels_avx512bf16_amx();   // and with both in Intel's matrix unit
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_portable();

// The kernels in use.
const Kernels& active();

}  // namespace neuronmm
