// GEMVs of up to kMaxBatch rows. Each weight row is read once.
#pragma once

#include "int4_impl.h"
#include "spare.h"
#include "vector_impl.h"

namespace neuronmm {
namespace {

// Dot product step for weights of type T: widen kWidth weights to fp32 and multiply them with as many inputs, one sum
// per lane. kSums steps are independent of each other.
template <class T>
struct WidenedDot {
    typedef T Weight;
    typedef float Input;
    typedef Vec Wide;
    static constexpr int kWidth = L, kSums = 4;
    static Wide read(const T* w) { return load(w); }
    static Wide read(const T* w, int n) { return load_part(w, n); }
    static Vec add(Vec sums, Wide w, const float* x) { return sums + w * load(x); }
    static Vec add(Vec sums, Wide w, const float* x, int n) { return sums + w * load_part(x, n); }
};

#if defined(__AVX512BF16__)
// Dot product step for bf16 weights with the processor's instruction: 2 L products at a time, two neighbours per lane.
// The inputs are rounded to bf16 beforehand; sums are fp32.
struct Bf16PairDot {
    typedef uint16_t Weight;
    typedef uint16_t Input;
    typedef __m512bh Wide;
    static constexpr int kWidth = 2 * L, kSums = 2;
    static Wide read(const uint16_t* w) { return (Wide)_mm512_loadu_si512(w); }
    static Wide read(const uint16_t* w, int n) { return (Wide)_mm512_maskz_loadu_epi16((1u << n) - 1, w); }
    static Vec add(Vec sums, Wide w, const uint16_t* x) { return _mm512_dpbf16_ps(sums, w, read(x)); }
    static Vec add(Vec sums, Wide w, const uint16_t* x, int n) { return _mm512_dpbf16_ps(sums, w, read(x, n)); }
};
#endif

// Accumulators that fit the registers, beside the weights of AVX2's 16 registers. They bound the input rows of one pass
// over a weight row. After the first pass the weight row is in the first-level cache.
#if defined(__AVX512F__)
constexpr int kAccumulators = 16;
#else
constexpr int kAccumulators = 12;
#endif

// w . x[b] as parts[b], a sum per lane. Several accumulators along the row hide the latency of the additions. Their
// number is the same for every B, so that a row's result does not depend on the other rows: a step of several tokens
// equals as many steps of one, bit by bit.
template <class P, int B>
inline void row_parts(const typename P::Weight* w, int cols, const typename P::Input* x, size_t ldx, Vec* parts) {
    constexpr int U = P::kSums, W = P::kWidth;
    Vec acc[B][U] = {};
    int j = 0;
    for (; j + U * W <= cols; j += U * W) {
        fetch_next<U * W * sizeof *w>(w + j);
#pragma GCC unroll 4
        for (int u = 0; u < U; u++) {
            const auto wide = P::read(w + j + u * W);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) acc[b][u] = P::add(acc[b][u], wide, x + b * ldx + j + u * W);
        }
    }
    for (; j + W <= cols; j += W) {
        const auto wide = P::read(w + j);
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) acc[b][0] = P::add(acc[b][0], wide, x + b * ldx + j);
    }
    if (j < cols) {
        const auto wide = P::read(w + j, cols - j);
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) acc[b][0] = P::add(acc[b][0], wide, x + b * ldx + j, cols - j);
    }
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) {
        parts[b] = acc[b][0];
#pragma GCC unroll 4
        for (int u = 1; u < U; u++) parts[b] += acc[b][u];
    }
}

// sums[b] = w . x[b]
template <class P, int B>
inline void row_times(const typename P::Weight* w, int cols, const typename P::Input* x, size_t ldx, float* sums) {
    Vec parts[B];
    row_parts<P, B>(w, cols, x, ldx, parts);
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) sums[b] = sum(parts[b]);
}

