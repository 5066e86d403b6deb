// Products of many rows, as reading a prompt has them, by the processor's bf16 dot product. Weights are packed panel by
// panel on their way: a panel is some hundred kilobytes at most and serves every row of the input, so that packing is
// about a hundredth of the work at 512 rows and no second copy of the weights is kept.
#pragma once

#include <stdlib.h>

#include "kernels.h"

namespace neuronmm {
namespace {

constexpr int kPanel = 32;  // results of one panel: two vectors
constexpr int kRows = 12;   // input rows at a time; their 24 vectors of sums and the panel's two fill the registers

// Memory that a thread keeps from call to call; only grows.
template <class T>
struct Spare {
    T* data = nullptr;
    size_t size = 0;

    ~Spare() { free(data); }
    T* reserve(size_t n) {
        if (n > size) {
            free(data);
            size = (n + 63) / 64 * 64;
            data = static_cast<T*>(aligned_alloc(64, size * sizeof(T)));
        }
        return data;
    }
};

// The first n of 32 consecutive elements as bf16, zeros behind them.
inline __m512i read_row(const void* data, int type, size_t at, int n) {
    const __mmask32 mask = n >= 32 ? ~0u : (1u << n) - 1;
    if (type == kBFloat16) return _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(data) + at);
    const __m256i bytes = _mm256_maskz_loadu_epi8(mask, static_cast<const int8_t*>(data) + at);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);  // exact: |integer| <= 128
}

