// Int4 matrices: their layout, and a GEMV in integers.
//
// A row has groups of 32 columns, each with a step s and an offset m, of one byte each. The value of a column with the
// half byte q is scale * (s q - 16 m), where `scale` belongs to the row. Rows come in tiles of 16, and the lanes of a
// vector are the rows of a tile: sums need no step across lanes. A tile has
//   words   [group][4][row] of 32 bits: 8 columns of a row; bit 16 h + 4 k begins the half byte of column 2 k + h
//   groups  [group][s of 16 rows, then m of 16 rows]
// Shifted and masked, a word is a pair of columns in 16 bits each, as the products with 16-bit activations need them, or
// four columns in 8 bits each, first 0, 4, 1 and 5, then 2, 6, 3 and 7, as the products with bytes do.
// The columns of the last group that the matrix lacks have q = 0, and the rows of the last tile that it lacks are zero.
#pragma once

#include "integer_dot_impl.h"

namespace neuronmm {
namespace {

typedef uint16_t UShortVec __attribute__((vector_size(4 * L)));
typedef double DVec __attribute__((vector_size(4 * L)));

constexpr int kTile = Matrix::kTile, kWords = kGroup / 8;

struct Int4Tile {
    const uint8_t *words, *groups;

    // 8 columns of L rows, from row `part` of the tile on.
    UShortVec word(int group, int word, int part) const {
        UShortVec v;
        memcpy(&v, words + ((group * kWords + word) * kTile + part) * 4, sizeof v);
        return v;
    }
    IVec steps(int group, int part) const { return bytes(groups + group * 2 * kTile + part); }
    IVec offsets(int group, int part) const { return bytes(groups + (group * 2 + 1) * kTile + part); }

private:
    static IVec bytes(const uint8_t* p) {
#if defined(__AVX512F__)
        return (IVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
        return (IVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
        return IVec{p[0], p[1], p[2], p[3]};
#endif
    }
};

inline int groups_of(const Matrix& m) { return (m.cols + kGroup - 1) / kGroup; }

// The tile that begins at row i, a multiple of kTile.
inline Int4Tile tile_of(const Matrix& m, int i) {
    const auto* tile = static_cast<const uint8_t*>(m.data) + i * m.row_bytes();
    return {tile, tile + groups_of(m) * kWords * kTile * 4};
}

// For GEMMs: call visit(j, v) for the columns from + j and from + j + 1, j even and below `depth`; `from` begins a
// group. The lanes of v are L rows from `row` on, with the integer of the first column in the lower 16 bits.
template <class F>
void each_pair(const Matrix& m, int row, int from, int depth, F visit) {
    const int part = row % kTile;
    const Int4Tile tile = tile_of(m, row - part);
    for (int j = 0; j < depth; j += kGroup) {
        const int group = (from + j) / kGroup;
        const IVec s = tile.steps(group, part), o = tile.offsets(group, part) * 16;
        const ShortVec steps = (ShortVec)(s | s << 16), offsets = (ShortVec)(o | o << 16);
        for (int i = 0; i < kWords; i++) {
            const UShortVec word = tile.word(group, i, part);
            for (int k = 0, at = j + 8 * i; k < 4 && at < depth; k++, at += 2)
                visit(at, (ShortVec)(word >> 4 * k & 15) * steps - offsets);
        }
    }
}

inline Vec lower_halves(ShortVec v) { return __builtin_convertvector((IVec)v << 16 >> 16, Vec); }
inline Vec upper_halves(ShortVec v) { return __builtin_convertvector((IVec)v >> 16, Vec); }

// Exact sums of L rows.
struct Doubles {
    DVec low, high;

    static Doubles of(IVec v) {
#if defined(__AVX512F__)
        return {_mm512_cvtepi32_pd(_mm512_castsi512_si256((__m512i)v)),
                _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64((__m512i)v, 1))};
#elif defined(__AVX2__)
        return {_mm256_cvtepi32_pd(_mm256_castsi256_si128((__m256i)v)),
                _mm256_cvtepi32_pd(_mm256_extracti128_si256((__m256i)v, 1))};
#else
        return {DVec{double(v[0]), double(v[1])}, DVec{double(v[2]), double(v[3])}};
#endif
    }
    static Doubles of(Vec v) {
#if defined(__AVX512F__)
        return {_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))};
#elif defined(__AVX2__)
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))};
#else
        return {DVec{double(v[0]), double(v[1])}, DVec{double(v[2]), double(v[3])}};
#endif
    }
    void add(Doubles a, Doubles b) { low += a.low * b.low, high += a.high * b.high; }
    void add(Doubles a, double b) { low += a.low * b, high += a.high * b; }
    Vec floats() const {
#if defined(__AVX512F__)
        return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
#elif defined(__AVX2__)
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps(low)), _mm256_cvtpd_ps(high), 1);
#else
        return Vec{float(low[0]), float(low[1]), float(high[0]), float(high[1])};
#endif
    }
};

inline ShortVec both(const int16_t* pair) {
    int32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return (ShortVec)(bits - IVec{});
}

inline Vec load_rows(const float* p, int n) { return n < L ? load_part(p, n) : load(p); }

#if defined(__AVX512VNNI__)
constexpr int kExactGroups = 64;  // groups whose sums of half bytes times lower bytes, times their steps, fit int32
static_assert(int64_t{kExactGroups} * kGroup * 15 * 255 * 255 <= INT32_MAX, "");

