// GEMMs of many rows, for prefill. Weights are packed panel by panel during the GEMM. A panel has at most a few hundred
// kilobytes and serves every input row: at 512 rows packing is about 1 % of the work, and no second copy of the weights
// is kept.
//
// A scheme S defines how a panel is packed and multiplied:
//   Cell     element of a panel; it holds kInputs consecutive inputs of one output
//   Rows     the input rows in the form the panel is multiplied with
//   kRows    input rows per register block; their sums and one line of the panel fill the registers
//   kDepth   inputs per panel, so that the panel and the input rows stay in the cache
//   kPanels  panels that share a block of input rows in the form the panel is multiplied with
#pragma once

#include "kernels_impl.h"

namespace neuronmm {
namespace {

constexpr int kPanel = 2 * L;  // outputs of one panel: two vectors

// The weights that the next panels are packed from. They are fetched while these are multiplied, a few lines at a time:
// the core drops prefetches when it has no room for another request.
struct Ahead {
    static constexpr int kEvery = 64;  // inputs between two calls
    const char* at;
    size_t left;

    void fetch(size_t bytes) {
        for (size_t done = 0; done < bytes && left; done += kCacheLine) {
            __builtin_prefetch(at, 0, 2);
            at += kCacheLine;
            left -= left < kCacheLine ? left : kCacheLine;
        }
    }
};

// What turns the sums of outputs [at, at + L) of n into results: the scale, the bias and the addend.
struct Finish {
    Finish(int at, int n, const float* scale, const float* bias, Strided addend)
        : at(at), count(n - at < L ? n - at : L), addend(addend) {
        const bool whole = count == L;
        factor = !scale ? splat(1.0f) : whole ? load(scale + at) : load_part(scale + at, count);
        offset = !bias ? Vec{} : whole ? load(bias + at) : load_part(bias + at, count);
    }

    // Store the outputs of row i to y.
    void operator()(Vec sums, int i, float* y) const {
        Vec value = sums * factor + offset;
        if (addend.data) {
            const float* more = addend.row(i) + at;
            value += count == L ? load(more) : load_part(more, count);
        }
        if (count == L)
            store(y + at, value);
        else
            store_part(y + at, value, count);
    }

