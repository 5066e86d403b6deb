// GEMM scheme for the bf16 dot product instruction: two inputs at a time, fp32 sums.
#pragma once

#include "gemm_impl.h"
#include "transpose_impl.h"

namespace neuronmm {
namespace {

// Load the first n of 32 consecutive elements as bf16 and fill the rest with zeros.
inline __m512i read_row(const void* data, int type, size_t at, int n) {
    const __mmask32 mask = n >= 32 ? ~0u : (1u << n) - 1;
    if (type == kBFloat16) return _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(data) + at);
    const __m256i bytes = _mm256_maskz_loadu_epi8(mask, static_cast<const int8_t*>(data) + at);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);  // exact: |integer| <= 128
}

struct Bf16DotScheme {
    typedef uint32_t Cell;
    struct Rows {
        const uint16_t* data;
        size_t stride;
        const uint16_t* row(int i) const { return data + i * stride; }
    };
    static constexpr int kInputs = 2;
    static constexpr int kRows = 12;
    static constexpr int kPanels = 1;
    static constexpr int kDepth = 1 << 20;  // larger than any model's contraction: one panel holds all of it

    static Vec everywhere(const uint16_t* x) {
        int32_t pair;
        memcpy(&pair, x, 4);
        return (Vec)_mm512_set1_epi32(pair);
    }
    static Vec add(Vec sums, Vec both, Vec cells) { return _mm512_dpbf16_ps(sums, (__m512bh)both, (__m512bh)cells); }

    static Rows inputs(const uint16_t* x, size_t ldx, int, int) { return {x, ldx}; }

    // panel[p][j] = columns from + 2p and from + 2p + 1 of row begin + j for j < n; zeros for the other j of a vector. A
    // missing last column (odd depth) is zero.
    static void pack_rows(const Matrix& m, int begin, int n, int from, int depth, uint32_t* panel) {
        if (m.type == kInt4) return pack_tiles(m, begin, n, from, depth, panel);
        for (int half = 0; half < n; half += L)
            for (int k = 0; k < depth; k += 32) {
                Lanes r[L];
#pragma GCC unroll 16
                for (int j = 0; j < L; j++)
                    r[j] = half + j < n ? read_row(m.data, m.type, static_cast<size_t>(begin + half + j) * m.cols + from + k,
                                                   depth - k)
                                        : Lanes{};
                transpose(r);
                const int pairs = depth - k < 32 ? (depth - k + 1) / 2 : 16;
                for (int p = 0; p < pairs; p++) _mm512_storeu_si512(panel + (k / 2 + p) * kPanel + half, r[p]);
            }
    }

    // The same for int4, whose integers are rounded to the eight bits of a bf16.
    static void pack_tiles(const Matrix& m, int begin, int n, int from, int depth, uint32_t* panel) {
        for (int half = 0; half < n; half += L)
            each_pair(m, begin + half, from, depth, [&](int j, ShortVec both) {
                const __m512i first = widened_halves(lower_halves(both)), second = widened_halves(upper_halves(both));
                _mm512_storeu_si512(panel + j / 2 * kPanel + half, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
            });
    }

    // fp32 numbers, rounded to bf16, in the lower half of each lane.
    static __m512i widened_halves(Vec v) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)); }

    // panel[p][j] = rows from + 2p and from + 2p + 1 of column begin + j, padded in the same way.
    static void pack_columns(const Matrix& m, int begin, int n, int from, int depth, uint32_t* panel) {
        for (int k = 0; k < depth; k += 2) {
            const size_t at = static_cast<size_t>(from + k) * m.cols + begin;
            const __m512i even = read_row(m.data, m.type, at, n);
            const __m512i odd = k + 1 < depth ? read_row(m.data, m.type, at + m.cols, n) : _mm512_setzero_si512();
            for (int half = 0; half < 2; half++) {
                const __m256i low = half ? _mm512_extracti64x4_epi64(even, 1) : _mm512_castsi512_si256(even);
                const __m256i high = half ? _mm512_extracti64x4_epi64(odd, 1) : _mm512_castsi512_si256(odd);
                const __m512i both =
                    _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
                _mm512_storeu_si512(panel + k / 2 * kPanel + half * L, both);
            }
        }
    }
};

}  // namespace
}  // namespace neuronmm
