// GEMV of int8 and int4 matrices in integers: the activations of a token are rounded to 16 bits, with one scale for all
// of them.
//
// The integer of a weight times a 16-bit activation is exact, and so is the sum of a row: int32 over some columns, fp64
// over the rest. All instruction sets therefore give the same sums, in whatever order and for however many tokens at once.
// The step of an activation is 1/32767 of the token's largest one. With errors spread evenly over a step, that of n
// activations is at most sqrt(n) / 113500 of their norm, that of bf16 about 1/600.
#pragma once

#include <math.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "int4_impl.h"
#include "spare.h"

namespace neuronmm {
namespace {

typedef int16_t ShortHalf __attribute__((vector_size(2 * L)));

constexpr int kLine = 64;           // bytes between prefetches: this kernel gains from every line (docs/log.md)
constexpr int kExact8 = 512 * L;    // columns whose products fit int32 lanes: 512 of at most 128 * 32767 in each
constexpr int kExact4 = kShorts / 4;  // blocks whose products fit two vectors: 16 of at most 4080 * 32767 in a lane
constexpr int kHeader = 32;         // 16-bit cells before the activations of a token; the first two hold their scale
constexpr int kLevels = 32767;      // steps from zero to the largest activation
constexpr float kSmallest = 1e-30f;  // the least largest activation; below it the scale would not be a normal number

inline ShortVec load_shorts(const int16_t* p) {
    ShortVec v;
    memcpy(&v, p, sizeof v);
    return v;
}

#if defined(__AVX512F__)
inline IVec nearest(Vec v) { return (IVec)_mm512_cvtps_epi32(v); }
inline ShortVec load_shorts(const int8_t* p) {
    return (ShortVec)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
inline ShortVec load_shorts_part(const int8_t* p, int n) {
    return (ShortVec)_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((1u << n) - 1, p));
}
template <int N>
inline double exact_sum(const IVec (&v)[N]) {
    __m512d sums = _mm512_setzero_pd();
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        const __m512i all = (__m512i)v[i];
        sums = _mm512_add_pd(sums, _mm512_add_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(all)),
                                                 _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(all, 1))));
    }
    return _mm512_reduce_add_pd(sums);
}
#elif defined(__AVX2__)
inline IVec nearest(Vec v) { return (IVec)_mm256_cvtps_epi32(v); }
inline ShortVec load_shorts(const int8_t* p) {
    return (ShortVec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
template <int N>
inline double exact_sum(const IVec (&v)[N]) {
    __m256d four = _mm256_setzero_pd();
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        const __m256i all = (__m256i)v[i];
        four = _mm256_add_pd(four, _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(all)),
                                                 _mm256_cvtepi32_pd(_mm256_extracti128_si256(all, 1))));
    }
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
#else
inline IVec nearest(Vec v) {
#if defined(__SSE2__)
    return (IVec)_mm_cvtps_epi32(v);
#else
    return IVec{int32_t(lrintf(v[0])), int32_t(lrintf(v[1])), int32_t(lrintf(v[2])), int32_t(lrintf(v[3]))};
#endif
}
inline ShortVec load_shorts(const int8_t* p) {
    typedef int8_t Bytes __attribute__((vector_size(kShorts)));
    Bytes bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, ShortVec);
}
template <int N>
inline double exact_sum(const IVec (&v)[N]) {
    int64_t sum = 0;
    for (int i = 0; i < N; i++) sum += (int64_t{v[i][0]} + v[i][1]) + (int64_t{v[i][2]} + v[i][3]);
    return double(sum);
}
#endif

#if !defined(__AVX512F__)
inline ShortVec load_shorts_part(const int8_t* p, int n) {
    int8_t buffer[kShorts] = {};
    memcpy(buffer, p, n);
    return load_shorts(buffer);
}
#endif

