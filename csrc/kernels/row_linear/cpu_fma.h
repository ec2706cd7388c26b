// row_linear on the CPU by fused multiply-adds of vectors. Included by cpu.cpp only.
//
// A block of kBlockRows x kBlockOutputs sums stays in registers while k runs, so that a weight is read from
// memory for the first block of rows and from cache for the others of its panel. The order of a sum is that
// of dot_rows.h: all instruction sets give the same bits.
#pragma once

#include <algorithm>

#include "dot_rows.h"
#include "kept_memory.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int64_t kPanelRows = 64;
constexpr int kBlockOutputs = 3;
constexpr int kBlockRows = kNativeLanes == 16 ? 8 : 4;  // 24 or 12 sums of the 32 or 16 registers

template <class T>
int64_t block_outputs(int64_t) {
    return kBlockOutputs;
}

// --- A panel of rows --------------------------------------------------------------------------

// What a row becomes for products with weights of type T: widened, but for bf16 that meets bf16 in pairs.
#if defined(__AVX512BF16__)
template <class T>
using RowOf = bf16;
SPECDEC_SIMD void place_row(const bf16* x, int64_t count, bf16* to) {
    std::copy(x, x + count, to);
}
#else
template <class T>
using RowOf = float;
template <class T>
SPECDEC_SIMD void place_row(const T* x, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[Widened<T>::place(i)] = to_float(x[i]);
}
#endif

template <class T>
struct Panel {
    // Block of rows by block: [K / kStep][rows of the block][kStep], zeros where there is nothing.
    const RowOf<T>* x;
    int64_t stride;  // elements of a row
    int64_t first_row, rows;
};

// Rows of the block that starts at a row: the last rows lie in the smallest one that holds them.
inline int block_rows(int64_t left) {
    return left > 4 ? kBlockRows : left > 2 ? 4 : left == 2 ? 2 : 1;
}

template <class T>
Panel<T> make_panel(const RowLinearParams& p, int64_t first_row) {
    const int64_t size = p.x.size, rows = std::min(kPanelRows, p.x.rows - first_row);
    const int64_t stride = (size + kStep - 1) / kStep * kStep;
    static thread_local KeptMemory memory;
    const int64_t most = (rows + kBlockRows) * stride;
    auto* wide = reinterpret_cast<RowOf<T>*>(memory.floats(most));
    const Panel<T> panel{wide, stride, first_row, rows};
    for (int64_t row = 0; row < rows;) {
        const int count = block_rows(rows - row);
        for (int64_t k = 0; k < size; k += kStep) {
            for (int r = 0; r < count; ++r, wide += kStep) {
                const int64_t left = row + r < rows ? std::min<int64_t>(kStep, size - k) : 0;
                if (left < kStep) std::fill(wide, wide + kStep, RowOf<T>{});
                if (left == 0) continue;
                T room[kStep];
                place_row(p.x.piece(first_row + row + r, k, left, room), left, wide);
            }
        }
        row += count;
    }
    return panel;
}

template <class T, int kRows, int kOutputs>
void finish_block(const RowLinearParams& p, const Panel<T>& panel, int64_t row, int64_t output,
                  bool prefetch_next) {
    const View<const T, 2> weight = p.weight.as<const T>();
    const T* w[kOutputs];
    for (int n = 0; n < kOutputs; ++n) w[n] = weight.at(output + n);
    Lanes<kRows, kOutputs> lanes;
    sum_block<T, kRows, kOutputs>(PackedRows<kRows, RowOf<T>>{panel.x + row * panel.stride}, w,
                                  weight.size[1], prefetch_next ? kOutputs * weight.stride[0] : 0,
                                  lanes);
    float sums[padded_sums(kRows * kOutputs)];
    sum_each(lanes, sums);
    const T* bias = static_cast<const T*>(p.bias);
    const int rows = static_cast<int>(std::min<int64_t>(kRows, panel.rows - row));
    for (int r = 0; r < rows; ++r) {
        for (int n = 0; n < kOutputs; ++n) {
            float sum = sums[r * kOutputs + n];
            if (bias != nullptr) sum += to_float(bias[output + n]);
            store_sum<T>(p, panel.first_row + row + r, output + n, sum);
        }
    }
}

// All rows of the panel for kOutputs outputs; the last rows in the smallest block that holds them.
template <class T, int kOutputs>
void finish_rows(const RowLinearParams& p, const Panel<T>& panel, int64_t output, bool more) {
    for (int64_t row = 0; row < panel.rows; row += kBlockRows) {
        const bool prefetch_next = more && row == 0;
        const int count = block_rows(panel.rows - row);
        if (count == kBlockRows) {
            finish_block<T, kBlockRows, kOutputs>(p, panel, row, output, prefetch_next);
        } else if (count == 4) {
            finish_block<T, 4, kOutputs>(p, panel, row, output, prefetch_next);
        } else if (count == 2) {
            finish_block<T, 2, kOutputs>(p, panel, row, output, prefetch_next);
        } else {
            finish_block<T, 1, kOutputs>(p, panel, row, output, prefetch_next);
        }
    }
}

// All rows of the panel for outputs begin .. end-1.
template <class T>
void finish_outputs(const RowLinearParams& p, const Panel<T>& panel, int64_t begin, int64_t end) {
    int64_t output = begin;
    for (; output + kBlockOutputs <= end; output += kBlockOutputs) {
        finish_rows<T, kBlockOutputs>(p, panel, output, output + 2 * kBlockOutputs <= end);
    }
    for (; output < end; ++output) finish_rows<T, 1>(p, panel, output, false);
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
