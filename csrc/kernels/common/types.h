// Scalar types, status and host/device marking shared by every kernel. No torch, no CUDA headers:
// the same definitions serve nvcc, g++ (CPU kernels) and the CUDA-on-CPU emulator.
#pragma once

#include <cstdint>
#include <cstring>

// Small functions for host and device. On the host they are always inlined: cpu.cpp files are
// compiled once per instruction set, and a shared out-of-line copy could come from the wrong one.
#if defined(__CUDACC__)
#define SPECDEC_HD __host__ __device__ __forceinline__
#else
#define SPECDEC_HD inline __attribute__((always_inline))
#endif

namespace specdec {

// Storage types of tensors that ops accept.
enum class DType : int32_t { kF32, kF16, kBF16, kF8E4M3, kI32, kI64, kBool };

SPECDEC_HD int dtype_size(DType t) {
    switch (t) {
        case DType::kI64:
            return 8;
        case DType::kF32:
        case DType::kI32:
            return 4;
        case DType::kF16:
        case DType::kBF16:
            return 2;
        default:
            return 1;
    }
}

// Result of launching a kernel: `what` is nullptr on success, else a text with static lifetime.
struct Status {
    int code = 0;
    const char* what = nullptr;
    bool ok() const { return code == 0; }
};

using Stream = void*;  // cudaStream_t, without its header

// Per-request status bits (docs/conventions.md). They report bad data, never raise.
enum StatusBit : int32_t {
    kTargetNan = 1,
    kDraftNan = 2,
    kBadId = 4,
    kEmptySupport = 8,
    kBadTree = 16,
};

SPECDEC_HD uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
SPECDEC_HD float bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
struct f8e4m3 {
    uint8_t bits;
};

SPECDEC_HD float to_float(float x) {
    return x;
}
SPECDEC_HD float to_float(bf16 x) {
    return bits_float(static_cast<uint32_t>(x.bits) << 16);
}

SPECDEC_HD float to_float(f16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = x.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // Shift into place with a wrong exponent bias, then fix the bias by an exact product: this also
    // normalises fp16 subnormals.
    return bits_float(sign |
                      float_bits(bits_float(magnitude << 13) * 5.192296858534828e33f));  // 2^112
}

SPECDEC_HD float to_float(f8e4m3 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
    const uint32_t magnitude = x.bits & 0x7fu;
    if (magnitude == 0x7fu) return bits_float(sign | 0x7fc00000u);
    if (magnitude >= 8) return bits_float(sign | ((magnitude << 20) + (120u << 23)));
    return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0.001953125f));  // 2^-9
}

// Conversions from float round to nearest even and keep NaN.
template <class T>
SPECDEC_HD T from_float(float x);

template <>
SPECDEC_HD float from_float<float>(float x) {
    return x;
}

template <>
SPECDEC_HD bf16 from_float<bf16>(float x) {
    const uint32_t u = float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

template <>
SPECDEC_HD f16 from_float<f16>(float x) {
    const uint32_t u = float_bits(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520
    if (magnitude < 0x38800000u) {
        // Subnormal result: adding 0.5 puts the wanted bits at the end of the significand, and the
        // addition itself rounds to nearest even.
        const float shifted = bits_float(magnitude) + 0.5f;
        return {static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u))};
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
    return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

// e4m3 (finite, +-448, one NaN code): saturates, as KV caches want.
template <>
SPECDEC_HD f8e4m3 from_float<f8e4m3>(float x) {
    const uint32_t u = float_bits(x);
    const uint32_t sign = (u >> 24) & 0x80u;
    const uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
    if (magnitude >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};  // >= 448
    if (magnitude < 0x3c800000u) {
        // Below the smallest normal 2^-6, in steps of 2^-9: adding 2^14 rounds to that step.
        const float shifted = bits_float(magnitude) + 16384.0f;
        return {static_cast<uint8_t>(sign | (float_bits(shifted) - 0x46800000u))};
    }
    const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - 0x3c000000u;
    return {static_cast<uint8_t>(sign | (rounded >> 20))};
}

}  // namespace specdec
