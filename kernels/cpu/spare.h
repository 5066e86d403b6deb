// Memory that a thread reuses from call to call.
#pragma once

#include <stdlib.h>

namespace neuronmm {
namespace {

// A buffer of plain values. It only grows; growing discards its content.
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

}  // namespace
}  // namespace neuronmm