// The sums over s q - 16 m times the activation, of P L rows from row `part` of a tile on. `vpdpbusd` multiplies bytes
// without sign by bytes with sign, four neighbours per lane. So the upper bytes of the activations, with sign, and the
// lower ones, without, have sums of their own.
template <int B, int P>
inline void tile_times(Int4Tile tile, int groups, int part, const int16_t* q, const double* sums, size_t stride,
                       Doubles (*totals)[B]) {
    static_assert(P == 1, "a vector holds a tile");
    const __m512i mask = _mm512_set1_epi8(15);
    for (int from = 0; from < groups; from += kExactGroups) {
        const int to = groups - from < kExactGroups ? groups : from + kExactGroups;
        IVec scaled_upper[B] = {}, scaled_lower[B] = {};
        for (int g = from; g < to; g++) {
            __m512i upper[B] = {}, lower[B] = {};
#pragma GCC unroll 4
            for (int i = 0; i < kWords; i++) {
                const __m512i word = (__m512i)tile.word(g, i, part);
                const __m512i even = _mm512_and_si512(word, mask);
                const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(word, 4), mask);
                __builtin_prefetch(tile.words + kAhead + ((g * kWords + i) * kTile + part) * 4, 0, 2);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) {
                    const int16_t* split = q + b * stride + g * kGroup + 8 * i;  // as `split_bytes` left them
                    upper[b] = _mm512_dpbusd_epi32(upper[b], even, (__m512i)both(split));
                    upper[b] = _mm512_dpbusd_epi32(upper[b], odd, (__m512i)both(split + 2));
                    lower[b] = _mm512_dpbusd_epi32(lower[b], (__m512i)both(split + 4), even);
                    lower[b] = _mm512_dpbusd_epi32(lower[b], (__m512i)both(split + 6), odd);
                }
            }
            const IVec steps = tile.steps(g, part);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                scaled_upper[b] += (IVec)upper[b] * steps;
                scaled_lower[b] += (IVec)lower[b] * steps;
            }
        }
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            totals[0][b].add(Doubles::of(scaled_upper[b]), 256);
            totals[0][b].add(Doubles::of(scaled_lower[b]), 1);
        }
    }
    for (int g = 0; g < groups; g++) {
        const Doubles offsets = Doubles::of(tile.offsets(g, part));
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) totals[0][b].add(offsets, -sums[g + b * stride * sizeof *q / sizeof *sums]);
    }
}
#else
// The sums over s q - 16 m times the activation, of P L rows from row `part` of a tile on.
template <int B, int P>
inline void tile_times(Int4Tile tile, int groups, int part, const int16_t* q, const double* sums, size_t stride,
                       Doubles (*totals)[B]) {
    for (int g = 0; g < groups; g++) {
        IVec dots[P][B] = {};
#pragma GCC unroll 4
        for (int i = 0; i < kWords; i++) {
            const int16_t* pairs = q + g * kGroup + 8 * i;
            UShortVec words[P];
            for (int p = 0; p < P; p++) words[p] = tile.word(g, i, part + p * L);
            __builtin_prefetch(tile.words + kAhead + ((g * kWords + i) * kTile + part) * 4, 0, 2);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                ShortVec halves[P];
                for (int p = 0; p < P; p++) halves[p] = (ShortVec)(k == 3 ? words[p] >> 12 : words[p] >> 4 * k & 15);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) {
                    const ShortVec inputs = both(pairs + b * stride + 2 * k);
                    for (int p = 0; p < P; p++) dots[p][b] = add_products(dots[p][b], halves[p], inputs);
                }
            }
        }
        for (int p = 0; p < P; p++) {
            const Doubles steps = Doubles::of(tile.steps(g, part + p * L));
            const Doubles offsets = Doubles::of(tile.offsets(g, part + p * L));
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                totals[p][b].add(Doubles::of(dots[p][b]), steps);
                totals[p][b].add(offsets, -sums[g + b * stride * sizeof *q / sizeof *sums]);
            }
        }
    }
}
#endif

// `begin` is a multiple of kTile, and so is `end` unless it is the last row. The vectors of a tile share the loads of the
// activations where their sums fit the registers.
template <int B>
void gemv_int4(const Matrix& m, int begin, int end, Inputs x, float* y, size_t ldy, const float* bias,
               Strided addend) {
    constexpr int P = 2 * L <= kTile && B <= 2 ? 2 : 1;
    const auto* tokens = static_cast<const int16_t*>(x.data);
    const int groups = groups_of(m);
    for (int first = begin; first < end; first += P * L) {
        const int part = first % kTile;
        Doubles totals[P][B] = {};
        tile_times<B, P>(tile_of(m, first - part), groups, part, tokens + kHeader, sums_of(tokens, m.cols), x.stride,
                         totals);
        for (int i = first, p = 0; p < P && i < end; i += L, p++) {
            const int n = end - i;
            const Doubles rows = Doubles::of(load_rows(m.scale + i, n));
            const Doubles offset = Doubles::of(bias ? load_rows(bias + i, n) : Vec{});
            for (int b = 0; b < B; b++) {
                float scale;
                memcpy(&scale, tokens + b * x.stride, sizeof scale);
                Doubles sum = offset;
                sum.add(Doubles::of(totals[p][b].floats() * scale), rows);  // exact products, like `gemv_of`
                Vec value = sum.floats();
                if (addend.data) value = load_rows(addend.data + b * addend.stride + i, n) + value;
                if (n < L)
                    store_part(y + b * ldy + i, value, n);
                else
                    store(y + b * ldy + i, value);
            }
        }
    }
}

}  // namespace
}  // namespace neuronmm