// Add the products of neighbours to the lane that both belong to.
inline IVec add_products(IVec sums, ShortVec a, ShortVec b) {
#if defined(__AVX512VNNI__)
    return (IVec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
    return sums + (IVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sums + (IVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return sums + (IVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const IVec even = ((IVec)((UVec)a << 16) >> 16) * ((IVec)((UVec)b << 16) >> 16);
    return sums + even + ((IVec)a >> 16) * ((IVec)b >> 16);
#endif
}

// The largest |x[j]|, or NaN if there is one: as integers, the bits of non-negative floats are in the order of the
// numbers, and those of NaN follow.
inline float largest(const float* x, int n) {
    IVec top = {};
    for (int j = 0; j < n; j += L) {
        const IVec bits = (IVec)(j + L <= n ? load(x + j) : load_part(x + j, n - j)) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    int32_t best = 0;
    for (int i = 0; i < L; i++) best = top[i] > best ? top[i] : best;
    float value;
    memcpy(&value, &best, sizeof value);
    return value;
}

// Round `n` activations to to[kHeader ...], up to a whole vector; the rest of the vector is zero. `to` begins with their scale.
inline void round_activations(const float* x, int n, int16_t* to) {
    float top = largest(x, n);
    if (top < kSmallest) top = kSmallest;
    const float scale = top / kLevels, inverse = kLevels / top;
    memcpy(to, &scale, sizeof scale);
    for (int j = 0; j < n; j += L) {
        const Vec v = j + L <= n ? load(x + j) : load_part(x + j, n - j);
        const ShortHalf steps = __builtin_convertvector(nearest(v * inverse), ShortHalf);
        memcpy(to + kHeader + j, &steps, sizeof steps);
    }
}

Inputs prepare_rounded(const float* x, size_t ldx, int cols, int batch) {
    static thread_local Spare<int16_t> spare;
    const size_t stride = kHeader + (cols + kBlock - 1) / kBlock * kBlock;
    int16_t* to = spare.reserve(stride * batch);
    for (int b = 0; b < batch; b++) {
        memset(to + b * stride + stride - kBlock, 0, kBlock * sizeof *to);
        round_activations(x + b * ldx, cols, to + b * stride);
    }
    return {to, stride};
}

struct Int8Dot {
    // total[b] = row i . token b, whose activations begin at q + b * ldq
    template <int B>
    static void row(const Matrix& m, int i, const int16_t* q, size_t ldq, double* total) {
        constexpr int U = B == 1 ? 4 : B <= 4 ? 2 : 1, W = kShorts;
        const int8_t* w = static_cast<const int8_t*>(m.data) + static_cast<size_t>(i) * m.cols;
        for (int from = 0; from < m.cols; from += kExact8) {
            const int to = m.cols - from < kExact8 ? m.cols : from + kExact8;
            IVec acc[B][U] = {};
            int j = from;
            for (; j + U * W <= to; j += U * W)
#pragma GCC unroll 4
                for (int u = 0; u < U; u++) {
                    const ShortVec wide = load_shorts(w + j + u * W);
#pragma GCC unroll 8
                    for (int b = 0; b < B; b++)
                        acc[b][u] = add_products(acc[b][u], wide, load_shorts(q + b * ldq + j + u * W));
                }
            for (; j < to; j += W) {
                const ShortVec wide = j + W <= to ? load_shorts(w + j) : load_shorts_part(w + j, to - j);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) acc[b][0] = add_products(acc[b][0], wide, load_shorts(q + b * ldq + j));
            }
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                IVec sums[] = {acc[b][0]};
#pragma GCC unroll 4
                for (int u = 1; u < U; u++) sums[0] += acc[b][u];
                total[b] += exact_sum(sums);
            }
        }
    }
};

struct Int4Dot {
    template <int B>
    static void row(const Matrix& m, int i, const int16_t* q, size_t ldq, double* total) {
        constexpr int U = B <= 2 ? 2 : 1;
        const Int4Row w = int4_row(m, i);
        const int blocks = (m.cols + kBlock - 1) / kBlock;
        for (int from = 0; from < blocks; from += U * kExact4) {
            const int to = blocks - from < U * kExact4 ? blocks : from + U * kExact4;
            IVec acc[B][2 * U] = {};  // of the lower and upper groups of U blocks
            int k = from;
            for (; k + U <= to; k += U)
#pragma GCC unroll 2
                for (int u = 0; u < U; u++) add_block<B>(w, k + u, q, ldq, 2 * u, acc);
            for (; k < to; k++) add_block<B>(w, k, q, ldq, 0, acc);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) total[b] += exact_sum(acc[b]);
        }
    }

    // Add the products of block k to the accumulators `at` and at + 1 of each token.
    template <int B, int N>
    static void add_block(Int4Row w, int k, const int16_t* q, size_t ldq, int at, IVec (&acc)[B][N]) {
        const uint8_t* groups = w.groups + 4 * k;
#pragma GCC unroll 4
        for (int j = 0; j < kGroup; j += kShorts) {
            const ShortVec bytes = load_bytes(w.blocks + k * kGroup + j);
            const ShortVec low = in_group(bytes & 15, groups), high = in_group(bytes >> 4, groups + 2);
            const int16_t* tokens = q + k * kBlock + j;
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                acc[b][at] = add_products(acc[b][at], low, load_shorts(tokens + b * ldq));
                acc[b][at + 1] = add_products(acc[b][at + 1], high, load_shorts(tokens + b * ldq + kGroup));
            }
        }
    }
};

// One weight row at a time, like `gemv_of`.
template <class W, int B>
void gemv_integers(const Matrix& m, int begin, int end, Inputs x, float* y, size_t ldy, const float* bias,
                   Strided addend) {
    const auto* tokens = static_cast<const int16_t*>(x.data);
    const int64_t row_bytes = m.row_bytes();
    for (int i = begin; i < end; i++) {
        const char* w = static_cast<const char*>(m.data) + i * row_bytes;
        for (int64_t at = 0; at < row_bytes; at += kLine) __builtin_prefetch(w + kAhead + at, 0, 2);
        double total[B] = {};
        W::template row<B>(m, i, tokens + kHeader, x.stride, total);
        const float offset = bias ? bias[i] : 0.0f;  // without branches, like `gemv_of`
        for (int b = 0; b < B; b++) {
            float scale;
            memcpy(&scale, tokens + b * x.stride, sizeof scale);
            const float value = static_cast<float>(total[b]) * scale * m.scale[i] + offset;
            y[b * ldy + i] = addend.data ? addend.data[b * addend.stride + i] + value : value;
        }
    }
}

template <class W, int B = kMaxBatch>
void gemv_rounded(const Matrix& m, int begin, int end, Inputs x, int batch, float* y, size_t ldy, const float* bias,
                  Strided addend) {
    if (batch == B) return gemv_integers<W, B>(m, begin, end, x, y, ldy, bias, addend);
    if constexpr (B > 1) gemv_rounded<W, B - 1>(m, begin, end, x, batch, y, ldy, bias, addend);
}

}  // namespace
}  // namespace neuronmm
