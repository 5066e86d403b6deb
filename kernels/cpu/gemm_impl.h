// Products of many rows, as reading a prompt has them. Weights are packed panel by panel on their way: a panel is some
// hundred kilobytes at most and serves every row of the input, so that packing is about a hundredth of the work at 512
// rows and no second copy of the weights is kept.
//
// A scheme S says how a panel is packed and multiplied: `Cell`, what it holds of a result, and how many inputs one stands
// for; `Rows`, what it is multiplied with; `kRows` input rows at a time, whose sums and a panel's line fill the registers;
// `kDepth` inputs at a time, so that panel and inputs stay in the cache.
#pragma once

#include "kernels_impl.h"

namespace neuronmm {
namespace {

constexpr int kPanel = 2 * L;  // results of one panel: two vectors

// R rows of x times one panel; the results' first n columns go to y.
template <class S, int R>
void panel_rows(const typename S::Cell* panel, int depth, typename S::Rows x, float* y, size_t ldy, int n,
                const float* scale, const float* bias, bool add) {
    Vec acc[R][2];
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) {
        acc[i][0] = acc[i][1] = Vec{};
        __builtin_prefetch(y + i * ldy, 1);
        __builtin_prefetch(y + i * ldy + L, 1);
    }
    for (int k = 0; k < depth; k += S::kInputs) {
        const Vec left = load(reinterpret_cast<const float*>(panel + k / S::kInputs * kPanel));
        const Vec right = load(reinterpret_cast<const float*>(panel + k / S::kInputs * kPanel + L));
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            const Vec both = S::everywhere(x.row(i) + k);
            acc[i][0] = S::add(acc[i][0], both, left);
            acc[i][1] = S::add(acc[i][1], both, right);
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const int at = half * L, count = n - at < L ? n - at : L;
        if (count <= 0) return;
        const bool whole = count == L;
        const Vec factor = !scale ? splat(1.0f) : whole ? load(scale + at) : load_part(scale + at, count);
        const Vec offset = !bias ? Vec{} : whole ? load(bias + at) : load_part(bias + at, count);
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            float* to = y + i * ldy + at;
            Vec value = acc[i][half] * factor + offset;
            if (add) value += whole ? load(to) : load_part(to, count);
            if (whole)
                store(to, value);
            else
                store_part(to, value, count);
        }
    }
}

// All rows of x. `next` bytes from `ahead` on are wanted after this: they are fetched in between.
template <class S>
void panel_times(const typename S::Cell* panel, int depth, const uint16_t* x, size_t ldx, int rows, float* y, size_t ldy,
                 int n, const float* scale, const float* bias, bool add, const char* ahead, size_t next) {
    const size_t step = next * S::kRows / rows / 64 * 64 + 64;
    size_t fetched = 0;
    int i = 0;
    const auto take = [&](auto multiply, int r) {
        for (; i + r <= rows; i += r) {
            for (const size_t stop = fetched + step; fetched < stop && fetched < next; fetched += 64)
                __builtin_prefetch(ahead + fetched, 0, 2);
            multiply(panel, depth, S::inputs(x + i * ldx, ldx, r, depth), y + i * ldy, ldy, n, scale, bias, add);
        }
    };
    take(panel_rows<S, S::kRows>, S::kRows);
    if constexpr (S::kRows > 8) take(panel_rows<S, 8>, 8);
    take(panel_rows<S, 4>, 4);
    take(panel_rows<S, 1>, 1);
}

template <class T>
T* panel_memory(size_t cells) {
    static thread_local Spare<T> spare;
    return spare.reserve(cells);
}

// How many inputs of `all` are taken at once: about equal parts of at most kDepth, a multiple of the widest vector.
template <class S>
int depth_of(int all) {
    const int parts = all > S::kDepth ? (all + S::kDepth - 1) / S::kDepth : 1;
    return ((all + parts - 1) / parts + 31) / 32 * 32;
}

template <class S>
void gemm_by(const Matrix& m, int begin, int end, const uint16_t* x, size_t ldx, int rows, float* y, size_t ldy,
             const float* bias, bool add) {
    const int most = depth_of<S>(m.cols);
    auto* panel = panel_memory<typename S::Cell>(static_cast<size_t>(most) / S::kInputs * kPanel);
    for (int j = begin; j < end; j += kPanel) {
        const int n = end - j < kPanel ? end - j : kPanel, after = end - j - n < kPanel ? end - j - n : kPanel;
        const char* ahead = static_cast<const char*>(m.data) + (j + n) * m.row_bytes();
        for (int k = 0; k < m.cols; k += most) {
            const int depth = m.cols - k < most ? m.cols - k : most;
            S::pack_rows(m, j, n, k, depth, panel);
            const size_t from = after * m.row_bytes() * k / m.cols, to = after * m.row_bytes() * (k + depth) / m.cols;
            panel_times<S>(panel, depth, x + k, ldx, rows, y + j, ldy, n, m.scale ? m.scale + j : nullptr,
                           bias && !k ? bias + j : nullptr, add || k, ahead + from, to - from);
        }
    }
}

template <class S>
void mix_by(const Matrix& m, const uint16_t* x, size_t ldx, int rows, float* y, size_t ldy) {
    const int most = depth_of<S>(m.rows);
    auto* panel = panel_memory<typename S::Cell>(static_cast<size_t>(most) / S::kInputs * kPanel);
    for (int j = 0; j < m.cols; j += kPanel) {
        const int n = m.cols - j < kPanel ? m.cols - j : kPanel;
        int k = 0;
        do {  // of no rows the result is zero
            const int depth = m.rows - k < most ? m.rows - k : most;
            S::pack_columns(m, j, n, k, depth, panel);
            panel_times<S>(panel, depth, x + k, ldx, rows, y + j, ldy, n, nullptr, nullptr, k > 0, nullptr, 0);
        } while ((k += most) < m.rows);
    }
}

}  // namespace
}  // namespace neuronmm
