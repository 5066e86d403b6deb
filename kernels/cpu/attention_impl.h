// Attention of the query heads of one token that share a KV head. Each key is read from memory once, and each value
// once for as many heads as the registers take.
#pragma once

#include "gemv_impl.h"

namespace neuronmm {
namespace {

#if defined(__AVX512F__)
constexpr int kSummed = 6;  // heads whose sums over four vectors of values fit the registers, beside their weights
#else
constexpr int kSummed = 3;
#endif

// The sums of the lanes of L vectors. All are added up in the same order, so that a score does not depend on the place
// of its key among them.
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
    const auto halves = [](Vec a, Vec b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
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

constexpr int kFetchedValues = 256 << 10;  // bytes that stay in a second-level cache until all keys are scored

// Prefetch of a key shortly before its turn, where `row_parts` does not do it, and of the value of the same position,
// if there is one, so that its way from memory overlaps the arithmetic of the scores.
template <class T>
inline void fetch_rows(const T* key, const T* value, int cols) {
    for (int j = 0; j < cols; j += kCacheLine / sizeof(T)) {
        if (L == 16) __builtin_prefetch(reinterpret_cast<const char*>(key + j) + kSoon, 0, 3);
        if (value) __builtin_prefetch(value + j, 0, 2);
    }
}

// out[b * ldo + i] = keys[i] . queries[b] for n <= L keys, which the heads beyond the first B find in the cache.
template <class P, int B = kAccumulators / P::kSums>
void block_scores(const typename P::Weight* keys, const typename P::Weight* values, int n, int cols, Inputs queries,
                  int count, float* out, size_t ldo) {
    for (; count >= B; count -= B, out += B * ldo) {
        const auto* x = static_cast<const typename P::Input*>(queries.data);
        Vec parts[B][L];
        for (int r = 0; r < L; r++) {
            Vec of_row[B] = {};
            if (r < n) {
                fetch_rows(keys + r * cols, values ? values + r * cols : nullptr, cols);
                row_parts<P, B>(keys + r * cols, cols, x, queries.stride, of_row);
            }
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) parts[b][r] = of_row[b];
        }
        for (int b = 0; b < B; b++) {
            if (n < L)
                store_part(out + b * ldo, lane_sums(parts[b]), n);
            else
                store(out + b * ldo, lane_sums(parts[b]));
        }
        queries.data = x + B * queries.stride;
    }
    if constexpr (B > 1) block_scores<P, B - 1>(keys, values, n, cols, queries, count, out, ldo);
}

template <class P>
void scores_of(const Matrix& keys, const Matrix& values, Inputs queries, int count, float* out, size_t ldo) {
    typedef const typename P::Weight* Row;
    const int fetched = kFetchedValues / static_cast<int>(keys.cols * sizeof(typename P::Weight));
    for (int i = 0; i < keys.rows; i += L) {
        const size_t at = static_cast<size_t>(i) * keys.cols;
        const Row value = i < fetched ? static_cast<Row>(values.data) + at : nullptr;
        block_scores<P>(static_cast<Row>(keys.data) + at, value, keys.rows - i < L ? keys.rows - i : L, keys.cols,
                        queries, count, out + i, ldo);
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

// out[b * ldo + j] = sum over i of weights[b * ldw + i] * m[i][j]
template <class T, int B>
void weighted_sums_of(const Matrix& m, const float* weights, size_t ldw, float* out, size_t ldo) {
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
void weighted_sums_of_count(const Matrix& m, const float* weights, size_t ldw, int count, float* out, size_t ldo) {
    if (count == B) return weighted_sums_of<T, B>(m, weights, ldw, out, ldo);
    if constexpr (B > 1) weighted_sums_of_count<T, B - 1>(m, weights, ldw, count, out, ldo);
}

// The same for any number of heads. Passes of equal numbers: one head alone would wait for its own additions.
template <class T>
void weighted_sums(const Matrix& m, const float* weights, size_t ldw, int count, float* out, size_t ldo) {
    for (int passes = (count + kSummed - 1) / kSummed, n; passes; passes--) {
        n = (count + passes - 1) / passes;
        weighted_sums_of_count<T>(m, weights, ldw, n, out, ldo);
        weights += n * ldw, out += n * ldo, count -= n;
    }
}

void attend(const Matrix& keys, const Matrix& values, const float* q, int count, float scale, float* scores, size_t lds,
            float* out) {
    const int d = keys.cols;
    const Inputs queries = prepare(q, d, d, count, keys.type, 0);
    if (keys.type == kFloat32)
        scores_of<WidenedDot<float>>(keys, values, queries, count, scores, lds);
    else
        scores_of<Bf16Dot>(keys, values, queries, count, scores, lds);
    for (int b = 0; b < count; b++) softmax(scores + b * lds, keys.rows, scale);
    if (values.type == kFloat32)
        weighted_sums<float>(values, scores, lds, count, out, d);
    else
        weighted_sums<uint16_t>(values, scores, lds, count, out, d);
}

}  // namespace
}  // namespace neuronmm
