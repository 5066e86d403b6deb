// The kernels, written once with the compiler's vector types and compiled once for each instruction set.
#pragma once

#include <math.h>

#include "attention_impl.h"

namespace neuronmm {
namespace {

void interleave(Strided zeros, Strided ones, uint64_t bits, int n, const float* bias, bool add, int batch, float* y,
                size_t ldy) {
    float merged[64];
#if !defined(__AVX512F__)
    int place[64];  // where the zeros go, then where the ones go
    const int count = n - __builtin_popcountll(n < 64 ? bits & ((uint64_t{1} << n) - 1) : bits);
    for (int i = 0, zero = 0, one = count; i < n; i++) place[bits >> i & 1 ? one++ : zero++] = i;
#endif
    for (int b = 0; b < batch; b++) {
        const float *zero = zeros.data + b * zeros.stride, *one = ones.data + b * ones.stride;
        float* to = y + b * ldy;
#if defined(__AVX512F__)
        for (int i = 0; i < n; i += L) {
            const __mmask16 set = bits >> i;
            _mm512_storeu_ps(merged + i, _mm512_mask_expand_ps(_mm512_maskz_expand_ps(~set, _mm512_loadu_ps(zero)), set,
                                                               _mm512_loadu_ps(one)));
            const int taken = __builtin_popcount(set);
            one += taken, zero += L - taken;
        }
#else
        for (int i = 0; i < count; i++) merged[place[i]] = zero[i];
        for (int i = count; i < n; i++) merged[place[i]] = one[i - count];
#endif
        for (int i = 0; i < n; i += L) {
            const int left = n - i;
            Vec value = left < L ? load_part(merged + i, left) : load(merged + i);
            if (bias) value += left < L ? load_part(bias + i, left) : load(bias + i);
            if (add) value += left < L ? load_part(to + i, left) : load(to + i);
            if (left < L)
                store_part(to + i, value, left);
            else
                store(to + i, value);
        }
    }
}

void swiglu(float* gate, const float* up, int n) {
    int i = 0;
    for (; i + L <= n; i += L) {
        const Vec g = load(gate + i);
        store(gate + i, g / (exp(-g) + 1.0f) * load(up + i));
    }
    if (i < n) {
        const Vec g = load_part(gate + i, n - i);
        store_part(gate + i, g / (exp(-g) + 1.0f) * load_part(up + i, n - i), n - i);
    }
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    Vec squares = {};
    int i = 0;
    for (; i + L <= n; i += L) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < n; i++) total += x[i] * x[i];
    const float inverse = 1.0f / sqrtf(total / n + eps);
    for (i = 0; i + L <= n; i += L) store(out + i, load(x + i) * inverse * load(weight + i));
    for (; i < n; i++) out[i] = x[i] * inverse * weight[i];
}

void rotate(float* head, const float* cos, const float* sin, int half) {
    int j = 0;
    for (; j + L <= half; j += L) {
        const Vec left = load(head + j), right = load(head + j + half);
        store(head + j, left * load(cos + j) - right * load(sin + j));
        store(head + j + half, right * load(cos + j + half) + left * load(sin + j + half));
    }
    for (; j < half; j++) {
        const float left = head[j], right = head[j + half];
        head[j] = left * cos[j] - right * sin[j];
        head[j + half] = right * cos[j + half] + left * sin[j + half];
    }
}

void widen(const void* from, int type, int n, float* to) {
    switch (type) {
        case kFloat32: return convert(static_cast<const float*>(from), n, to);
        case kBFloat16: return convert(static_cast<const uint16_t*>(from), n, to);
        default: return convert(static_cast<const int8_t*>(from), n, to);
    }
}

void narrow(const float* from, int type, int n, void* to) {
    if (type == kFloat32) return convert(from, n, static_cast<float*>(to));
    convert(from, n, static_cast<uint16_t*>(to));
}

// The GEMMs may be null.
constexpr Kernels table(const char* name, decltype(Kernels::gemm_nt) gemm_nt, decltype(Kernels::gemm_nn) gemm_nn,
                        decltype(Kernels::gemm_integer) gemm_integer = nullptr) {
    return {name,     prepare, gemv,  interleave, swiglu,  attend,  softmax,
            rms_norm, rotate,  widen, narrow,     gemm_nt, gemm_nn, gemm_integer};
}

}  // namespace
}  // namespace neuronmm
