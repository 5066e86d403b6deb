// The outputs of a linear in row form: which of them are pivots, and which row of b each other one is.
#pragma once

#include <algorithm>

#include "core.h"

namespace neuronmm {

// Whether the pivots are a range, which begins at output_of_pivot(linear, 0).
inline bool contiguous(const Linear& linear) {
    const int last = linear.a.rows - 1;
    return !linear.pivots || last < 0 || linear.pivots[last] - linear.pivots[0] == last;
}

// The output that pivot i is.
inline int output_of_pivot(const Linear& linear, int i) { return linear.pivots ? linear.pivots[i] : linear.first + i; }

// The number of pivots before output n. The other outputs before n are the first n - pivots_before(n) rows of b.
inline int pivots_before(const Linear& linear, int n) {
    const int rank = linear.a.rows;
    if (!linear.pivots) return std::clamp(n - linear.first, 0, rank);
    return static_cast<int>(std::lower_bound(linear.pivots, linear.pivots + rank, n) - linear.pivots);
}

// The output that row i of b is, or the number of outputs if b has i rows. A pivot precedes row i if at most i other
// outputs precede the pivot.
inline int output_of_row(const Linear& linear, int i) {
    int before = 0;  // pivots known to precede row i
    for (int left = linear.a.rows; left > 0;) {
        const int half = (left + 1) / 2, last = before + half - 1;
        before += output_of_pivot(linear, last) - last <= i ? half : 0;  // without a branch, which would be mispredicted
        left -= half;
    }
    return i + before;
}

// Whether the pivots are strictly increasing outputs of the linear.
inline bool pivots_fit(const Linear& linear) {
    int previous = -1;
    for (int i = 0; i < linear.a.rows; i++) {
        const int64_t output = linear.pivots ? linear.pivots[i] : static_cast<int64_t>(linear.first) + i;
        if (output <= previous || output >= linear.out()) return false;
        previous = static_cast<int>(output);
    }
    return true;
}

}  // namespace neuronmm
