// Dot products of a few rows with rows of weights on the CPU: blocks of sums that stay in registers.
//
// A sum has 16 lanes. Lane l adds its k in ascending order by fused multiply-adds of widened elements; the
// lanes are added in the fixed tree of sum_lanes. Which k a lane has is fixed by the dtype of the weights
// (Widened), and k is filled with zeros to a multiple of kStep; rows, outputs, strides and instruction
// sets change none of it. Rows of bf16, where the CPU multiplies pairs of them, stay as they are: lane l
// adds a pair of k at a time, as the instruction does.
#pragma once

#include <algorithm>
#include <atomic>

#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {

constexpr int kStep = 2 * kLanes;  // elements of k in a step: two per lane

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

// Where the rows of a block lie: row 0 from k on is at(k), the next row() elements behind it.
template <int kRows, class X = float>
struct PackedRows {  // [K / kStep][kRows][kStep]
    const X* x;
    SPECDEC_SIMD const X* at(int64_t k) const { return x + k * kRows; }
    SPECDEC_SIMD int64_t row() const { return kStep; }
};
struct StridedRows {
    const float* x;
    int64_t stride;
    SPECDEC_SIMD const float* at(int64_t k) const { return x + k; }
    SPECDEC_SIMD int64_t row() const { return stride; }
};

template <class T, int kRows, int kOutputs>
SPECDEC_SIMD void add_step(Native (&sum)[kRows][kOutputs], const float* x, int64_t x_row,
                           const T* const (&w)[kOutputs], int64_t k, int part) {
    x += part * kNativeLanes;
    _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half) {
        Native wide[kOutputs];
        _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
            wide[n] = Widened<T>::load(w[n] + k, half, part);
        }
        _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
            const Native xr = load_native(x + r * x_row + half * kLanes);
            // Else the compiler takes it from memory again for every output, which costs more than it.
            std::atomic_signal_fence(std::memory_order_seq_cst);
            _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
                sum[r][n] = fma(xr, wide[n], sum[r][n]);
            }
        }
    }
}

#if defined(__AVX512BF16__)
template <class T, int kRows, int kOutputs>
SPECDEC_SIMD void add_step(Native (&sum)[kRows][kOutputs], const bf16* x, int64_t x_row,
                           const bf16* const (&w)[kOutputs], int64_t k, int) {
    const auto pairs = [](const bf16* at) {
        return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at));
    };
    __m512bh wide[kOutputs];
    _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) wide[n] = pairs(w[n] + k);
    _Pragma("GCC unroll 8") for (int r = 0; r < kRows; ++r) {
        const __m512bh xr = pairs(x + r * x_row);
        _Pragma("GCC unroll 4") for (int n = 0; n < kOutputs; ++n) {
            sum[r][n] = reinterpret_cast<Native>(
                _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum[r][n]), xr, wide[n]));
        }
    }
}
#endif

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

template <class T, int kRows, int kOutputs, class X>
void sum_block(const X& x, const T* const (&w)[kOutputs], int64_t size, int64_t ahead,
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
                add_step<T, kRows, kOutputs>(sum, x.at(k), x.row(), w, k, part);
            }
        } else {
            for (int64_t k = 0; k < whole; k += kStep) {
                add_step<T, kRows, kOutputs>(sum, x.at(k), x.row(), w, k, part);
            }
        }
        if (whole < size) {
            add_step<T, kRows, kOutputs>(sum, x.at(whole), x.row(), tails, 0, part);
        }
        for (int r = 0; r < kRows; ++r) {
            for (int n = 0; n < kOutputs; ++n) {
                store(lanes[r * kOutputs + n] + part * kNativeLanes, sum[r][n]);
            }
        }
    }
}

}  // namespace specdec::cpu::SPECDEC_ISA
