// e4m3 bytes of K and V as the fragments of a product in bf16 or fp16, in registers and exact.
//
// A word holds four bytes. Its even and its odd ones become a pair each, so that nothing is moved across
// 16-bit lanes: exponent and mantissa are shifted to where T has them, which leaves the value 2^-120
// (bf16) or 2^-8 (fp16) times too small, subnormal where e4m3 is, and one exact product makes it right.
// sm_80 has no conversion instruction and sm_90 none to bf16; one text serves all.
//
// K: ldmatrix gives lane (g, t) bytes 4t .. 4t+3 of a 16-byte chunk of token g. The even ones are used as
// channels 2t, 2t+1 of a contraction step, the odd ones as 8+2t, 8+2t+1: queries lie in that order.
// V: the transposed ldmatrix gives byte pairs (2g, 2g+1) of tokens 2t and 2t+1. The even bytes make the
// fragment of channels 0, 2, .. 14 of the chunk, the odd ones that of 1, 3, .. 15: two blocks of sums
// whose columns alternate, so that a thread owns four neighbouring ones.
#pragma once

#include "kernel.h"

namespace specdec::cuda {

template <class T>
struct WidenTraits;
template <>
struct WidenTraits<bf16> {
    static constexpr int kShift = 4;  // of a magnitude in the high byte of a 16-bit lane
    static constexpr uint32_t kMagnitude = 0x07f007f0u;
    // NaN alone, all bits of the magnitude, carries into bit 11; times 15 that fills bits 11 to 14.
    static constexpr uint32_t kLast = 0x00100010u, kCarry = 0x08000800u, kFill = 15;
    __device__ __forceinline__ static uint32_t rescale(uint32_t x) {
        return ptx::mul_bf16x2(x, 0x7b807b80u);  // 2^120
    }
};
template <>
struct WidenTraits<f16> {
    static constexpr int kShift = 1;
    static constexpr uint32_t kMagnitude = 0x3f803f80u;
    static constexpr uint32_t kLast = 0x00800080u, kCarry = 0x40004000u, kFill = 1;
    __device__ __forceinline__ static uint32_t rescale(uint32_t x) {
        return ptx::mul_f16x2(x, 0x5c005c00u);  // 2^8
    }
};

// Bytes 1 and 3 of a word as a pair of T.
template <class T>
__device__ __forceinline__ uint32_t widen_odd(uint32_t word) {
    using Tr = WidenTraits<T>;
    const uint32_t magnitude = word >> Tr::kShift & Tr::kMagnitude;
    const uint32_t nan = (magnitude + Tr::kLast) & Tr::kCarry;
    return Tr::rescale((word & 0x80008000u) | (magnitude + nan * Tr::kFill));
}
// Bytes 0 and 2.
template <class T>
__device__ __forceinline__ uint32_t widen_even(uint32_t word) {
    return widen_odd<T>(word << 8);
}

// 0x80 in every byte of a word that is NaN.
__device__ __forceinline__ uint32_t nan_bytes(uint32_t word) {
    return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}
// Zero in place of NaN.
__device__ __forceinline__ uint32_t finite_bytes(uint32_t word) {
    return word & ~((nan_bytes(word) >> 7) * 0xffu);
}

// Eight channels of a query in the order that products with K want: of four neighbours the first and third
// go to the left half of a contraction step, the second and fourth to the right one, at the same place.
struct ChannelHalves {
    uint2 left, right;
};
__device__ __forceinline__ ChannelHalves interleave_channels(uint4 x) {
    return {make_uint2((x.x & 0xffffu) | x.y << 16, (x.z & 0xffffu) | x.w << 16),
            make_uint2(x.x >> 16 | (x.y & 0xffff0000u), x.z >> 16 | (x.w & 0xffff0000u))};
}

}  // namespace specdec::cuda
