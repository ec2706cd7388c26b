// row_linear: a linear layer for the few rows of a verification pass, row by row the same bits.
#pragma once

#include "isa.h"
#include "view.h"

namespace specdec {

// Elements of the rows of a matrix, all at one place of k.
template <class T>
struct Column {
    const T* data;  // of row 0
    int64_t stride;
    int64_t left;  // how many elements lie behind each other from here on

    SPECDEC_HD const T* row(int64_t r) const { return data + r * stride; }
};

// A matrix [R, K] whose columns lie in several tensors, one tensor behind the other.
struct RowParts {
    static constexpr int kMost = 16;
    View<const void, 2> part[kMost];  // [R, K_i]
    int64_t begin[kMost] = {};        // of each part in k
    int count = 0;
    int64_t rows = 0;  // R
    int64_t size = 0;  // K

    void add(const View<const void, 2>& more) {
        part[count] = more;
        begin[count++] = size;
        rows = more.size[0];
        size += more.size[1];
    }

    template <class T>
    SPECDEC_HD Column<T> column(int64_t k) const {
        int i = 0;
        while (i + 1 < count && k >= begin[i + 1]) ++i;
        return {static_cast<const T*>(part[i].data) + (k - begin[i]), part[i].stride[0],
                begin[i] + part[i].size[1] - k};
    }

    // k .. k + n - 1 of a row: where they lie, or in `room` when they lie in several parts.
    template <class T>
    SPECDEC_HD const T* piece(int64_t r, int64_t k, int64_t n, T* room) const {
        const Column<T> first = column<T>(k);
        if (first.left >= n) return first.row(r);
        for (int64_t i = 0; i < n; ++i) room[i] = *column<T>(k + i).row(r);
        return room;
    }
};

struct RowLinearParams {
    RowParts x;                  // [R, K]
    View<const void, 2> weight;  // [N, K]
    const void* bias;            // [N] or nullptr
    View<void, 2> y;             // [R, N]
    DType dtype;                 // of all but y
    bool rounded;                // y is of that dtype too, else of float32
};

// Element n of a row of y.
template <class T>
SPECDEC_HD void store_sum(const RowLinearParams& p, int64_t row, int64_t n, float sum) {
    if (p.rounded) {
        p.y.as<T>().at(row)[n] = from_float<T>(sum);
    } else {
        p.y.as<float>().at(row)[n] = sum;
    }
}

namespace cuda {
Status row_linear(const RowLinearParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU_BF16(row_linear, ::specdec::RowLinearParams)
