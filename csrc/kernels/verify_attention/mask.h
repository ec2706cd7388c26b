// What a row of verify_attention sees of the places below the limit of its mask: trees and windows.
#pragma once

#include "params.h"
#include "tree.h"

namespace specdec {

// Rows of one request in a pass, whose row j sits at place prefix + j (negative ones do not exist).
struct PassRows {
    int64_t first_row;  // row of q
    int64_t prefix;
};

// Whether rows see anything but a run of places that starts at 0.
SPECDEC_HD bool has_holes(const VerifyAttentionParams& p) {
    return p.mask == AttentionMask::kTree || p.window > 0;
}

SPECDEC_HD int64_t position_of(const VerifyAttentionParams& p, const PassRows& rows,
                               int64_t place) {
    const bool given = place >= rows.prefix && p.positions.data != nullptr;
    return given ? p.positions[rows.first_row + place - rows.prefix] : place;
}

// Bits of rows that the mask has no word for are clear.
SPECDEC_HD bool is_ancestor(const VerifyAttentionParams& p, const PassRows& rows, int64_t i,
                            int64_t j) {
    const int64_t word = j / kMaskBits;
    if (word >= p.tree_mask.size[1]) return false;
    const int32_t bits = *p.tree_mask.at(rows.first_row + i, word);
    return (static_cast<uint32_t>(bits) >> (j % kMaskBits) & 1u) != 0;
}

// Any two int64 positions have a distance in uint64.
SPECDEC_HD bool in_window(const VerifyAttentionParams& p, int64_t a, int64_t b) {
    const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return p.window == 0 || (a > b ? x - y : y - x) < static_cast<uint64_t>(p.window);
}

// Whether row i sees an existing place below the limit of its mask.
SPECDEC_HD bool sees_place(const VerifyAttentionParams& p, const PassRows& rows, int64_t i,
                           int64_t place) {
    const int64_t j = place - rows.prefix;
    if (p.mask == AttentionMask::kTree && j >= 0 && !is_ancestor(p, rows, i, j)) return false;
    return in_window(p, position_of(p, rows, rows.prefix + i), position_of(p, rows, place));
}

struct PlaceRange {
    int64_t begin, end;
};

// Places of the prefix in row i's window, both bounds within the prefix.
SPECDEC_HD PlaceRange prefix_window(const VerifyAttentionParams& p, const PassRows& rows,
                                    int64_t i) {
    const int64_t prefix = rows.prefix > 0 ? rows.prefix : 0;
    if (p.window == 0) return {0, prefix};
    const int64_t position = position_of(p, rows, rows.prefix + i);
    const int64_t begin = position < p.window ? 0 : position - p.window + 1;
    const bool all = position >= prefix || in_window(p, position, prefix - 1);
    const int64_t end = all ? prefix : position + p.window;
    return {begin < prefix ? begin : prefix, end > 0 ? end : 0};
}

}  // namespace specdec
