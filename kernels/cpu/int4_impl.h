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
constexpr int kGroupBytes = kTile * (4 * kWords + 2);  // of a group in a tile

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
    // Prefetch as many lines as a group has, with its last word one more, from one tile ahead on, or kAhead if that is
    // further. The order is that of memory: the words and the steps of the next tile in turns halve the speed of Zen 5.
    void fetch(int count, int group, int word) const {
        const int ahead = count * kGroupBytes > kAhead ? count * kGroupBytes : kAhead;
        const uint8_t* at = words + ahead + group * kGroupBytes + word * kCacheLine;
        __builtin_prefetch(at, 0, 2);
        if (word == kWords - 1) __builtin_prefetch(at + kCacheLine, 0, 2);
    }

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

// Store rows [i, i + min(n, L)) of one token's product, whose sums of integers are `totals`.
inline void finish_rows(const Matrix& m, int i, int n, Vec totals, const int16_t* token, float* y, const float* bias,
                        const float* addend) {
    float scale;
    memcpy(&scale, token, sizeof scale);
    Doubles sum = Doubles::of(bias ? load_rows(bias + i, n) : Vec{});
    sum.add(Doubles::of(totals * scale), Doubles::of(load_rows(m.scale + i, n)));  // exact products, like `gemv_of`
    Vec value = sum.floats();
    if (addend) value = load_rows(addend + i, n) + value;
    if (n < L)
        store_part(y + i, value, n);
    else
        store(y + i, value);
}

#if defined(NEURONMM_BYTES)
constexpr int kExactGroups = 64;  // groups whose sums of half bytes times lower bytes, times their steps, fit int32
static_assert(int64_t{kExactGroups} * kGroup * 15 * 255 * 255 <= INT32_MAX, "");

// Sums of a group over half bytes times activations. The instructions multiply bytes without sign by bytes with sign. So
// the upper bytes of the activations, with sign, and the lower ones, without, have sums of their own.
#if defined(__AVX512VNNI__)
struct ByteSums {
    IVec upper = {}, lower = {};

    // Add word i of the group: its even and odd half bytes, times activations as `split_bytes` left them.
    void add(int, UShortVec even, UShortVec odd, const int16_t* split) {
        upper = times(upper, even, both(split)), upper = times(upper, odd, both(split + 2));
        lower = times(lower, both(split + 4), even), lower = times(lower, both(split + 6), odd);
    }
    // Add the sums, times the steps, to those of other groups.
    void scale(IVec steps, IVec& scaled_upper, IVec& scaled_lower) const {
        scaled_upper += upper * steps, scaled_lower += lower * steps;
    }

private:
    template <class A, class B>
    static IVec times(IVec sums, A unsigned_bytes, B bytes) {
        return (IVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)unsigned_bytes, (__m512i)bytes);
    }
};
#else
struct ByteSums {
    ShortVec upper = {}, lower[2] = {};  // two columns of a row per pair of lanes
    static_assert(kGroup / 2 * 15 * 128 <= INT16_MAX && kGroup / 4 * 15 * 255 <= INT16_MAX, "a lane holds its sums");

    void add(int i, UShortVec even, UShortVec odd, const int16_t* split) {
        upper += times(even, both(split)) + times(odd, both(split + 2));
        lower[i / 2] += times(both(split + 4), even) + times(both(split + 6), odd);
        asm("" : "+x"(upper), "+x"(lower[i / 2]));  // or the compiler keeps the products of a whole group, in memory
    }
    void scale(IVec steps, IVec& scaled_upper, IVec& scaled_lower) const {
        const ShortVec twice = (ShortVec)(steps | steps << 16);
        scaled_upper = add_products(scaled_upper, upper, twice);
        scaled_lower = add_products(add_products(scaled_lower, lower[0], twice), lower[1], twice);
    }

private:
    template <class A, class B>
    static ShortVec times(A unsigned_bytes, B bytes) {
        return (ShortVec)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)bytes);
    }
};
#endif

