// Activations rounded to 16 bits, with one scale per token, and the GEMV of int8 matrices with them in integers.
//
// An int8 weight times a 16-bit activation is exact, and so is the sum of a row: int32 over kExact columns, fp64 over
// the rest. All instruction sets therefore give the same sums, in whatever order and for however many tokens at once.
// The step of an activation is 1/32767 of the token's largest one. With errors spread evenly over a step, that of n
// activations is at most sqrt(n) / 113500 of their norm, that of bf16 about 1/600.
#pragma once

#include <math.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "spare.h"
#include "vector_impl.h"

namespace neuronmm {
namespace {

typedef int16_t ShortHalf __attribute__((vector_size(2 * L)));

constexpr int kExact = 512 * L;     // columns whose products fit the int32 lanes: 512 of at most 128 * 32767 in each
constexpr int kHeader = 32;         // 16-bit cells before the activations of a token; the first two hold their scale
constexpr int kGroup = 32;          // columns of a group of int4
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
inline double exact_sum(IVec v) {
    const __m512i all = (__m512i)v;
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(all)),
                                              _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(all, 1))));
}
#elif defined(__AVX2__)
inline IVec nearest(Vec v) { return (IVec)_mm256_cvtps_epi32(v); }
inline ShortVec load_shorts(const int8_t* p) {
    return (ShortVec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
inline double exact_sum(IVec v) {
    const __m256i all = (__m256i)v;
    const __m256d four = _mm256_add_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(all)),
                                       _mm256_cvtepi32_pd(_mm256_extracti128_si256(all, 1)));
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
    typedef int8_t Bytes __attribute__((vector_size(2 * L)));
    Bytes bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, ShortVec);
}
inline double exact_sum(IVec v) { return double((int64_t{v[0]} + v[1]) + (int64_t{v[2]} + v[3])); }
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

// Round `n` activations to to[kHeader ...], up to a whole vector; the rest of it is zero. `to` begins with their scale.
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

// Int4: the sums of the activations of each group follow the activations of a token. A GEMM reads 16 times the sum,
// which fp32 holds exactly. A GEMV reads integers of 16 bits, of two groups at a time: the lower kLowerBits bits of both
// sums, then the bits above them.
constexpr int kLowerBits = 15;
inline int16_t* sums_of(int16_t* token, int cols) { return token + kHeader + (cols + kGroup - 1) / kGroup * kGroup; }
inline const int16_t* sums_of(const int16_t* token, int cols) { return sums_of(const_cast<int16_t*>(token), cols); }

// Int4 where an instruction multiplies bytes: put the upper bytes of every eight activations before the lower ones, both
// in the order of a word's columns (`int4_impl.h`).
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define NEURONMM_BYTES 1
inline void split_bytes(int16_t* group) {
    const __m128i order = _mm_setr_epi8(1, 9, 3, 11, 5, 13, 7, 15, 0, 8, 2, 10, 4, 12, 6, 14);
    for (int j = 0; j < kGroup; j += 8) {
        __m128i* eight = (__m128i*)(group + j);
        _mm_storeu_si128(eight, _mm_shuffle_epi8(_mm_loadu_si128(eight), order));
    }
}
#else
inline void split_bytes(int16_t*) {}
#endif

Inputs prepare_rounded(const float* x, size_t ldx, int cols, int batch, bool int4, int slot) {
    static thread_local Spare<int16_t> spares[kSlots];
    const int groups = (cols + kGroup - 1) / kGroup;
    const size_t stride = kHeader + groups * kGroup + (int4 ? (groups + 1) / 2 * 4 : 0);
    int16_t* to = spares[slot].reserve(stride * batch);
    for (int b = 0; b < batch; b++) {
        int16_t* token = to + b * stride;
        memset(token + kHeader + (groups - 1) * kGroup, 0, groups ? kGroup * sizeof *token : 0);
        round_activations(x + b * ldx, cols, token);
        if (!int4) continue;
        int16_t* sums = sums_of(token, cols);
        memset(sums + groups / 2 * 4, 0, groups % 2 * 4 * sizeof *sums);
        for (int g = 0; g < groups; g++) {
            int16_t* group = token + kHeader + g * kGroup;
            int sum = 0;
            for (int j = 0; j < kGroup; j++) sum += group[j];
            if (batch > kMaxBatch) {
                reinterpret_cast<float*>(sums)[g] = 16.0f * sum;
                continue;
            }
            int16_t* pair = sums + g / 2 * 4 + g % 2;
            pair[0] = sum & ((1 << kLowerBits) - 1), pair[2] = sum >> kLowerBits;
            split_bytes(group);
        }
    }
    return {to, stride};
}

// One weight row at a time, like `gemv_of`.
template <int B>
void gemv_int8(const Matrix& m, int begin, int end, Inputs x, float* y, size_t ldy, const float* bias,
               Strided addend) {
    constexpr int U = B == 1 ? 4 : B <= 4 ? 2 : 1, W = kShorts;
    const auto* tokens = static_cast<const int16_t*>(x.data);
    for (int i = begin; i < end; i++) {
        const int8_t* w = static_cast<const int8_t*>(m.data) + static_cast<size_t>(i) * m.cols;
        for (int at = 0; at < m.cols; at += kCacheLine) __builtin_prefetch(w + kAhead + at, 0, 2);
        double total[B] = {};
        for (int from = 0; from < m.cols; from += kExact) {
            const int to = m.cols - from < kExact ? m.cols : from + kExact;
            const int16_t* q = tokens + kHeader;
            IVec acc[B][U] = {};
            int j = from;
            for (; j + U * W <= to; j += U * W)
#pragma GCC unroll 4
                for (int u = 0; u < U; u++) {
                    const ShortVec wide = load_shorts(w + j + u * W);
#pragma GCC unroll 8
                    for (int b = 0; b < B; b++)
                        acc[b][u] = add_products(acc[b][u], wide, load_shorts(q + b * x.stride + j + u * W));
                }
            for (; j < to; j += W) {
                const ShortVec wide = j + W <= to ? load_shorts(w + j) : load_shorts_part(w + j, to - j);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++)
                    acc[b][0] = add_products(acc[b][0], wide, load_shorts(q + b * x.stride + j));
            }
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                IVec sums = acc[b][0];
#pragma GCC unroll 4
                for (int u = 1; u < U; u++) sums += acc[b][u];
                total[b] += exact_sum(sums);
            }
        }
        const float offset = bias ? bias[i] : 0.0f;
        for (int b = 0; b < B; b++) {
            float scale;
            memcpy(&scale, tokens + b * x.stride, sizeof scale);
            const float wide = static_cast<float>(total[b]) * scale;
            const float value = static_cast<float>(double{wide} * m.scale[i] + offset);  // like `gemv_of`
            y[b * ldy + i] = addend.data ? addend.data[b * addend.stride + i] + value : value;
        }
    }
}

}  // namespace
}  // namespace neuronmm
