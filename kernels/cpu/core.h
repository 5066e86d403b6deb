// The C interface of the CPU core. Plain structs and pointers: the Python side describes them with ctypes.
//
// Every function works on row-major matrices, keeps activations in fp32 and accumulates in fp32. Nothing here
// allocates weights or frees what a caller gave.
#pragma once

#include <cstdint>

#define NEURONMM_EXPORT extern "C" __attribute__((visibility("default")))

namespace neuronmm {

constexpr int kMaxBatch = 8;  // rows one call takes; more of them are a GEMM, which other libraries do better

enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

// A matrix [rows, cols], contiguous. An int8 matrix means data[i][j] * scale[i].
struct Matrix {
    const void* data;
    const float* scale;  // [rows], int8 only
    int32_t rows, cols;
    int32_t type;

    int64_t row_bytes() const { return static_cast<int64_t>(cols) * (type == kFloat32 ? 4 : type == kBFloat16 ? 2 : 1); }
};

// y = a x + bias, or y = b (a x) + bias where b.data is not null.
struct Linear {
    Matrix a, b;
    const float* bias;  // [out] or null

    bool low_rank() const { return b.data != nullptr; }
    const Matrix& last() const { return low_rank() ? b : a; }
    // Whether a x is the same for both: factorised linears may have one A in common.
    bool shares_a(const Linear& other) const { return low_rank() && other.low_rank() && a.data == other.a.data; }
};

// One decoder layer. keys and values are this layer's cache [batch, kv_heads, max_len, head_dim].
struct Layer {
    const float *input_norm, *post_norm;  // [hidden]
    const float *q_norm, *k_norm;         // [head_dim] or null
    Linear q, k, v, o, gate, up, down;
    void *keys, *values;
};

// A decoder with its cache. cos and sin are tables [max_len, head_dim], the two halves of a row alike.
struct Model {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate;
    int32_t batch, max_len, cache_type;
    float eps, scale;  // of the norms; of the attention scores
    Matrix embedding;
    Linear head;
    const float* final_norm;
    const float *cos, *sin;
    const Layer* layer;
};

}  // namespace neuronmm

// "avx512bf16", "avx2", ...: what this processor runs. Setting it (for tests) takes a name, null for the best;
// the result is 0, or -1 where the processor or the build lacks it.
NEURONMM_EXPORT const char* neuronmm_isa();
NEURONMM_EXPORT int neuronmm_set_isa(const char* name);

// Whether the core was built with threads.
NEURONMM_EXPORT int neuronmm_threaded();

// x [batch, in] -> y [batch, out], both of x_type; bias in the linears is fp32.
NEURONMM_EXPORT void neuronmm_low_rank_linear(const neuronmm::Linear* linear, const void* x, int32_t type,
                                              int32_t batch, void* y, int32_t threads);

// x [batch, hidden] -> y [batch, hidden] = down(silu(gate(x)) * up(x)).
NEURONMM_EXPORT void neuronmm_low_rank_swiglu(const neuronmm::Linear* gate, const neuronmm::Linear* up,
                                              const neuronmm::Linear* down, const void* x, int32_t type,
                                              int32_t batch, void* y, int32_t threads);

// Whether neuronmm_step takes several tokens a row of this model: the processor has AVX2 or more, no matrix is fp32 and the
// cache is bf16.
NEURONMM_EXPORT int neuronmm_reads_prompts(const neuronmm::Model* model);

// `count` tokens a row: tokens [batch, count] are written to the slots from `slot` on of the cache, of which row i begins
// at starts[i]; logits [batch, vocab] follow the last of them. The result is 0; or -1, with nothing done, where a token is
// not in the vocabulary, a slot not in the cache, a start behind the last slot, or count above 1 and the model not read so.
NEURONMM_EXPORT int neuronmm_step(const neuronmm::Model* model, const int64_t* tokens, int32_t count,
                                  const int32_t* starts, int32_t slot, float* logits, int32_t threads);
