// The outputs of a linear in row form: which of them are pivots, and which row of b each other one is.
#pragma once

#include <algorithm>

#include "core.h"

namespace neuronmm {

// The output that pivot i is.
inline int output_of_pivot(const Linear& linear, int i) { return linear.pivots ? linear.pivots[i] : linear.first + i; }

// The number of pivots before output n. The other outputs before n are the first n - pivots_before(n) rows of b.
inline int pivots_before(const Linear& linear, int n) {
    const int rank = linear.a.rows;
    if (!linear.pivots) return std::clamp(n - linear.first, 0, rank);
    return static_cast<int>(std::lower_bound(linear.pivots, linear.pivots + rank, n) - linear.pivots);
}

// The output that row i of b is. A pivot precedes it if at most i other outputs precede the pivot.
inline int output_of_row(const Linear& linear, int i) {
    int begin = 0, end = linear.a.rows;
    while (begin < end) {
        const int middle = (begin + end) / 2;
        if (output_of_pivot(linear, middle) - middle <= i)
            begin = middle + 1;
        else
            end = middle;
    }
    return i + begin;
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
