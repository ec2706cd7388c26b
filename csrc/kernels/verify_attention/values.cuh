// The tensor-core kernel of verify_attention: the product of a tile's weights with V.
#pragma once

#include "steps.cuh"

namespace specdec::cuda {

// --- V that is not finite, in a tile whose rows see different tokens: 0 times it is NaN, and would reach
//     rows that do not see it. Rare, so only correct. ---------------------------------------------------

template <class T>
__device__ __forceinline__ bool is_finite_bits(uint32_t bits) {
    constexpr uint32_t kExponent = std::is_same<T, bf16>::value ? 0x7f80u : 0x7c00u;
    return (bits & kExponent) != kExponent;
}
// Two elements, 0 in place of one that is not finite.
template <class T>
__device__ __forceinline__ uint32_t finite_pair(uint32_t pair) {
    return (is_finite_bits<T>(pair) ? pair & 0xffffu : 0u) |
           (is_finite_bits<T>(pair >> 16) ? pair & 0xffff0000u : 0u);
}

// The same for e4m3, whose only such code is NaN. A thread's four neighbouring columns of a chunk.
template <class Tr>
__device__ __forceinline__ bool add_nan_bytes(Sums<Tr>& sums, const f8e4m3* values,
                                              const AttendArgs& args, const Task& task,
                                              int first_token, const Lane<Tr>& at) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < Tr::kValueDim / 16; ++n) {
#pragma unroll 1
        for (int token = 0; token < Tr::kWarpTokens; ++token) {
            const uint32_t nan = nan_bytes(*reinterpret_cast<const uint32_t*>(
                values + swizzled<f8e4m3, Tr::kValueDim>(token, n) + at.lane % 4 * 4));
            if (nan == 0) continue;
            any = true;
#pragma unroll
            for (int i = 0; i < Tr::kRowBlocks * 2; ++i) {
                const int j = row_number<Tr>(args.p, task.item, at.first_row + i * 8 + at.lane / 4);
                if (!sees(args.p, task.item.request, j, first_token + token)) continue;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if ((nan >> (8 * c + 7) & 1u) == 0) continue;
                    sums.o[i / 2][2 * n + c % 2][i % 2 * 2 + c / 2] = bits_float(0x7fc00000u);
                }
            }
        }
    }
    return __any_sync(kFullMask, any);
}

// Adds what is not finite to the rows that see it: their sums become inf or NaN, whatever the weights.
// Whether there was any, for the whole warp: weigh_tile then leaves it out.
template <class Tr>
__device__ __forceinline__ bool add_not_finite(Sums<Tr>& sums, const typename Tr::C* values,
                                               const AttendArgs& args, const Task& task,
                                               uint32_t valid, int first_token,
                                               const Lane<Tr>& at) {
    using T = typename Tr::T;
    if (seen_by_all<Tr>(task, valid, first_token)) return false;
    if constexpr (Tr::kFp8) {
        return add_nan_bytes(sums, values, args, task, first_token, at);
    } else {
        bool any = false;
#pragma unroll
        for (int n = 0; n < Tr::kValueDim / 8; ++n) {
#pragma unroll 1
            for (int token = 0; token < Tr::kWarpTokens; ++token) {
                const uint32_t pair = *reinterpret_cast<const uint32_t*>(
                    values + swizzled<T, Tr::kValueDim>(token, n) + at.lane % 4 * 2);
                if (finite_pair<T>(pair) == pair) continue;
                any = true;
                const T low{static_cast<uint16_t>(pair)}, high{static_cast<uint16_t>(pair >> 16)};
#pragma unroll
                for (int i = 0; i < Tr::kRowBlocks * 2; ++i) {
                    const int j =
                        row_number<Tr>(args.p, task.item, at.first_row + i * 8 + at.lane / 4);
                    if (!sees(args.p, task.item.request, j, first_token + token)) continue;
                    float(&o)[4] = sums.o[i / 2][n];
                    if (!is_finite_bits<T>(low.bits)) o[i % 2 * 2] += to_float(low);
                    if (!is_finite_bits<T>(high.bits)) o[i % 2 * 2 + 1] += to_float(high);
                }
            }
        }
        return __any_sync(kFullMask, any);
    }
}

// o += P V, with P rounded to the element type; its fragments are those of the scores.
template <class Tr>
__device__ __forceinline__ void weigh_tile(const Scores<Tr>& p, Sums<Tr>& sums,
                                           const typename Tr::C* values, bool finite_only,
                                           const Lane<Tr>& at) {
    using T = typename Tr::T;
    uint32_t a[Tr::kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[r][i] = pack<T>(p[r][i / 2][i % 2 * 2], p[r][i / 2][i % 2 * 2 + 1]);
        }
    }
    constexpr int kPairs = Tr::kValueDim / 16;
    const auto multiply = [&](int n, const uint32_t(&low)[2], const uint32_t(&high)[2]) {
#pragma unroll
        for (int r = 0; r < Tr::kRowBlocks; ++r) {
            ptx::mma_m16n8k16<T>(sums.o[r][2 * n], a[r], low, sums.o[r][2 * n]);
            ptx::mma_m16n8k16<T>(sums.o[r][2 * n + 1], a[r], high, sums.o[r][2 * n + 1]);
        }
    };
    uint32_t b[4];  // tokens 0..7 and 8..15 of one chunk, then of the next
    if constexpr (Tr::kFp8) {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {  // a chunk is a pair of blocks
            if (n % 2 == 0) {
                const int chunk = min(n + at.down_chunk, kPairs - 1);
                ptx::ldmatrix_x4_trans(
                    b, values + swizzled<typename Tr::C, Tr::kValueDim>(at.down_row, chunk));
            }
            uint32_t upper = b[n % 2 * 2], lower = b[n % 2 * 2 + 1];
            if (finite_only) {
                upper = finite_bytes(upper);
                lower = finite_bytes(lower);
            }
            multiply(n, {widen_even<T>(upper), widen_even<T>(lower)},
                     {widen_odd<T>(upper), widen_odd<T>(lower)});
        }
    } else {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
            ptx::ldmatrix_x4_trans(
                b, values + swizzled<T, Tr::kValueDim>(at.down_row, n * 2 + at.down_chunk));
            if (finite_only) {
#pragma unroll
                for (int i = 0; i < 4; ++i) b[i] = finite_pair<T>(b[i]);
            }
            multiply(n, {b[0], b[1]}, {b[2], b[3]});
        }
    }
}

}  // namespace specdec::cuda
