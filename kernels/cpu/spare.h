// Memory that a thread reuses from call to call.
#pragma once

#include <stdlib.h>

#include <new>

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
            const size_t enough = (n + 63) / 64 * 64;
            size = 0;
            data = static_cast<T*>(aligned_alloc(64, enough * sizeof(T)));
            if (!data) throw std::bad_alloc();
            size = enough;
        }
        return data;
    }
};

}  // namespace
}  // namespace neuronmm
