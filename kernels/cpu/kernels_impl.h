// The kernels, written once with the compiler's vector types and compiled once for each instruction set.
//
// The including file defines NEURONMM_LANES (fp32 lanes of a vector) and is compiled with the flags of its
// instruction set. Everything is in an anonymous namespace and no standard template is used, so that the linker
// cannot pick code of a wider instruction set for a narrower one.
#pragma once

#include <math.h>
#include <stdlib.h>
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
#include "spare.h"

namespace neuronmm {
namespace {

constexpr int L = NEURONMM_LANES;
typedef float Vec __attribute__((vector_size(4 * L)));
typedef int32_t IVec __attribute__((vector_size(4 * L)));
typedef uint32_t UVec __attribute__((vector_size(4 * L)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * L)));

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
// Arguments are clamped to where the result is a normal number.
inline Vec exp(Vec x) {
    x = x < 88.0f ? x : splat(88.0f);
    x = x > -87.0f ? x : splat(-87.0f);
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

template <class T, class U>
void convert(const T* from, int n, U* to) {
    int i = 0;
    for (; i + L <= n; i += L) store(to + i, load(from + i));
    if (i < n) store_part(to + i, load_part(from + i, n - i), n - i);
}

// Dot product step for weights of type T: widen kWidth weights to fp32 and multiply them with as many inputs, one sum
// per lane.
template <class T>
struct WidenedDot {
    typedef T Weight;
    typedef float Input;
    typedef Vec Wide;
    static constexpr int kWidth = L;
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
    static constexpr int kWidth = 2 * L;
    static Wide read(const uint16_t* w) { return (Wide)_mm512_loadu_si512(w); }
    static Wide read(const uint16_t* w, int n) { return (Wide)_mm512_maskz_loadu_epi16((1u << n) - 1, w); }
    static Vec add(Vec sums, Wide w, const uint16_t* x) { return _mm512_dpbf16_ps(sums, w, read(x)); }
    static Vec add(Vec sums, Wide w, const uint16_t* x, int n) { return _mm512_dpbf16_ps(sums, w, read(x, n)); }
};
#endif

// Prefetch distance and stride in bytes. One line in four makes the hardware prefetcher look further ahead. Prefetching
// every line displaces the hardware's own requests and is slower than no prefetch.
constexpr int kAhead = 8192, kEvery = 256;

// Multiply one weight row at a time, in address order, which the hardware prefetchers follow. Several accumulators
// along the row hide the latency of the additions; a larger batch needs fewer of them.
template <class P, int B>
void gemv_of(const Matrix& m, int begin, int end, const typename P::Input* x, size_t ldx, float* y, size_t ldy,
             const float* bias, Strided addend) {
    constexpr int U = B == 1 ? 4 : B <= 4 ? 2 : 1, W = P::kWidth;
    const int cols = m.cols;
    for (int i = begin; i < end; i++) {
        const auto* w = static_cast<const typename P::Weight*>(m.data) + static_cast<size_t>(i) * cols;
        for (size_t at = 0; at < cols * sizeof *w; at += kEvery)
            __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead + at, 0, 2);
        Vec acc[B][U] = {};
        int j = 0;
        for (; j + U * W <= cols; j += U * W)
            for (int u = 0; u < U; u++) {
                const auto wide = P::read(w + j + u * W);
                for (int b = 0; b < B; b++) acc[b][u] = P::add(acc[b][u], wide, x + b * ldx + j + u * W);
            }
        for (; j + W <= cols; j += W) {
            const auto wide = P::read(w + j);
            for (int b = 0; b < B; b++) acc[b][0] = P::add(acc[b][0], wide, x + b * ldx + j);
        }
        if (j < cols) {
            const auto wide = P::read(w + j, cols - j);
            for (int b = 0; b < B; b++) acc[b][0] = P::add(acc[b][0], wide, x + b * ldx + j, cols - j);
        }
        for (int b = 0; b < B; b++) {
            Vec total = acc[b][0];
            for (int u = 1; u < U; u++) total += acc[b][u];
            float value = sum(total);
            if (m.scale) value *= m.scale[i];
            if (bias) value += bias[i];
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

#if defined(__AVX512BF16__)
using Bf16Dot = Bf16PairDot;
#else
using Bf16Dot = WidenedDot<uint16_t>;
#endif

Inputs prepare(const float* x, size_t ldx, [[maybe_unused]] int cols, [[maybe_unused]] int batch,
               [[maybe_unused]] int type) {
#if defined(__AVX512BF16__)
    if (type == kBFloat16) {
        static thread_local Spare<uint16_t> spare;
        const size_t stride = (cols + 31) / 32 * 32;
        uint16_t* to = spare.reserve(stride * batch);
        for (int b = 0; b < batch; b++) convert(x + b * ldx, cols, to + b * stride);
        return {to, stride};
    }
#endif
    return {x, ldx};
}

void gemv(const Matrix& m, int begin, int end, Inputs x, int batch, float* y, size_t ldy, const float* bias,
          Strided addend) {
    switch (m.type) {
        case kFloat32: return gemv_typed<WidenedDot<float>>(m, begin, end, x, batch, y, ldy, bias, addend);
        case kBFloat16: return gemv_typed<Bf16Dot>(m, begin, end, x, batch, y, ldy, bias, addend);
        case kInt8: return gemv_typed<WidenedDot<int8_t>>(m, begin, end, x, batch, y, ldy, bias, addend);
    }
}

void interleave(Strided zeros, Strided ones, uint64_t bits, int n, const float* bias, bool add, int batch, float* y,
                size_t ldy) {
    float merged[64];
#if !defined(__AVX512F__)
    int place[64];  // where the zeros go, then where the ones go
    const int count = n - __builtin_popcountll(n < 64 ? bits & ((uint64_t{1} << n) - 1) : bits);
    for (int i = 0, zero = 0, one = count; i < n; i++) place[bits >> i & 1 ? one++ : zero++] = i;
#endif
    for (int b = 0; b < batch; b++) {
        const float *zero = zeros.data + b * zeros.stride, *one = ones.data + b * ones.stride;
        float* to = y + b * ldy;
#if defined(__AVX512F__)
        for (int i = 0; i < n; i += L) {
            const __mmask16 set = bits >> i;
            _mm512_storeu_ps(merged + i, _mm512_mask_expand_ps(_mm512_maskz_expand_ps(~set, _mm512_loadu_ps(zero)), set,
                                                               _mm512_loadu_ps(one)));
            const int taken = __builtin_popcount(set);
            one += taken, zero += L - taken;
        }
#else
        for (int i = 0; i < count; i++) merged[place[i]] = zero[i];
        for (int i = count; i < n; i++) merged[place[i]] = one[i - count];
#endif
        for (int i = 0; i < n; i += L) {
            const int left = n - i;
            Vec value = left < L ? load_part(merged + i, left) : load(merged + i);
            if (bias) value += left < L ? load_part(bias + i, left) : load(bias + i);
            if (add) value += left < L ? load_part(to + i, left) : load(to + i);
            if (left < L)
                store_part(to + i, value, left);
            else
                store(to + i, value);
        }
    }
}

void swiglu(float* gate, const float* up, int n) {
    int i = 0;
    for (; i + L <= n; i += L) {
        const Vec g = load(gate + i);
        store(gate + i, g / (exp(-g) + 1.0f) * load(up + i));
    }
    if (i < n) {
        const Vec g = load_part(gate + i, n - i);
        store_part(gate + i, g / (exp(-g) + 1.0f) * load_part(up + i, n - i), n - i);
    }
}

void softmax(float* scores, int n, float scale) {
    float best = scores[0];
    int i = 0;
    if (n >= L) {
        Vec top = load(scores);
        for (i = L; i + L <= n; i += L) {
            const Vec v = load(scores + i);
            top = v > top ? v : top;
        }
        best = max_lane(top);
    }
    for (; i < n; i++) best = scores[i] > best ? scores[i] : best;
    Vec total = {};
    for (i = 0; i + L <= n; i += L) {
        const Vec e = exp((load(scores + i) - best) * scale);
        store(scores + i, e);
        total += e;
    }
    float rest = 0.0f;
    if (i < n) {
        store_part(scores + i, exp((load_part(scores + i, n - i) - best) * scale), n - i);
        for (int j = i; j < n; j++) rest += scores[j];
    }
    const float inverse = 1.0f / (sum(total) + rest);
    for (i = 0; i < n; i++) scores[i] *= inverse;
}

template <class T>
void weighted_sum_of(const Matrix& m, const float* weights, float* out) {
    const T* data = static_cast<const T*>(m.data);
    int j = 0;
    for (; j + 4 * L <= m.cols; j += 4 * L) {
        Vec acc[4] = {};
        for (int i = 0; i < m.rows; i++)
            for (int u = 0; u < 4; u++) acc[u] += load(data + static_cast<size_t>(i) * m.cols + j + u * L) * weights[i];
        for (int u = 0; u < 4; u++) store(out + j + u * L, acc[u]);
    }
    for (; j < m.cols; j += L) {
        const int n = m.cols - j < L ? m.cols - j : L;
        Vec acc = {};
        for (int i = 0; i < m.rows; i++) acc += load_part(data + static_cast<size_t>(i) * m.cols + j, n) * weights[i];
        store_part(out + j, acc, n);
    }
}

void weighted_sum(const Matrix& m, const float* weights, float* out) {
    if (m.type == kFloat32) return weighted_sum_of<float>(m, weights, out);
    weighted_sum_of<uint16_t>(m, weights, out);
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    Vec squares = {};
    int i = 0;
    for (; i + L <= n; i += L) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < n; i++) total += x[i] * x[i];
    const float inverse = 1.0f / sqrtf(total / n + eps);
    for (i = 0; i + L <= n; i += L) store(out + i, load(x + i) * inverse * load(weight + i));
    for (; i < n; i++) out[i] = x[i] * inverse * weight[i];
}

void rotate(float* head, const float* cos, const float* sin, int half) {
    int j = 0;
    for (; j + L <= half; j += L) {
        const Vec left = load(head + j), right = load(head + j + half);
        store(head + j, left * load(cos + j) - right * load(sin + j));
        store(head + j + half, right * load(cos + j + half) + left * load(sin + j + half));
    }
    for (; j < half; j++) {
        const float left = head[j], right = head[j + half];
        head[j] = left * cos[j] - right * sin[j];
        head[j + half] = right * cos[j + half] + left * sin[j + half];
    }
}

void widen(const void* from, int type, int n, float* to) {
    switch (type) {
        case kFloat32: return convert(static_cast<const float*>(from), n, to);
        case kBFloat16: return convert(static_cast<const uint16_t*>(from), n, to);
        case kInt8: return convert(static_cast<const int8_t*>(from), n, to);
    }
}

void narrow(const float* from, int type, int n, void* to) {
    if (type == kFloat32) return convert(from, n, static_cast<float*>(to));
    convert(from, n, static_cast<uint16_t*>(to));
}

// `gemm_nt` and `gemm_nn` may be null.
constexpr Kernels table(const char* name, decltype(Kernels::gemm_nt) gemm_nt, decltype(Kernels::gemm_nn) gemm_nn) {
    return {name,     prepare, gemv,  interleave, swiglu,  softmax, weighted_sum,
            rms_norm, rotate,  widen, narrow,     gemm_nt, gemm_nn};
}

}  // namespace
}  // namespace neuronmm
