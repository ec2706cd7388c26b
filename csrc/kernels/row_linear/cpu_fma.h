// row_linear on the CPU by fused multiply-adds of float32. Included by cpu.cpp only.
//
// A block of kBlockRows x kBlockOutputs sums stays in registers while k runs, so that a weight is read from
// memory for the first block of rows and from cache for the others of its panel. A sum has 16 lanes. Lane l
// adds its k in ascending order, then the lanes are added in the fixed tree of sum_lanes. Which k a lane has
// is fixed by the dtype (Widened): all instruction sets give the same bits.
#pragma once

#include <algorithm>
#include <atomic>

#include "cpu_memory.h"
#include "params.h"
#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int64_t kPanelRows = 64;
constexpr int kBlockOutputs = 3;
constexpr int kBlockRows = kNativeLanes == 16 ? 8 : 4;  // 24 or 12 sums of the 32 or 16 registers
constexpr int kStep = 2 * kLanes;                       // elements of k in a step: two per lane

template <class T>
int64_t block_outputs(int64_t) {
    return kBlockOutputs;
}

// --- 1. Two elements of k per lane and step ------------------------------------------------------

// float32 and fp16: lane l has k = l and l + 16 of every 32.
template <class T>
struct Widened {
    static constexpr int64_t place(int64_t k) { return k; }  // of x in its widened row

    // Half 0 or 1 of a step's k for one part of the lanes.
    SPECDEC_SIMD static Native load(const T* w, int half, int part) {
        return load_part(w + half * kLanes + part * kNativeLanes);
    }

  private:
    SPECDEC_SIMD static Native load_part(const float* at) { return load_native(at); }
    SPECDEC_SIMD static Native load_part(const f16* at) {
#if defined(__AVX512F__)
        return reinterpret_cast<Native>(_mm512_maskz_cvtph_ps(
            0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(__AVX2__)
        return reinterpret_cast<Native>(
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
        Native r;
        for (int l = 0; l < kNativeLanes; ++l) r[l] = to_float(at[l]);
        return r;
#endif
    }
};

// bf16: lane l has k = 2 l and 2 l + 1 of every 32, the halves of one 32-bit word, which widen by one
// instruction each.
template <>
struct Widened<bf16> {
    static constexpr int64_t place(int64_t k) {
        return k / kStep * kStep + k % 2 * kLanes + k % kStep / 2;
    }

    SPECDEC_SIMD static Native load(const bf16* w, int half, int part) {
        const NativeInt pairs = *reinterpret_cast<const NativeIntAt*>(w + part * 2 * kNativeLanes);
        return as_floats(half == 0 ? pairs << 16 : pairs & static_cast<int32_t>(0xffff0000u));
    }
};

// --- 2. A block of sums --------------------------------------------------------------------------

// Room for whole groups of sixteen, which are added fastest, even if that adds a few that nobody wants.
constexpr int padded_sums(int sums) {
    return kNativeLanes == 16 && sums > 4 ? (sums + 15) / 16 * 16 : sums;
}
template <int kRows, int kOutputs>
using Lanes = float[padded_sums(kRows * kOutputs)][kLanes];

template <class T, int kRows, int kOutputs>
SPECDEC_SIMD void add_step(Native (&sum)[kRows][kOutputs], const float* x,
                           const T* const (&w)[kOutputs], int64_t k, int part) {
    x += part * kNativeLanes;
    _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half) {
        Native wide[kOutputs];
        _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
            wide[n] = Widened<T>::load(w[n] + k, half, part);
        }
        _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
            const Native xr = load_native(x + r * kStep + half * kLanes);
            // Else the compiler takes it from memory again for every output, which costs more than it.
            std::atomic_signal_fence(std::memory_order_seq_cst);
            _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
                sum[r][n] = fma(xr, wide[n], sum[r][n]);
            }
        }
    }
}

// Asks for what the next block of outputs will read at the same k.
template <class T, int kOutputs>
SPECDEC_SIMD void prefetch(const T* const (&w)[kOutputs], int64_t k, int64_t ahead) {
    constexpr int kLine = 64 / sizeof(T);
    _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
        _Pragma("GCC unroll 2") for (int i = 0; i < kStep; i += kLine) {
            __builtin_prefetch(w[n] + k + ahead + i, 0, 2);
        }
    }
}

