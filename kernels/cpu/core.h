// The C interface of the CPU core. Plain structs and pointers: the Python side describes them with ctypes.
//
// Every function works on row-major matrices, keeps activations in fp32 and accumulates in fp32. The core
// neither copies nor frees what a caller passes in.
#pragma once

#include <cstdint>

#define NEURONMM_EXPORT extern "C" __attribute__((visibility("default")))

namespace neuronmm {

// Most rows of a decode step and of a GEMV, and of the ops of one linear or MLP.
constexpr int kMaxBatch = 8;

// An int8 matrix of type kInt8 multiplies activations in fp32, and one of type kInt8x16 activations rounded to 16 bits,
// which is faster. Both store the same bytes. An int4 matrix multiplies activations rounded to 16 bits.
enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt8x16 = 3, kInt4 = 4 };

// A contiguous matrix [rows, cols]. The value of an int8 element is data[i][j] * scale[i]; int4_impl.h describes int4.
struct Matrix {
    const void* data;
    const float* scale;  // [rows], int8 and int4 only
    int32_t rows, cols;
    int32_t type;

    static constexpr int kTile = 16;  // rows of int4 that are stored, and multiplied, together
    int tile() const { return type == kInt4 ? kTile : 1; }
    int64_t row_bytes() const {
        if (type == kInt4) return (static_cast<int64_t>(cols) + 31) / 32 * 18;
        return static_cast<int64_t>(cols) * (type == kFloat32 ? 4 : type == kBFloat16 ? 2 : 1);
    }
};

enum Form : int32_t { kTwo = 0, kRows = 1, kColumns = 2 };

// y = a x + bias if the linear is dense. A factorised one has the rank r = a.rows and an intermediate h [r]:
//   kTwo      h = a x                                   y = b h + bias
//   kRows     h = a x                                   y = (h at the pivots, b h at the other outputs in order) + bias
//   kColumns  h = x[a.cols ...] + a x[0 ... a.cols)     y = b h + bias
struct Linear {
    Matrix a, b;
    const float* bias;      // [out] or null
    const int32_t* pivots;  // kRows: [r], strictly increasing, or null if the pivots are [first, first + r)
    int32_t first;
    int32_t form;

    bool low_rank() const { return b.cols > 0 || form != kTwo; }
    const Matrix& last() const { return low_rank() ? b : a; }
    int in() const { return a.cols + (form == kColumns ? a.rows : 0); }
    int out() const { return last().rows + (form == kRows ? a.rows : 0); }
    // Whether both linears are factorised and have one h, which is computed once. Factors of different ranks may begin at
    // one address.
    bool shares_a(const Linear& other) const {
        const Matrix& its = other.a;
        return low_rank() && other.low_rank() && a.data == its.data && a.scale == its.scale && a.rows == its.rows &&
               a.cols == its.cols && a.type == its.type && (form == kColumns) == (other.form == kColumns);
    }
};

// One decoder layer. keys and values are this layer's cache [batch, kv_heads, max_len, head_dim].
struct Layer {
    const float *input_norm, *post_norm;  // [hidden]
    const float *q_norm, *k_norm;         // [head_dim] or null
    Linear q, k, v, o, gate, up, down;
    void *keys, *values;
};

// A decoder with its cache of `batch` lanes (rows). cos and sin are tables [max_len, head_dim]; both halves of a row are equal.
struct Model {
    int32_t layers, hidden, heads, kv_heads, head_dim, intermediate;
    int32_t batch, max_len, cache_type;
    float eps, scale;  // epsilon of the norms; factor of the attention scores
    Matrix embedding;
    Linear head;
    const float* final_norm;
    const float *cos, *sin;
    const Layer* layer;
};

}  // namespace neuronmm

// neuronmm_isa returns the name of the instruction set in use: "avx512bf16", "avx2", and so on. neuronmm_set_isa, for
// tests, selects one by name; null selects the best. It returns 0, or -1 if the processor or the build lacks it.
NEURONMM_EXPORT const char* neuronmm_isa();
NEURONMM_EXPORT int neuronmm_set_isa(const char* name);

// Write the sizes in bytes of Matrix, Linear, Layer and Model to sizes[4], for callers that describe the structs
// themselves.
NEURONMM_EXPORT void neuronmm_struct_sizes(int64_t* sizes);

// The digest of the sources that the core was built from, as setup.py passes it; empty without.
NEURONMM_EXPORT const char* neuronmm_sources();

// Number of element types.
NEURONMM_EXPORT int neuronmm_types();

// Whether the pivots of a linear in row form are strictly increasing outputs of it. The functions below rely on it.
NEURONMM_EXPORT int neuronmm_pivots_fit(const neuronmm::Linear* linear);

// Whether the core was built with OpenMP.
NEURONMM_EXPORT int neuronmm_threaded();

// x [batch, in] -> y [batch, out], both of element type `type`; the bias is fp32.
NEURONMM_EXPORT void neuronmm_low_rank_linear(const neuronmm::Linear* linear, const void* x, int32_t type,
                                              int32_t batch, void* y, int32_t threads);

// x [rows, in] -> y [rows, out] for one to three linears of one input, dense or factorised, and any number of rows. The
// results stand side by side; a shared A is multiplied once. Returns -1 if the linears have other widths.
NEURONMM_EXPORT int neuronmm_linear_group(const neuronmm::Linear* linears, int32_t count, const void* x, int32_t type,
                                          int32_t rows, int64_t in, void* y, int64_t out, int32_t threads);

// x [batch, hidden] -> y [batch, hidden] = down(silu(gate(x)) * up(x)), both of element type `type`.
NEURONMM_EXPORT void neuronmm_low_rank_swiglu(const neuronmm::Linear* gate, const neuronmm::Linear* up,
                                              const neuronmm::Linear* down, const void* x, int32_t type,
                                              int32_t batch, void* y, int32_t threads);

// Whether neuronmm_step can prefill this model, that is, take several tokens per row: the processor has at least AVX2,
// no matrix is fp32 and the cache is bf16.
NEURONMM_EXPORT int neuronmm_reads_prompts(const neuronmm::Model* model);

// Process tokens [batch, count] and write their keys and values to the cache slots [slot, slot + count). Row i of the
// cache begins at slot starts[i] (left padding). logits [batch, vocab] are those of the last token of each row. Returns
// 0 on success. Returns -1 and changes nothing if a token id, a slot or a start is out of range, or if `count` > 1 and
// the model does not support prefill here.
NEURONMM_EXPORT int neuronmm_step(const neuronmm::Model* model, const int64_t* tokens, int32_t count,
                                  const int32_t* starts, int32_t slot, float* logits, int32_t threads);

// The same, returning the logits [batch, count, vocab] of every token, for batch * count up to kMaxBatch. Logits and
// cache equal those of `count` steps of one token bit by bit. Every token's slot has to be at or after its row's start.
NEURONMM_EXPORT int neuronmm_verify(const neuronmm::Model* model, const int64_t* tokens, int32_t count,
                                    const int32_t* starts, int32_t slot, float* logits, int32_t threads);

// One decode step of `count` independent sequences, at most kMaxBatch: token i continues the sequence that fills the
// cache slots [0, slots[i]) of lane lanes[i]. logits [count, vocab] equal those of each sequence alone bit by bit. The
// cache may have more lanes than a step takes. Returns -1, as above, also if a lane is out of range or named twice.
NEURONMM_EXPORT int neuronmm_step_lanes(const neuronmm::Model* model, const int64_t* tokens, int32_t count,
                                        const int32_t* lanes, const int32_t* slots, float* logits, int32_t threads);