    const int at, count;
    const Strided addend;
    Vec factor, offset;
};

// Multiply R rows of x with the first V vectors of one panel and store the first n output columns to y. Every kEvery
// inputs, fetch `share` bytes of what comes next.
template <class S, int R, int V>
void panel_rows(const typename S::Cell* panel, int depth, typename S::Rows x, float* y, size_t ldy, int n,
                const float* scale, const float* bias, Strided addend, Ahead& ahead, size_t share) {
    Vec acc[R][V];
#pragma GCC unroll 12
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int half = 0; half < V; half++) {
            acc[i][half] = Vec{};
            __builtin_prefetch(y + i * ldy + half * L, 1);
        }
    for (int k = 0; k < depth;) {
        ahead.fetch(share);
        for (const int end = depth - k < Ahead::kEvery ? depth : k + Ahead::kEvery; k < end; k += S::kInputs) {
            Vec cells[V];
#pragma GCC unroll 2
            for (int half = 0; half < V; half++)
                cells[half] = load(reinterpret_cast<const float*>(panel + k / S::kInputs * kPanel + half * L));
#pragma GCC unroll 12
            for (int i = 0; i < R; i++) {
                const Vec both = S::everywhere(x.row(i) + k);
#pragma GCC unroll 2
                for (int half = 0; half < V; half++) acc[i][half] = S::add(acc[i][half], both, cells[half]);
            }
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < V; half++) {
        const Finish finish(half * L, n, scale, bias, addend);
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) finish(acc[i][half], i, y + i * ldy);
    }
}

// Multiply all rows of x with panels of `cells` cells each, which hold n outputs together. A block of rows is made once
// for all panels.
template <class S>
void panels_times(const typename S::Cell* panels, size_t cells, int depth, const uint16_t* x, size_t ldx, int rows,
                  float* y, size_t ldy, int n, const float* scale, const float* bias, Strided addend, Ahead ahead) {
    const size_t calls = static_cast<size_t>((depth + Ahead::kEvery - 1) / Ahead::kEvery) * ((n + kPanel - 1) / kPanel);
    int i = 0;
    const auto take = [&](auto one_vector, auto two_vectors, int r) {
        const size_t share = calls && i < rows ? ahead.left * r / (rows - i) / calls : 0;
        for (; i + r <= rows; i += r) {
            const auto inputs = S::inputs(x + i * ldx, ldx, r, depth);
            const float* more = addend.row(i);
            for (int j = 0; j < n; j += kPanel) {
                const int width = n - j < kPanel ? n - j : kPanel;
                const auto multiply = width <= L ? one_vector : two_vectors;
                multiply(panels + j / kPanel * cells, depth, inputs, y + i * ldy + j, ldy, width,
                         scale ? scale + j : nullptr, bias ? bias + j : nullptr,
                         {more ? more + j : nullptr, addend.stride}, ahead, share);
            }
        }
    };
    take(panel_rows<S, S::kRows, 1>, panel_rows<S, S::kRows, 2>, S::kRows);
    if constexpr (S::kRows > 8) take(panel_rows<S, 8, 1>, panel_rows<S, 8, 2>, 8);
    take(panel_rows<S, 4, 1>, panel_rows<S, 4, 2>, 4);
    take(panel_rows<S, 1, 1>, panel_rows<S, 1, 2>, 1);
}

template <class T>
T* panel_memory(size_t cells) {
    static thread_local Spare<T> spare;
    return spare.reserve(cells);
}

// Inputs per panel: `all` inputs are split into about equal parts of at most kDepth, rounded up to the widest vector and
// to a row of a tile.
template <class S>
int depth_of(int all) {
    const int parts = all > S::kDepth ? (all + S::kDepth - 1) / S::kDepth : 1;
    return ((all + parts - 1) / parts + 31) / 32 * 32;
}

template <class S>
void gemm_nt_by(const Matrix& m, int begin, int end, const uint16_t* x, size_t ldx, int rows, float* y, size_t ldy,
                const float* bias, Strided addend) {
    constexpr int kWidth = S::kPanels * kPanel;
    const int most = depth_of<S>(m.cols);
    const size_t cells = static_cast<size_t>(most) / S::kInputs * kPanel;
    auto* panels = panel_memory<typename S::Cell>(cells * S::kPanels);
    for (int j = begin; j < end; j += kWidth) {
        const int n = end - j < kWidth ? end - j : kWidth, after = end - j - n < kWidth ? end - j - n : kWidth;
        const char* ahead = static_cast<const char*>(m.data) + (j + n) * m.row_bytes();
        int k = 0;
        do {  // runs once even for a matrix without columns, whose result is the bias and the addend
            const int depth = m.cols - k < most ? m.cols - k : most;
            for (int p = 0; p * kPanel < n; p++) {
                const int left = n - p * kPanel;
                S::pack_rows(m, j + p * kPanel, left < kPanel ? left : kPanel, k, depth, panels + p * cells);
            }
            const int64_t ahead_bytes = after * m.row_bytes(), all = m.cols ? m.cols : 1;
            const size_t from = ahead_bytes * k / all, to = ahead_bytes * (k + depth) / all;
            const Strided base = k ? Strided{y, ldy} : addend;
            panels_times<S>(panels, cells, depth, x + k, ldx, rows, y + j, ldy, n, m.scale ? m.scale + j : nullptr,
                            bias && !k ? bias + j : nullptr, {base.data ? base.data + j : nullptr, base.stride},
                            {ahead + from, to - from});
        } while ((k += most) < m.cols);
    }
}

template <class S>
void gemm_nn_by(const Matrix& m, const uint16_t* x, size_t ldx, int rows, float* y, size_t ldy) {
    const int most = depth_of<S>(m.rows);
    auto* panel = panel_memory<typename S::Cell>(static_cast<size_t>(most) / S::kInputs * kPanel);
    for (int j = 0; j < m.cols; j += kPanel) {
        const int n = m.cols - j < kPanel ? m.cols - j : kPanel;
        int k = 0;
        do {  // runs once even for a matrix without rows, whose result is zero
            const int depth = m.rows - k < most ? m.rows - k : most;
            S::pack_columns(m, j, n, k, depth, panel);
            panels_times<S>(panel, 0, depth, x + k, ldx, rows, y + j, ldy, n, nullptr, nullptr,
                            {k ? y + j : nullptr, ldy}, {nullptr, 0});
        } while ((k += most) < m.rows);
    }
}

}  // namespace
}  // namespace neuronmm
