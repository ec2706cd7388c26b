// Elementary functions of fused and rounded float steps alone: the same bits on the CPU, whatever the
// instruction set, and on CUDA, which no libm and no hardware approximation promises. softmax.h has the same
// steps for vectors.
#pragma once

#include <cmath>

#include "token_law.h"

namespace specdec {

// 2^f for |f| <= 1/2 as a polynomial, highest power first; relative error below 1e-7.
constexpr float kExp2Powers[] = {0x1.41fbbcp-13f,
                                 0x1.5f3e52p-10f,
                                 0x1.3b2d4cp-7f,
                                 0x1.c6aee8p-5f,
                                 0x1.ebfbdcp-3f,
                                 0x1.62e430p-1f,
                                 1.0f};
constexpr float kExp2Round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float kMinusTwoLog2E = -2.88539008177792681f;

SPECDEC_HD float fused(float a, float b, float c) {
#if defined(__CUDACC__)
    return fmaf(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// 2^x for x <= 0; exactly 1 at 0; 0 for x below -125 (so at -inf); NaN stays NaN.
SPECDEC_HD float exp2_of(float x) {
    constexpr float kPower0 = kExp2Powers[0], kPower1 = kExp2Powers[1], kPower2 = kExp2Powers[2],
                    kPower3 = kExp2Powers[3], kPower4 = kExp2Powers[4], kPower5 = kExp2Powers[5],
                    kPower6 = kExp2Powers[6];
    float f = x + kExp2Round;
    const uint32_t exponent =
        (float_bits(f) << 23) + (127u << 23);  // of f, only x's integer is left
    f = x - (f - kExp2Round);
    float p = fused(kPower0, f, kPower1);
    p = fused(p, f, kPower2);
    p = fused(p, f, kPower3);
    p = fused(p, f, kPower4);
    p = fused(p, f, kPower5);
    p = fused(p, f, kPower6);
    return x < -125.0f ? 0.0f : p * bits_float(exponent);
}

// 1 / (1 + e^-x); 0 and 1 at the infinities; NaN stays NaN.
SPECDEC_HD float sigmoid_of(float x) {
    const float e = exp2_of((x < 0.0f ? x : 0.0f - x) * kLog2E);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// tanh x, relative error below 5e-7; -1 and 1 at the infinities; NaN stays NaN. Near 0 it is the series,
// as the low bits of 1 - e^(-2 |x|) are lost there.
SPECDEC_HD float tanh_of(float x) {
    const float size = x < 0.0f ? 0.0f - x : x;
    const float e = exp2_of(size * kMinusTwoLog2E);
    const float far = (1.0f - e) / (1.0f + e);
    const float square = x * x;
    float p = fused(62.0f / 2835.0f, square, -17.0f / 315.0f);
    p = fused(p, square, 2.0f / 15.0f);
    p = fused(p, square, -1.0f / 3.0f);
    const float near = fused(p * square, x, x);
    return size < 0.25f ? near : (x < 0.0f ? 0.0f - far : far);
}

}  // namespace specdec
