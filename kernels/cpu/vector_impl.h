// Vectors of one instruction set: loads, stores, conversions, and the exponential.
//
// The including file defines NEURONMM_LANES (fp32 lanes of a vector) and is compiled with the flags of its
// instruction set. Everything is in an anonymous namespace and no standard template is used, so that the linker
// cannot pick code of a wider instruction set for a narrower one.
#pragma once

#include <string.h>

#if defined(__AVX2__)
#pragma GCC diagnostic push  // GCC's own header uses undefined vectors on purpose
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "kernels.h"

namespace neuronmm {
namespace {

constexpr int L = NEURONMM_LANES;
typedef float Vec __attribute__((vector_size(4 * L)));
typedef int32_t IVec __attribute__((vector_size(4 * L)));
typedef uint32_t UVec __attribute__((vector_size(4 * L)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * L)));
typedef int16_t ShortVec __attribute__((vector_size(4 * L)));
constexpr int kShorts = 2 * L;  // lanes of a ShortVec

inline Vec splat(float value) { return value - Vec{}; }

inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Widening loads and the sum of a vector's lanes are the innermost operations. They use intrinsics because compilers
// generate slower code for the generic forms. A bf16 is the upper half of an fp32.
#if defined(__AVX512F__)
inline Vec load(const uint16_t* p) {
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline Vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
#elif defined(__AVX2__)
inline Vec load(const uint16_t* p) {
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline Vec load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline float sum(Vec v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
#else
inline Vec load(const uint16_t* p) {
    HalfVec h;
    memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, UVec) << 16);
}
inline Vec load(const int8_t* p) { return Vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
#endif

inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

inline void store(uint16_t* p, Vec v) {  // round to nearest even; NaN stays NaN
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v));  // numbers below 1.2e-38 become zero
#else
    const UVec bits = (UVec)v;
    const UVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const UVec nan = (UVec)(v != v);
    const HalfVec h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), HalfVec);
    memcpy(p, &h, sizeof h);
#endif
}

// Load the first n < L elements and fill the rest with zeros.
template <class T>
inline Vec load_part(const T* p, int n) {
    T buffer[L] = {};
    memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}

template <class T>
inline void store_part(T* p, Vec v, int n) {
    T buffer[L];
    store(buffer, v);
    memcpy(p, buffer, n * sizeof(T));
}

#if defined(__AVX512F__)
inline Vec load_part(const float* p, int n) { return _mm512_maskz_loadu_ps((1u << n) - 1, p); }
inline void store_part(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, v); }
#endif

inline float max_lane(Vec v) {
    float best = v[0];
    for (int i = 1; i < L; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// e^x by range reduction to |r| <= ln 2 / 2 and the Taylor polynomial of degree 7, relative error below 2e-7.
// Arguments are clamped to where the result is a normal number; NaN stays NaN.
inline Vec exp(Vec x) {
    x = x > 88.0f ? splat(88.0f) : x;
    x = x < -87.0f ? splat(-87.0f) : x;
    const Vec shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec n = (x * 1.44269504f + shifter) - shifter;
    const Vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (Vec)((__builtin_convertvector(n, IVec) + 127) << 23);
}

// Prefetch of weights, which stream from memory once per step. The integer kernels gain from lines kAhead bytes ahead on
// every processor that was measured. With floats it depends on the processor (docs/log.md):
constexpr int kAhead = 8192, kSoon = 1024;
#if defined(__AVX512F__)
// Zen 5: one line in four, far ahead, makes the hardware prefetcher look further. Every line displaces the hardware's own
// requests and is slower than no prefetch.
inline void fetch_row(const void* row, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 4 * kCacheLine)
        __builtin_prefetch(static_cast<const char*>(row) + kAhead + at, 0, 2);
}
template <int Bytes>
inline void fetch_next(const void*) {}
#else
// Zen 3: that halves the speed. Every line, shortly before its turn, gains a tenth.
inline void fetch_row(const void*, size_t) {}
template <int Bytes>
inline void fetch_next(const void* at) {
    for (int i = 0; i < Bytes; i += kCacheLine) __builtin_prefetch(static_cast<const char*>(at) + kSoon + i, 0, 3);
}
#endif

template <class T, class U>
void convert(const T* from, int n, U* to) {
    int i = 0;
    for (; i + L <= n; i += L) store(to + i, load(from + i));
    if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
}

}  // namespace
}  // namespace neuronmm
