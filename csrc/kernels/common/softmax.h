// The exponential of CPU kernels: a polynomial of fused steps, so that every instruction set and
// every lane gives the same bits. All softmax arithmetic is in powers of two: exp(x) is
// exp2(x * log2(e)), with the factor folded into the temperature or scale.
#pragma once

#include "simd.h"
#include "token_law.h"

namespace specdec::cpu::SPECDEC_ISA {

// 2^f for |f| <= 1/2: a minimax polynomial, exactly 1 at 0.
SPECDEC_SIMD V16 exp2_fraction(V16 f) {
    V16 p = set1(0x1.41fbbcp-13f);
    p = fma(p, f, set1(0x1.5f3e52p-10f));
    p = fma(p, f, set1(0x1.3b2d4cp-7f));
    p = fma(p, f, set1(0x1.c6aee8p-5f));
    p = fma(p, f, set1(0x1.ebfbdcp-3f));
    p = fma(p, f, set1(0x1.62e430p-1f));
    p = fma(p, f, set1(1.0f));
    return p;
}

// 2^x, relative error below 1e-7; exp2(0) = 1 exactly; 0 for x below -125 (so at -inf), +inf
// from 128; NaN stays NaN. x = n + f with |f| <= 1/2, then 2^f scaled by 2^n.
SPECDEC_SIMD V16 exp2(V16 x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const V16 shifted = x + set1(kRound);
    const V16 f = x - (shifted - set1(kRound));
    const V16 p = exp2_fraction(f);
    // n sits in the low bits of `shifted`; 2^n as two factors, so that n = 128 has its own.
    const I16 n = as_bits(shifted) - set1(static_cast<int32_t>(0x4b400000));
    const V16 scale = as_floats((n + set1(126)) << 23);
    const V16 r = (p * scale) * set1(2.0f);
    const V16 clipped = select(x < set1(-125.0f), set1(0.0f), r);
    return select(x > set1(0x1.fffffep6f), set1(__builtin_inff()), clipped);
}

// 2^(d * c) for d * c <= 0, as softmax rows want it: the product is not rounded on its own, and there
// is no upper range to guard. 0 below 2^-125 and where d * c is NaN, which is what a row of -inf
// (-inf - -inf) and an infinite temperature (-inf * 0) leave.
SPECDEC_SIMD V16 exp2_product(V16 d, V16 c) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const V16 shifted = fma(d, c, set1(kRound));
    const V16 f = fma(d, c, set1(kRound) - shifted);
    const I16 bits = as_bits(exp2_fraction(f)) + (as_bits(shifted) << 23);
    return as_floats(bits & (set1(kRound - 126.0f) < shifted));
}

}  // namespace specdec::cpu::SPECDEC_ISA
