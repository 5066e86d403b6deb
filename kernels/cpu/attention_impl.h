// Attention of the query heads of one token that share a KV head. Each row of the cache is read once for all of them,
// or once for as many as the registers take.
#pragma once

#include <math.h>

#include "gemv_impl.h"

namespace neuronmm {
namespace {

#if defined(__AVX512F__)
constexpr int kSummed = 6;  // heads whose sums over four vectors of values fit the registers, beside their weights
#else
constexpr int kSummed = 3;
#endif

// The sums of the lanes of L vectors. All are added up in the same order.
#if defined(__AVX512F__)
inline Vec lane_sums(const Vec* v) {
    Vec pairs[L / 2], fours[L / 4], eights[2];
#pragma GCC unroll 8
    for (int i = 0; i < L / 2; i++)
        pairs[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < L / 4; i++) {
        const __m512d a = (__m512d)pairs[2 * i], b = (__m512d)pairs[2 * i + 1];
        fours[i] = (Vec)_mm512_unpacklo_pd(a, b) + (Vec)_mm512_unpackhi_pd(a, b);
    }
    const auto halves = [](Vec a, Vec b) { return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd); };
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) eights[i] = halves(fours[2 * i], fours[2 * i + 1]);
    return halves(eights[0], eights[1]);
}
#elif defined(__AVX2__)
inline Vec lane_sums(const Vec* v) {
    Vec pairs[L / 2], fours[2];
#pragma GCC unroll 4
    for (int i = 0; i < L / 2; i++)
        pairs[i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m256d a = (__m256d)pairs[2 * i], b = (__m256d)pairs[2 * i + 1];
        fours[i] = (Vec)_mm256_unpacklo_pd(a, b) + (Vec)_mm256_unpackhi_pd(a, b);
    }
    return _mm256_permute2f128_ps(fours[0], fours[1], 0x20) + _mm256_permute2f128_ps(fours[0], fours[1], 0x31);
}
#else
inline Vec lane_sums(const Vec* v) { return Vec{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])}; }
#endif

// Fetch a row of keys shortly before its turn, and the same row of values for the sums that follow.
template <class T>
inline void fetch_rows(const T* key, const T* value, int cols) {
    constexpr int soon = 1024;  // bytes
    for (int j = 0; j < cols; j += kCacheLine / sizeof(T)) {
        __builtin_prefetch(reinterpret_cast<const char*>(key + j) + soon, 0, 3);
        __builtin_prefetch(value + j, 0, 2);
    }
}

// out[b * ldo + i] = keys[i] . queries[b]
template <class P, int B>
void scores_of(const Matrix& keys, const Matrix& values, Inputs queries, float* out, size_t ldo) {
    const auto* x = static_cast<const typename P::Input*>(queries.data);
    const auto* row = static_cast<const typename P::Weight*>(keys.data);
    const auto* value = static_cast<const typename P::Weight*>(values.data);
    for (int i = 0; i < keys.rows; i += L) {
        const int n = keys.rows - i < L ? keys.rows - i : L;
        Vec parts[B][L] = {};
        for (int r = 0; r < n; r++, row += keys.cols, value += keys.cols) {
            fetch_rows(row, value, keys.cols);
            Vec of_row[B];
            row_parts<P, B>(row, keys.cols, x, queries.stride, of_row);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) parts[b][r] = of_row[b];
        }
        for (int b = 0; b < B; b++) {
            if (n < L)
                store_part(out + b * ldo + i, lane_sums(parts[b]), n);
            else
                store(out + b * ldo + i, lane_sums(parts[b]));
        }
    }
}

template <class P, int B = kAccumulators / P::kSums>
void all_scores(const Matrix& keys, const Matrix& values, Inputs queries, int count, float* out, size_t ldo) {
    for (; count >= B; count -= B, out += B * ldo) {
        scores_of<P, B>(keys, values, queries, out, ldo);
        queries.data = static_cast<const typename P::Input*>(queries.data) + B * queries.stride;
    }
    if constexpr (B > 1) all_scores<P, B - 1>(keys, values, queries, count, out, ldo);
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

// out[b * ldo + j] = sum over i of weights[b * ldw + i] * m[i][j]
template <class T, int B>
void sums_of_rows(const Matrix& m, const float* weights, size_t ldw, float* out, size_t ldo) {
    constexpr int U = 4;
    const T* data = static_cast<const T*>(m.data);
    int j = 0;
    for (; j + U * L <= m.cols; j += U * L) {
        Vec acc[B][U] = {};
        for (int i = 0; i < m.rows; i++) {
            const T* row = data + static_cast<size_t>(i) * m.cols + j;
#pragma GCC unroll 4
            for (int u = 0; u < U; u++) {
                const Vec wide = load(row + u * L);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) acc[b][u] += wide * weights[b * ldw + i];
            }
        }
        for (int b = 0; b < B; b++)
            for (int u = 0; u < U; u++) store(out + b * ldo + j + u * L, acc[b][u]);
    }
    for (; j < m.cols; j += L) {
        const int n = m.cols - j < L ? m.cols - j : L;
        Vec acc[B] = {};
        for (int i = 0; i < m.rows; i++) {
            const Vec wide = load_part(data + static_cast<size_t>(i) * m.cols + j, n);
            for (int b = 0; b < B; b++) acc[b] += wide * weights[b * ldw + i];
        }
        for (int b = 0; b < B; b++) store_part(out + b * ldo + j, acc[b], n);
    }
}

template <class T, int B = kSummed>
void all_sums(const Matrix& m, const float* weights, size_t ldw, int count, float* out, size_t ldo) {
    for (; count >= B; count -= B, weights += B * ldw, out += B * ldo) sums_of_rows<T, B>(m, weights, ldw, out, ldo);
    if constexpr (B > 1) all_sums<T, B - 1>(m, weights, ldw, count, out, ldo);
}

void attend(const Matrix& keys, const Matrix& values, const float* q, int count, float scale, float* scores, size_t lds,
            float* out) {
    const int d = keys.cols;
    const Inputs queries = prepare(q, d, d, count, keys.type, 0);
    if (keys.type == kFloat32)
        all_scores<WidenedDot<float>>(keys, values, queries, count, scores, lds);
    else
        all_scores<Bf16Dot>(keys, values, queries, count, scores, lds);
    for (int b = 0; b < count; b++) softmax(scores + b * lds, keys.rows, scale);
    if (values.type == kFloat32)
        all_sums<float>(values, scores, lds, count, out, d);
    else
        all_sums<uint16_t>(values, scores, lds, count, out, d);
}

}  // namespace
}  // namespace neuronmm
