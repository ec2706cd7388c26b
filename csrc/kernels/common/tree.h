// Draft trees over the rows of a request. A node's number is its row within the request, node 0 is
// the root, and every parent comes before its children, so walking up a tree always ends.
// A tree mask has one row of 32-bit words per node: bit j % 32 of word j / 32 is set iff node j is the
// row's node or one of its ancestors.
#pragma once

#include "view.h"

namespace specdec {

constexpr int64_t kMaskBits = 32;
constexpr int64_t kMaxTreeNodes = 0x7fffffff;  // node numbers and depths are int32

SPECDEC_HD int64_t clamp_row(int64_t row, int64_t num_rows) {
    return row < 0 ? 0 : (row > num_rows ? num_rows : row);
}

struct RowSpan {
    int64_t first;
    int64_t count;
};

// The rows of request b, with cu_rows clamped to 0..num_rows.
SPECDEC_HD RowSpan rows_of_request(const int32_t* cu_rows, int64_t b, int64_t num_rows) {
    const int64_t first = clamp_row(cu_rows[b], num_rows);
    const int64_t end = clamp_row(cu_rows[b + 1], num_rows);
    return RowSpan{first, end > first ? end - first : 0};
}

// The rows of no request: those before the first one's and those after the last one's.
struct PaddingRows {
    int64_t begin;  // of the rows of requests
    int64_t end;
    int64_t count;

    SPECDEC_HD int64_t row(int64_t i) const { return i < begin ? i : i - begin + end; }
};

SPECDEC_HD PaddingRows padding_rows(const int32_t* cu_rows, int64_t batch, int64_t num_rows) {
    const int64_t begin = clamp_row(cu_rows[0], num_rows);
    const int64_t last = clamp_row(cu_rows[batch], num_rows);
    const int64_t end = last > begin ? last : begin;
    return PaddingRows{begin, end, num_rows - (end - begin)};
}

// Word `word` of a mask with bits 0 .. count-1.
SPECDEC_HD uint32_t bits_below(int64_t count, int64_t word) {
    const int64_t n = count - word * kMaskBits;
    return n <= 0 ? 0u : (n >= kMaskBits ? 0xffffffffu : (1u << n) - 1u);
}

// Word `word` of a mask with bit `node` alone.
SPECDEC_HD uint32_t node_bit(int64_t node, int64_t word) {
    return node / kMaskBits == word ? 1u << (node % kMaskBits) : 0u;
}

}  // namespace specdec