// Transpose 16 vectors of 16 32-bit lanes.
inline void transpose(__m512i* r) {
    __m512i t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// panel[p][k] = columns 2 p and 2 p + 1 of row begin + k, k < n; zeros for the other k.
inline void pack_rows(const Matrix& m, int begin, int n, uint32_t* panel) {
    for (int half = 0; half < kPanel; half += 16)
        for (int j = 0; j < m.cols; j += 32) {
            __m512i r[16];
#pragma GCC unroll 16
            for (int k = 0; k < 16; k++)
                r[k] = half + k < n ? read_row(m.data, m.type, static_cast<size_t>(begin + half + k) * m.cols + j,
                                               m.cols - j)
                                    : _mm512_setzero_si512();
            transpose(r);
            const int pairs = m.cols - j < 32 ? (m.cols - j + 1) / 2 : 16;
            for (int p = 0; p < pairs; p++) _mm512_storeu_si512(panel + (j / 2 + p) * kPanel + half, r[p]);
        }
}

// panel[p][k] = rows 2 p and 2 p + 1 of column begin + k, k < n; of an odd number of rows the last is followed by zeros.
inline void pack_columns(const Matrix& m, int begin, int n, uint32_t* panel) {
    for (int i = 0; i < m.rows; i += 2) {
        const size_t at = static_cast<size_t>(i) * m.cols + begin;
        const __m512i even = read_row(m.data, m.type, at, n);
        const __m512i odd = i + 1 < m.rows ? read_row(m.data, m.type, at + m.cols, n) : _mm512_setzero_si512();
        for (int half = 0; half < 2; half++) {
            const __m256i low = half ? _mm512_extracti64x4_epi64(even, 1) : _mm512_castsi512_si256(even);
            const __m256i high = half ? _mm512_extracti64x4_epi64(odd, 1) : _mm512_castsi512_si256(odd);
            const __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                                                 _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            _mm512_storeu_si512(panel + i / 2 * kPanel + half * 16, both);
        }
    }
}

// R rows of x times one panel; the results' first n columns go to y.
template <int R>
void panel_rows(const uint32_t* panel, int pairs, const uint16_t* x, size_t ldx, float* y, size_t ldy, int n,
                const float* scale, const float* bias, bool add) {
    __m512 acc[R][2];
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (int p = 0; p < pairs; p++) {
        const __m512bh left = (__m512bh)_mm512_load_si512(panel + p * kPanel);
        const __m512bh right = (__m512bh)_mm512_load_si512(panel + p * kPanel + 16);
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            int32_t pair;
            memcpy(&pair, x + i * ldx + 2 * p, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            acc[i][0] = _mm512_dpbf16_ps(acc[i][0], both, left);
            acc[i][1] = _mm512_dpbf16_ps(acc[i][1], both, right);
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const int count = n - half * 16;
        const __mmask16 mask = count >= 16 ? 0xffff : count > 0 ? (1u << count) - 1 : 0;
        const __m512 factor = scale ? _mm512_maskz_loadu_ps(mask, scale + half * 16) : _mm512_set1_ps(1.0f);
        const __m512 offset = bias ? _mm512_maskz_loadu_ps(mask, bias + half * 16) : _mm512_setzero_ps();
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            float* to = y + i * ldy + half * 16;
            __m512 value = acc[i][half] * factor + offset;
            if (add) value += _mm512_maskz_loadu_ps(mask, to);
            _mm512_mask_storeu_ps(to, mask, value);
        }
    }
}

// All rows of x. `next` bytes from `ahead` on are wanted after this: they are fetched in between.
void panel_times(const uint32_t* panel, int pairs, const uint16_t* x, size_t ldx, int rows, float* y, size_t ldy, int n,
                 const float* scale, const float* bias, bool add, const char* ahead, size_t next) {
    const size_t step = next * kRows / rows / 64 * 64 + 64;
    size_t fetched = 0;
    int i = 0;
    for (; i + kRows <= rows; i += kRows) {
        for (const size_t stop = fetched + step; fetched < stop && fetched < next; fetched += 64)
            __builtin_prefetch(ahead + fetched, 0, 2);
        panel_rows<kRows>(panel, pairs, x + i * ldx, ldx, y + i * ldy, ldy, n, scale, bias, add);
    }
    for (; i + 8 <= rows; i += 8) panel_rows<8>(panel, pairs, x + i * ldx, ldx, y + i * ldy, ldy, n, scale, bias, add);
    for (; i + 4 <= rows; i += 4) panel_rows<4>(panel, pairs, x + i * ldx, ldx, y + i * ldy, ldy, n, scale, bias, add);
    for (; i < rows; i++) panel_rows<1>(panel, pairs, x + i * ldx, ldx, y + i * ldy, ldy, n, scale, bias, add);
}

thread_local Spare<uint32_t> packed;

void gemm(const Matrix& m, int begin, int end, const uint16_t* x, size_t ldx, int rows, float* y, size_t ldy,
          const float* bias, bool add) {
    const int pairs = (m.cols + 1) / 2;
    uint32_t* panel = packed.reserve(static_cast<size_t>(pairs) * kPanel);
    for (int j = begin; j < end; j += kPanel) {
        const int n = end - j < kPanel ? end - j : kPanel;
        pack_rows(m, j, n, panel);
        const size_t row = static_cast<size_t>(m.cols) * (m.type == kBFloat16 ? 2 : 1);
        const int after = end - j - n < kPanel ? end - j - n : kPanel;
        panel_times(panel, pairs, x, ldx, rows, y + j, ldy, n, m.scale ? m.scale + j : nullptr,
                    bias ? bias + j : nullptr, add, static_cast<const char*>(m.data) + (j + n) * row, after * row);
    }
}

void mix(const Matrix& m, const uint16_t* x, size_t ldx, int rows, float* y, size_t ldy) {
    const int pairs = (m.rows + 1) / 2;
    uint32_t* panel = packed.reserve(static_cast<size_t>(pairs) * kPanel);
    for (int j = 0; j < m.cols; j += kPanel) {
        const int n = m.cols - j < kPanel ? m.cols - j : kPanel;
        pack_columns(m, j, n, panel);
        panel_times(panel, pairs, x, ldx, rows, y + j, ldy, n, nullptr, nullptr, false, nullptr, 0);
    }
}

}  // namespace
}  // namespace neuronmm