// Add the sums over s q times the activation, of P L rows from row `part` of a tile on.
template <int B, int P>
inline void add_steps(Int4Tile tile, int groups, int part, const int16_t* q, size_t stride, Doubles (*totals)[B]) {
    const UShortVec mask = (UShortVec)(0x0f0f0f0f - IVec{});
    for (int from = 0; from < groups; from += kExactGroups) {
        const int to = groups - from < kExactGroups ? groups : from + kExactGroups;
        IVec scaled_upper[P][B] = {}, scaled_lower[P][B] = {};
        for (int g = from; g < to; g++) {
            ByteSums dots[P][B];
#pragma GCC unroll 4
            for (int i = 0; i < kWords; i++) {
                if (!part) tile.fetch(groups, g, i);
#pragma GCC unroll 2
                for (int p = 0; p < P; p++) {
                    const UShortVec word = tile.word(g, i, part + p * L);
#pragma GCC unroll 8
                    for (int b = 0; b < B; b++)
                        dots[p][b].add(i, word & mask, word >> 4 & mask, q + b * stride + g * kGroup + 8 * i);
                }
            }
#pragma GCC unroll 2
            for (int p = 0; p < P; p++)
#pragma GCC unroll 8
                for (int b = 0; b < B; b++)
                    dots[p][b].scale(tile.steps(g, part + p * L), scaled_upper[p][b], scaled_lower[p][b]);
        }
        for (int p = 0; p < P; p++)
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                totals[p][b].add(Doubles::of(scaled_upper[p][b]), 256);
                totals[p][b].add(Doubles::of(scaled_lower[p][b]), 1);
            }
    }
}
#else
// Add the sums over s q times the activation, of P L rows from row `part` of a tile on.
template <int B, int P>
inline void add_steps(Int4Tile tile, int groups, int part, const int16_t* q, size_t stride, Doubles (*totals)[B]) {
    for (int g = 0; g < groups; g++) {
        IVec dots[P][B] = {};
#pragma GCC unroll 4
        for (int i = 0; i < kWords; i++) {
            const int16_t* pairs = q + g * kGroup + 8 * i;
            UShortVec words[P];
            for (int p = 0; p < P; p++) words[p] = tile.word(g, i, part + p * L);
            if (!part) tile.fetch(groups, g, i);
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
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) totals[p][b].add(Doubles::of(dots[p][b]), steps);
        }
    }
}
#endif

constexpr int kExactSums = 256;  // groups whose offsets times the lower bits of the sums fit int32
static_assert(int64_t{kExactSums} * 255 * ((1 << kLowerBits) - 1) <= INT32_MAX, "");

// Subtract the sums over 16 m times the activation, of the same rows.
template <int B, int P>
inline void subtract_offsets(Int4Tile tile, int groups, int part, const int16_t* sums, size_t stride,
                             Doubles (*totals)[B]) {
    for (int from = 0; from < groups; from += kExactSums) {
        const int to = groups - from < kExactSums ? groups : from + kExactSums;
        IVec lower[P][B] = {}, upper[P][B] = {};
        for (int g = from; g < to; g += 2)
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                const IVec second = tile.offsets(g + 1 < to ? g + 1 : g, part + p * L);  // the sum of no group is zero
                const ShortVec offsets = (ShortVec)(tile.offsets(g, part + p * L) | second << 16);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) {
                    const int16_t* pairs = sums + b * stride + 2 * g;
                    lower[p][b] = add_products(lower[p][b], offsets, both(pairs));
                    upper[p][b] = add_products(upper[p][b], offsets, both(pairs + 2));
                }
            }
        for (int p = 0; p < P; p++)
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) {
                totals[p][b].add(Doubles::of(lower[p][b]), -16);
                totals[p][b].add(Doubles::of(upper[p][b]), -16 * (1 << kLowerBits));
            }
    }
}

// `begin` is a multiple of kTile, and so is `end` unless it is the last row. The vectors of a tile share the loads of the
// activations where their sums fit the registers.
template <int B>
void gemv_int4(const Matrix& m, int begin, int end, Inputs x, float* y, size_t ldy, const float* bias,
               Strided addend) {
    constexpr int P = 2 * L <= kTile && B <= 2 ? 2 : 1;
    const auto* tokens = static_cast<const int16_t*>(x.data);
    const int groups = groups_of(m);
    for (int first = begin; first < end; first += P * L) {
        const int part = P * L < kTile ? first % kTile : 0;
        Doubles totals[P][B] = {};
        const Int4Tile tile = tile_of(m, first - part);
        add_steps<B, P>(tile, groups, part, tokens + kHeader, x.stride, totals);
        subtract_offsets<B, P>(tile, groups, part, sums_of(tokens, m.cols), x.stride, totals);
        for (int i = first, p = 0; p < P && i < end; i += L, p++)
            for (int b = 0; b < B; b++)
                finish_rows(m, i, end - i, totals[p][b].floats(), tokens + b * x.stride, y + b * ldy, bias,
                            addend.row(b));
    }
}

}  // namespace
}  // namespace neuronmm