template <class T, int kRows, int kOutputs>
void sum_block(const float* x, const T* const (&w)[kOutputs], int64_t size, int64_t ahead,
               Lanes<kRows, kOutputs>& lanes) {
    const int64_t whole = size / kStep * kStep;
    T tail[kOutputs][kStep];  // a row of weights must not be read past its end
    const T* tails[kOutputs];
    for (int n = 0; n < kOutputs; ++n) tails[n] = tail[n];
    for (int n = 0; n < kOutputs && whole < size; ++n) {
        std::fill(std::copy(w[n] + whole, w[n] + size, tail[n]), tail[n] + kStep, T{});
    }
    for (int part = 0; part < kParts; ++part) {
        Native sum[kRows][kOutputs] = {};
        if (ahead != 0 && part == 0) {
            for (int64_t k = 0; k < whole; k += kStep) {
                prefetch<T, kOutputs>(w, k, ahead);
                add_step<T, kRows, kOutputs>(sum, x + k * kRows, w, k, part);
            }
        } else {
            for (int64_t k = 0; k < whole; k += kStep) {
                add_step<T, kRows, kOutputs>(sum, x + k * kRows, w, k, part);
            }
        }
        if (whole < size) {
            add_step<T, kRows, kOutputs>(sum, x + whole * kRows, tails, 0, part);
        }
        for (int r = 0; r < kRows; ++r) {
            for (int n = 0; n < kOutputs; ++n) {
                store(lanes[r * kOutputs + n] + part * kNativeLanes, sum[r][n]);
            }
        }
    }
}

// --- 3. A panel of rows --------------------------------------------------------------------------

struct Panel {
    // Widened, block of rows by block: [K / kStep][rows of the block][kStep], zeros where there is nothing.
    const float* x;
    int64_t stride;  // floats of a row
    int64_t first_row, rows;
};

// Rows of the block that starts at a row: the last rows lie in the smallest one that holds them.
inline int block_rows(int64_t left) {
    return left > 4 ? kBlockRows : left > 2 ? 4 : left == 2 ? 2 : 1;
}

template <class T>
Panel make_panel(const RowLinearParams& p, int64_t first_row) {
    const int64_t size = p.x.size[1], rows = std::min(kPanelRows, p.x.size[0] - first_row);
    const int64_t stride = (size + kStep - 1) / kStep * kStep;
    float* wide = kept_memory((rows + kBlockRows) * stride);
    const Panel panel{wide, stride, first_row, rows};
    for (int64_t row = 0; row < rows;) {
        const int count = block_rows(rows - row);
        for (int64_t k = 0; k < size; k += kStep) {
            for (int r = 0; r < count; ++r, wide += kStep) {
                const T* x = p.x.as<const T>().at(first_row + row + r) + k;
                const int64_t left = row + r < rows ? std::min<int64_t>(kStep, size - k) : 0;
                if (left < kStep) std::fill(wide, wide + kStep, 0.0f);
                for (int64_t i = 0; i < left; ++i) wide[Widened<T>::place(i)] = to_float(x[i]);
            }
        }
        row += count;
    }
    return panel;
}

template <class T, int kRows, int kOutputs>
void finish_block(const RowLinearParams& p, const Panel& panel, int64_t row, int64_t output,
                  bool prefetch_next) {
    const View<const T, 2> weight = p.weight.as<const T>();
    const T* w[kOutputs];
    for (int n = 0; n < kOutputs; ++n) w[n] = weight.at(output + n);
    Lanes<kRows, kOutputs> lanes;
    sum_block<T, kRows, kOutputs>(panel.x + row * panel.stride, w, weight.size[1],
                                  prefetch_next ? kOutputs * weight.stride[0] : 0, lanes);
    float sums[padded_sums(kRows * kOutputs)];
    sum_each(lanes, sums);
    const T* bias = static_cast<const T*>(p.bias);
    const int rows = static_cast<int>(std::min<int64_t>(kRows, panel.rows - row));
    for (int r = 0; r < rows; ++r) {
        T* y = p.y.as<T>().at(panel.first_row + row + r, output);
        for (int n = 0; n < kOutputs; ++n) {
            float sum = sums[r * kOutputs + n];
            if (bias != nullptr) sum += to_float(bias[output + n]);
            y[n] = from_float<T>(sum);
        }
    }
}

// All rows of the panel for kOutputs outputs; the last rows in the smallest block that holds them.
template <class T, int kOutputs>
void finish_rows(const RowLinearParams& p, const Panel& panel, int64_t output, bool more) {
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
void finish_outputs(const RowLinearParams& p, const Panel& panel, int64_t begin, int64_t end) {
    int64_t output = begin;
    for (; output + kBlockOutputs <= end; output += kBlockOutputs) {
        finish_rows<T, kBlockOutputs>(p, panel, output, output + 2 * kBlockOutputs <= end);
    }
    for (; output < end; ++output) finish_rows<T, 1>(p, panel, output, false);
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
