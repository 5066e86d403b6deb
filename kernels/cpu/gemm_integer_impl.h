// GEMMs of int8 and int4 matrices with activations of 16 bits, for AVX2: an instruction multiplies twice as many pairs of
// 16-bit integers as of fp32 numbers, and nothing is rounded to bf16.
//
// A panel holds kPanel outputs as 16-bit integers, two neighbouring columns per lane: the weights of int8, the half
// bytes of int4. It serves every row. The sums of int8 are those of `gemv_int8`, bit by bit. The sums of int4 are exact
// within a group and fp32 over the groups.
#pragma once

#include "gemm_impl.h"
#include "int4_impl.h"
#include "transpose_impl.h"

namespace neuronmm {
namespace {

constexpr int kIntegerRows = 6;  // rows per register block: their sums and one line of the panel fill 16 registers
constexpr int kExactPairs = kExact / kShorts;  // pairs of columns whose products fit the int32 lanes

// sums[i][half] += the products of `pairs` pairs of columns, for R rows and both vectors of the panel.
template <int R>
inline void add_pairs(const ShortVec* panel, int pairs, const int16_t* x, size_t stride, IVec (*sums)[2]) {
    for (int p = 0; p < pairs; p++) {
        const ShortVec first = panel[2 * p], second = panel[2 * p + 1];
#pragma GCC unroll 6
        for (int i = 0; i < R; i++) {
            const ShortVec inputs = both(x + i * stride + 2 * p);
            sums[i][0] = add_products(sums[i][0], first, inputs);
            sums[i][1] = add_products(sums[i][1], second, inputs);
        }
    }
}

struct Int8Panel {
    // Store columns 2p and 2p + 1 of rows [begin, begin + n) as panel[2p + half]; other lanes are zero.
    static void pack(const Matrix& m, int begin, int n, ShortVec* panel) {
        const auto* data = static_cast<const int8_t*>(m.data) + static_cast<size_t>(begin) * m.cols;
        for (int half = 0; half < 2; half++)
            for (int k = 0; k < m.cols; k += kShorts) {
                Lanes r[L];
                const int left = m.cols - k;
#pragma GCC unroll 16
                for (int j = 0; j < L; j++) {
                    const int8_t* row = data + static_cast<size_t>(half * L + j) * m.cols + k;
                    r[j] = half * L + j >= n ? Lanes{}
                           : left >= kShorts ? (Lanes)load_shorts(row)
                                             : (Lanes)load_shorts_part(row, left);
                }
                transpose(r);
                for (int p = 0; p < L && 2 * p < left; p++) panel[k + 2 * p + half] = (ShortVec)r[p];
            }
    }

    template <int R>
    static void multiply(const Matrix& m, int, const ShortVec* panel, const int16_t* token, size_t stride,
                         Vec (*totals)[2]) {
        Doubles exact[R][2] = {};
        const int pairs = (m.cols + 1) / 2;
        for (int from = 0; from < pairs; from += kExactPairs) {
            IVec sums[R][2] = {};
            add_pairs<R>(panel + 2 * from, pairs - from < kExactPairs ? pairs - from : kExactPairs,
                         token + kHeader + 2 * from, stride, sums);
#pragma GCC unroll 6
            for (int i = 0; i < R; i++)
                for (int half = 0; half < 2; half++) exact[i][half].add(Doubles::of(sums[i][half]), 1);
        }
        for (int i = 0; i < R; i++)
            for (int half = 0; half < 2; half++) totals[i][half] = exact[i][half].floats();
    }
};

struct Int4Panel {
    static void pack(const Matrix& m, int begin, int, ShortVec* panel) {
        const Int4Tile tile = tile_of(m, begin);
        for (int half = 0; half < 2; half++)
            for (int at = 0; at < groups_of(m) * kWords; at++) {
                const UShortVec word = tile.word(at / kWords, at % kWords, half * L);
                for (int k = 0; k < 4; k++) panel[2 * (4 * at + k) + half] = (ShortVec)(word >> 4 * k & 15);
            }
    }

    template <int R>
    static void multiply(const Matrix& m, int begin, const ShortVec* panel, const int16_t* token, size_t stride,
                         Vec (*totals)[2]) {
        const Int4Tile tile = tile_of(m, begin);
        const auto* input_sums = reinterpret_cast<const float*>(sums_of(token, m.cols));
        const size_t next = stride * sizeof *token / sizeof *input_sums;
        for (int i = 0; i < R; i++) totals[i][0] = totals[i][1] = Vec{};
        for (int g = 0; g < groups_of(m); g++) {
            IVec sums[R][2] = {};
            add_pairs<R>(panel + g * kGroup, kGroup / 2, token + kHeader + g * kGroup, stride, sums);
            for (int half = 0; half < 2; half++) {
                const Vec steps = __builtin_convertvector(tile.steps(g, half * L), Vec);
                const Vec offsets = __builtin_convertvector(tile.offsets(g, half * L), Vec);
#pragma GCC unroll 6
                for (int i = 0; i < R; i++) {  // the compiler fuses each, in the same way for every R
                    totals[i][half] += __builtin_convertvector(sums[i][half], Vec) * steps;
                    totals[i][half] -= offsets * input_sums[g + i * next];
                }
            }
        }
    }
};

// Multiply R rows with a panel of n outputs from `begin` on.
template <class P, int R>
void panel_times(const Matrix& m, int begin, int n, const ShortVec* panel, const int16_t* tokens, size_t stride,
                 float* y, size_t ldy, const float* bias, Strided addend) {
    Vec totals[R][2];
    P::template multiply<R>(m, begin, panel, tokens, stride, totals);
    for (int half = 0; half * L < n; half++)
        for (int i = 0; i < R; i++)
            finish_rows(m, begin + half * L, n - half * L, totals[i][half], tokens + i * stride, y + i * ldy, bias,
                        addend.row(i));
}

template <class P>
void gemm_by_panels(const Matrix& m, int begin, int end, Inputs x, int rows, float* y, size_t ldy, const float* bias,
                    Strided addend) {
    static_assert(kPanel == kTile, "an int4 tile is a panel");
    const auto* tokens = static_cast<const int16_t*>(x.data);
    auto* panel = panel_memory<ShortVec>(static_cast<size_t>(groups_of(m)) * kGroup);
    for (int j = begin; j < end; j += kPanel) {
        const int n = end - j < kPanel ? end - j : kPanel;
        P::pack(m, j, n, panel);
        const auto take = [&](auto multiply, int i) {
            multiply(m, j, n, panel, tokens + i * x.stride, x.stride, y + i * ldy, ldy, bias,
                     Strided{addend.row(i), addend.stride});
        };
        int i = 0;
        for (; i + kIntegerRows <= rows; i += kIntegerRows) take(panel_times<P, kIntegerRows>, i);
        switch (rows - i) {
            case 5: take(panel_times<P, 5>, i); break;
            case 4: take(panel_times<P, 4>, i); break;
            case 3: take(panel_times<P, 3>, i); break;
            case 2: take(panel_times<P, 2>, i); break;
            case 1: take(panel_times<P, 1>, i); break;
        }
    }
}

void gemm_integer(const Matrix& m, int begin, int end, Inputs x, int rows, float* y, size_t ldy, const float* bias,
                  Strided addend) {
    const auto run = m.type == kInt4 ? gemm_by_panels<Int4Panel> : gemm_by_panels<Int8Panel>;
    run(m, begin, end, x, rows, y, ldy, bias, addend);
}

}  // namespace
}  // namespace neuronmm
