// GEMM scheme in fp32: weights (bf16, int8 or int4) are widened when a panel is packed, inputs when a block of rows is
// loaded. For processors without a bf16 dot product, and those where fp32 is faster.
#pragma once

#include "gemm_impl.h"
#include "transpose_impl.h"

namespace neuronmm {
namespace {

// Load min(n, L) consecutive elements of a matrix from index `at` on as fp32 and fill the rest with zeros.
inline Vec widened(const Matrix& m, size_t at, int n) {
    if (m.type == kBFloat16) {
        const uint16_t* p = static_cast<const uint16_t*>(m.data) + at;
        return n >= L ? load(p) : load_part(p, n);
    }
    const int8_t* p = static_cast<const int8_t*>(m.data) + at;
    return n >= L ? load(p) : load_part(p, n);
}

struct Fp32Scheme {
    typedef float Cell;
    static constexpr int kInputs = 1;
    static constexpr int kRows = L == 16 ? 12 : 6;
    static constexpr int kDepth = 256;
    static constexpr int kPanels = 4;  // widening a block of rows takes an eighth of the time that multiplying it takes
    struct Rows {
        static constexpr size_t kStride = kDepth + 16;  // a constant, so that one register addresses all rows
        const float* data;
        const float* row(int i) const { return data + i * kStride; }
    };

    static Vec everywhere(const float* x) { return splat(*x); }
    static Vec add(Vec sums, Vec both, Vec cells) { return sums + both * cells; }

    static Rows inputs(const uint16_t* x, size_t ldx, int rows, int depth) {
        static thread_local Spare<float> spare;
        float* to = spare.reserve(Rows::kStride * rows);
        for (int i = 0; i < rows; i++) convert(x + i * ldx, depth, to + i * Rows::kStride);
        return {to};
    }

    // panel[k][j] = column from + k of row begin + j for j < n; zeros for the other j of a vector.
    static void pack_rows(const Matrix& m, int begin, int n, int from, int depth, float* panel) {
        if (m.type == kInt4) return pack_tiles(m, begin, n, from, depth, panel);
        for (int half = 0; half < n; half += L)
            for (int k = 0; k < depth; k += L) {
                Lanes r[L];
#pragma GCC unroll 16
                for (int j = 0; j < L; j++)
                    r[j] = half + j < n ? (Lanes)widened(m, static_cast<size_t>(begin + half + j) * m.cols + from + k,
                                                         depth - k)
                                        : Lanes{};
                transpose(r);
                for (int i = 0; i < L && k + i < depth; i++) store(panel + (k + i) * kPanel + half, (Vec)r[i]);
            }
    }

    // The same for int4.
    static void pack_tiles(const Matrix& m, int begin, int n, int from, int depth, float* panel) {
        for (int half = 0; half < n; half += L)
            each_pair(m, begin + half, from, depth, [&](int j, ShortVec both) {
                store(panel + j * kPanel + half, lower_halves(both));
                if (j + 1 < depth) store(panel + (j + 1) * kPanel + half, upper_halves(both));
            });
    }

    // panel[k][j] = row from + k of column begin + j for j < n; zeros for the other j of a vector.
    static void pack_columns(const Matrix& m, int begin, int n, int from, int depth, float* panel) {
        for (int k = 0; k < depth; k++)
            for (int half = 0; half < n; half += L)
                store(panel + k * kPanel + half,
                      widened(m, static_cast<size_t>(from + k) * m.cols + begin + half, n - half));
    }
};

}  // namespace
}  // namespace neuronmm
