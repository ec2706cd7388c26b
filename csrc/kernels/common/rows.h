// Which rows of a call belong to which request: cu_rows is trusted to be non-decreasing and clamped to
// 0..num_rows before use, so no row outside the call is read. Where it decreases all the same, requests
// share rows. An op that keeps something by row leaves those out (shares_rows); of one that writes results by
// row it is undefined whose they are.
#pragma once

#include "view.h"

namespace specdec {

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

// Whether entry i of cu_rows, clamped, says that rows of request b belong to another one too: of all entries up
// to b none may lie behind the first of these rows, of those after it none before the last one's end.
SPECDEC_HD bool shares_rows(const RowSpan& rows, int64_t b, int64_t i, int64_t entry) {
    return i <= b ? entry > rows.first : entry < rows.first + rows.count;
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

}  // namespace specdec