// Multiply one weight row at a time, in address order, which the hardware prefetchers follow.
template <class P, int B>
void gemv_of(const Matrix& m, int begin, int end, const typename P::Input* x, size_t ldx, float* y, size_t ldy,
             const float* bias, Strided addend) {
    constexpr int most = kAccumulators / P::kSums, G = B < most ? B : most;
    const int cols = m.cols;
    for (int i = begin; i < end; i++) {
        const auto* w = static_cast<const typename P::Weight*>(m.data) + static_cast<size_t>(i) * cols;
        fetch_row(w, cols * sizeof *w);
        float sums[B];
        int first = 0;
        for (; first + G <= B; first += G) row_times<P, G>(w, cols, x + first * ldx, ldx, sums + first);
        if constexpr (B % G) row_times<P, B % G>(w, cols, x + first * ldx, ldx, sums + first);
        const float scale = m.scale ? m.scale[i] : 1.0f, offset = bias ? bias[i] : 0.0f;
        for (int b = 0; b < B; b++) {
            // In double the product is exact, so it does not matter whether the compiler fuses it with the sum.
            const float value = static_cast<float>(double{sums[b]} * scale + offset);
            y[b * ldy + i] = addend.data ? addend.data[b * addend.stride + i] + value : value;
        }
    }
}

template <class P>
void gemv_typed(const Matrix& m, int begin, int end, Inputs inputs, int batch, float* y, size_t ldy, const float* bias,
                Strided addend) {
    const auto* x = static_cast<const typename P::Input*>(inputs.data);
    const size_t ldx = inputs.stride;
    switch (batch) {
        case 1: return gemv_of<P, 1>(m, begin, end, x, ldx, y, ldy, bias, addend);
        case 2: return gemv_of<P, 2>(m, begin, end, x, ldx, y, ldy, bias, addend);
        case 3: return gemv_of<P, 3>(m, begin, end, x, ldx, y, ldy, bias, addend);
        case 4: return gemv_of<P, 4>(m, begin, end, x, ldx, y, ldy, bias, addend);
        case 5: return gemv_of<P, 5>(m, begin, end, x, ldx, y, ldy, bias, addend);
        case 6: return gemv_of<P, 6>(m, begin, end, x, ldx, y, ldy, bias, addend);
        case 7: return gemv_of<P, 7>(m, begin, end, x, ldx, y, ldy, bias, addend);
        case 8: return gemv_of<P, 8>(m, begin, end, x, ldx, y, ldy, bias, addend);
    }
}

template <int B = kMaxBatch>
void gemv_rounded(const Matrix& m, int begin, int end, Inputs x, int batch, float* y, size_t ldy, const float* bias,
                  Strided addend) {
    const auto run = m.type == kInt4 ? gemv_int4<B> : gemv_int8<B>;
    if (batch == B) return run(m, begin, end, x, y, ldy, bias, addend);
    if constexpr (B > 1) gemv_rounded<B - 1>(m, begin, end, x, batch, y, ldy, bias, addend);
}

#if defined(__AVX512BF16__)
using Bf16Dot = Bf16PairDot;
#else
using Bf16Dot = WidenedDot<uint16_t>;
#endif

Inputs prepare(const float* x, size_t ldx, int cols, int batch, int type, int slot) {
#if defined(__AVX512BF16__)
    if (type == kBFloat16) {
        static thread_local Spare<uint16_t> spares[kSlots];
        const size_t stride = (cols + 31) / 32 * 32;
        uint16_t* to = spares[slot].reserve(stride * batch);
        for (int b = 0; b < batch; b++) convert(x + b * ldx, cols, to + b * stride);
        return {to, stride};
    }
#endif
    if (type == kInt8x16 || type == kInt4) return prepare_rounded(x, ldx, cols, batch, type == kInt4, slot);
    return {x, ldx};
}

void gemv(const Matrix& m, int begin, int end, Inputs x, int batch, float* y, size_t ldy, const float* bias,
          Strided addend) {
    switch (m.type) {
        case kFloat32: return gemv_typed<WidenedDot<float>>(m, begin, end, x, batch, y, ldy, bias, addend);
        case kBFloat16: return gemv_typed<Bf16Dot>(m, begin, end, x, batch, y, ldy, bias, addend);
        case kInt8: return gemv_typed<WidenedDot<int8_t>>(m, begin, end, x, batch, y, ldy, bias, addend);
        case kInt8x16:
        case kInt4: return gemv_rounded(m, begin, end, x, batch, y, ldy, bias, addend);
    }
}

}  // namespace
}  // namespace neuronmm
