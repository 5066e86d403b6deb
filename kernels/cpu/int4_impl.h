// Rows of int4 matrices, read as integers.
//
// A row has blocks of 64 columns, each of two groups of 32 columns. The bytes of a row are those of its blocks, then
// those of its groups. Byte i of a block holds column i in its low half and column 32 + i in its high half. A group has
// two bytes, a step s and an offset m. The value of a column whose half byte is q is scale * (s q - 16 m), where `scale`
// belongs to the row. The columns of the last block that the matrix lacks are zero bits.
#pragma once

#include "vector_impl.h"

namespace neuronmm {
namespace {

constexpr int kGroup = 32, kBlock = 2 * kGroup;

struct Int4Row {
    const uint8_t *blocks, *groups;
};

inline Int4Row int4_row(const Matrix& m, int i) {
    const auto* row = static_cast<const uint8_t*>(m.data) + i * m.row_bytes();
    return {row, row + (m.cols + kBlock - 1) / kBlock * kGroup};
}

// The integers of L consecutive columns from `col`, a multiple of L, on. A row can be read up to the end of its block.
inline Vec load_int4(const Matrix& m, int i, int col) {
    typedef uint8_t Bytes __attribute__((vector_size(L)));
    const Int4Row row = int4_row(m, i);
    const uint8_t* group = row.groups + col / kGroup * 2;
    Bytes bytes;
    memcpy(&bytes, row.blocks + col / kBlock * kGroup + col % kGroup, sizeof bytes);
    const IVec halves = __builtin_convertvector(bytes, IVec) >> (col % kBlock < kGroup ? 0 : 4) & 15;
    return __builtin_convertvector(halves * group[0] - 16 * group[1], Vec);
}

// Load the first n < L elements from `col` on and fill the rest with zeros.
inline Vec load_int4(const Matrix& m, int i, int col, int n) {
    float buffer[L];
    store(buffer, load_int4(m, i, col));
    return load_part(buffer, n);
}

#if defined(__AVX512F__)
inline ShortVec load_bytes(const uint8_t* p) {
    return (ShortVec)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
#elif defined(__AVX2__)
inline ShortVec load_bytes(const uint8_t* p) {
    return (ShortVec)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
}
#else
inline ShortVec load_bytes(const uint8_t* p) {
    typedef uint8_t Bytes __attribute__((vector_size(kShorts)));
    Bytes bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, ShortVec);
}
#endif

// s q - 16 m for the half bytes q of a group: with q and -16 as the bytes of a lane, one instruction.
inline ShortVec in_group(ShortVec halves, const uint8_t* group) {
#if defined(__AVX2__)
    int16_t both;
    memcpy(&both, group, sizeof both);
#endif
#if defined(__AVX512F__)
    return (ShortVec)_mm512_maddubs_epi16(_mm512_set1_epi16(both),
                                          _mm512_or_si512((__m512i)halves, _mm512_set1_epi16(int16_t(0xf000))));
#elif defined(__AVX2__)
    return (ShortVec)_mm256_maddubs_epi16(_mm256_set1_epi16(both),
                                          _mm256_or_si256((__m256i)halves, _mm256_set1_epi16(int16_t(0xf000))));
#else
    return halves * int16_t(group[0]) - int16_t(16 * group[1]);
#endif
}

}  // namespace
}  // namespace neuronmm
