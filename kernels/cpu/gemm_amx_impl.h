// GEMM scheme for Intel's matrix unit (AMX): bf16 operands, fp32 sums.
//
// The unit has eight tiles of 16 rows of 64 bytes. Four hold the sums of 32 input rows and one panel, two the input
// rows, two the panel. The panel's tiles hold 16 pairs of inputs of 16 outputs each: the layout of the dot product
// instruction.
#pragma once

#include "gemm_dot_impl.h"

// Functions, not the file, have the flag for AMX, so that older compilers can build the rest.
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define NEURONMM_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace neuronmm {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a row
constexpr int kTileInputs = kTileBytes / sizeof(uint16_t);
constexpr int kBlockRows = 2 * kTileRows;

// What ldtilecfg reads: the shapes of the tiles (Intel 64 and IA-32 Architectures Software Developer's Manual, volume
// 2A).
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // `count` input rows: tiles 0 and 1 have the sums of the first 16, 2 and 3 of the others, 4 and 5 the inputs.
    explicit TileShapes(int count) {
        const int upper = count < kTileRows ? count : kTileRows, lower = count - upper;
        const int all[] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
        for (int tile = 0; tile < 8; tile++) {
            rows[tile] = all[tile];
            row_bytes[tile] = all[tile] ? kTileBytes : 0;
        }
    }
};

// Make the compiler finish its stores to what `address` leads to: GCC's intrinsics do not say which memory they read.
inline void settle(const void* address) { asm volatile("" : : "r"(address) : "memory"); }

// sums[32][32] = x panel, for up to 16 rows, or up to 32 if Lower. `tail` has the inputs of each row after the last
// whole 32, padded with zeros.
template <bool Lower>
NEURONMM_AMX void multiply_tiles(const uint32_t* panel, int depth, const uint16_t* x, size_t ldx, const uint16_t* tail,
                                 float* sums, Ahead& ahead, size_t share) {
    settle(panel), settle(x), settle(tail);
    _tile_zero(0);
    _tile_zero(1);
    if (Lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    size_t row_bytes = ldx * sizeof *x;
    for (int k = 0; k < depth; k += kTileInputs) {
        if (k % Ahead::kEvery == 0) ahead.fetch(share);
        const uint16_t* from = x + k;
        if (depth - k < kTileInputs) from = tail, row_bytes = kTileInputs * sizeof *tail;
        const uint32_t* pairs = panel + k / 2 * kPanel;
        for (int i = 0; i < (Lower ? kBlockRows : kTileRows); i++)  // too many streams for the processor's own prefetch
            __builtin_prefetch(x + i * ldx + k + 2 * kTileInputs);
        _tile_loadd(4, from, row_bytes);
        _tile_loadd(6, pairs, kPanel * sizeof *pairs);
        _tile_loadd(7, pairs + L, kPanel * sizeof *pairs);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (Lower) {
            _tile_loadd(5, reinterpret_cast<const char*>(from) + kTileRows * row_bytes, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, kPanel * sizeof *sums);
    _tile_stored(1, sums + L, kPanel * sizeof *sums);
    if (Lower) {
        _tile_stored(2, sums + kTileRows * kPanel, kPanel * sizeof *sums);
        _tile_stored(3, sums + kTileRows * kPanel + L, kPanel * sizeof *sums);
    }
}

NEURONMM_AMX void use_tiles(const TileShapes& shapes) {
    settle(&shapes);
    _tile_loadconfig(&shapes);
}

NEURONMM_AMX void release_tiles() { _tile_release(); }

// Packs as the dot product does; what multiplies is `panels_times` below. Sums pass through memory once per panel, so
// panels are deep, but deeper ones would leave the cache (docs/log.md).
struct AmxScheme : Bf16DotScheme {
    static constexpr int kPanels = 4;
    static constexpr int kDepth = 2048;

    static void pack_rows(const Matrix& m, int begin, int n, int from, int depth, uint32_t* panel) {
        Bf16DotScheme::pack_rows(m, begin, n, from, depth, panel);
        fill(depth, panel);
    }

    static void pack_columns(const Matrix& m, int begin, int n, int from, int depth, uint32_t* panel) {
        Bf16DotScheme::pack_columns(m, begin, n, from, depth, panel);
        fill(depth, panel);
    }

    // Pairs of zeros up to the next whole tile.
    static void fill(int depth, uint32_t* panel) {
        for (int p = (depth + 1) / 2; p % (kTileInputs / 2); p++) memset(panel + p * kPanel, 0, kPanel * sizeof *panel);
    }
};

template <>
void panels_times<AmxScheme>(const uint32_t* panels, size_t cells, int depth, const uint16_t* x, size_t ldx, int rows,
                             float* y, size_t ldy, int n, const float* scale, const float* bias, Strided addend,
                             Ahead ahead) {
    alignas(64) float sums[kBlockRows * kPanel];
    alignas(64) uint16_t tail[kBlockRows * kTileInputs] = {};
    const int rest = depth % kTileInputs;
    const size_t blocks = static_cast<size_t>((n + kPanel - 1) / kPanel) * ((rows + kBlockRows - 1) / kBlockRows);
    const size_t calls = blocks * ((depth + Ahead::kEvery - 1) / Ahead::kEvery);
    const size_t share = calls ? ahead.left / calls : 0;
    for (int i = 0, shaped = 0; i < rows; i += kBlockRows) {
        const int count = rows - i < kBlockRows ? rows - i : kBlockRows;
        if (count != shaped) use_tiles(TileShapes(shaped = count));
        const uint16_t* inputs = x + i * ldx;
        if (rest)
            for (int r = 0; r < count; r++)
                memcpy(tail + r * kTileInputs, inputs + r * ldx + depth - rest, rest * sizeof *tail);
        const Strided more{addend.row(i), addend.stride};
        for (int j = 0; j < n; j += kPanel) {
            const auto multiply = count > kTileRows ? multiply_tiles<true> : multiply_tiles<false>;
            multiply(panels + j / kPanel * cells, depth, inputs, ldx, tail, sums, ahead, share);
            for (int at = j; at < n && at < j + kPanel; at += L) {
                const Finish finish(at, n, scale, bias, more);
                for (int r = 0; r < count; r++) finish(load(sums + r * kPanel + at - j), r, y + (i + r) * ldy);
            }
        }
    }
    if (rows > 0) release_tiles();
}

}  // namespace
}  // namespace neuronmm
#endif
