// The exponentials of CPU kernels: polynomials of fused steps, so that every instruction set and
// every lane gives the same bits. All softmax arithmetic is in powers of two: exp(x) is
// exp2(x * log2(e)), with the factor folded into the temperature or scale.
#pragma once

#include "exact_math.h"
#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {

// 2^x for x <= 0, relative error below 1e-7; exactly 1 at 0; 0 for x below -125 (so at -inf); NaN stays
// NaN. x = n + f with |f| <= 1/2: a minimax polynomial for 2^f, scaled by 2^n. N vectors go in step:
// one alone is a chain of some forty cycles, longer than a processor looks ahead.
template <int N>
SPECDEC_SIMD void exp2_nonpositive(Native (&x)[N]) {
    Native f[N], p[N];
    NativeInt n[N];
#define SPECDEC_EACH_VECTOR(step) _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) step
    SPECDEC_EACH_VECTOR(f[i] = x[i] + spread<Native>(kExp2Round));
    SPECDEC_EACH_VECTOR(n[i] = (as_bits(f[i]) << 23) + (127 << 23));  // of f, only n is left
    SPECDEC_EACH_VECTOR(f[i] = x[i] - (f[i] - spread<Native>(kExp2Round)));
    SPECDEC_EACH_VECTOR(p[i] = spread<Native>(kExp2Powers[0]));
    _Pragma("GCC unroll 6") for (int k = 1; k < 7; ++k) {
        SPECDEC_EACH_VECTOR(p[i] = fma(p[i], f[i], spread<Native>(kExp2Powers[k])));
    }
    SPECDEC_EACH_VECTOR(p[i] = p[i] * as_floats(n[i]));
    SPECDEC_EACH_VECTOR(x[i] = select(x[i] < -125.0f, Native{}, p[i]));
#undef SPECDEC_EACH_VECTOR
}
SPECDEC_SIMD Native exp2_nonpositive(Native x) {
    Native one[1] = {x};
    exp2_nonpositive(one);
    return one[0];
}
SPECDEC_SIMD V16 exp2_nonpositive(V16 x) {
    exp2_nonpositive(x.part);
    return x;
}

// tanh x, relative error below 5e-7; -1 and 1 at the infinities; NaN stays NaN. Near 0 it is the
// series, as the low bits of 1 - e^(-2 |x|) are lost there.
template <class V>
SPECDEC_SIMD V tanh(V x) {
    const V zero = spread<V>(0.0f), one = spread<V>(1.0f);
    const V size = select(x < zero, zero - x, x);
    const V e = exp2_nonpositive(size * spread<V>(kMinusTwoLog2E));
    const V far = (one - e) / (one + e);
    const V square = x * x;
    V p = spread<V>(62.0f / 2835.0f);
    p = fma(p, square, spread<V>(-17.0f / 315.0f));
    p = fma(p, square, spread<V>(2.0f / 15.0f));
    p = fma(p, square, spread<V>(-1.0f / 3.0f));
    const V near = fma(p * square, x, x);
    return select(size < spread<V>(0.25f), near, select(x < zero, zero - far, far));
}

// --- Softmax rows: 2^(d * c) for d * c <= 0 --------------------------------------------------------
// d * c = n + j / 8 + f with |f| <= 1/16: 2^f is a polynomial of degree 3, 2^(n + j/8) comes from a
// table of eight and an addition to its exponent. That leaves few enough steps that a row costs about
// its memory traffic. Relative error below 2e-7; exactly 1 at 0. The product is not rounded on its
// own, and there is no upper range to guard.

// 2^(j/8), less j in the bits from 20 on: adding 8n + j to those bits gives 2^(n + j/8).
alignas(64) constexpr int32_t kEighths[16] = {
    0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7,
    0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};

struct Exp2Factors {
    V16 power;     // 2^(n + j/8)
    V16 fraction;  // 2^f
    I16 in_range;  // d * c above -126
};
SPECDEC_SIMD Exp2Factors exp2_factors(V16 d, V16 c) {
    constexpr float kRound = 1572864.0f;  // 1.5 * 2^20: adding it rounds to eighths
    const V16 shifted = fma(d, c, set1(kRound));
    const V16 f = fma(d, c, set1(kRound) - shifted);
    V16 p = set1(0x1.c6a004p-5f);
    p = fma(p, f, set1(0x1.ec0c32p-3f));
    p = fma(p, f, set1(0x1.62e432p-1f));
    p = fma(p, f, set1(1.0f));
    const I16 eighths = as_bits(shifted);
    const V16 power = as_floats(pick_of_eight(kEighths, eighths) + (eighths << 20));
    return {power, p, set1(kRound - 126.0f) < shifted};
}

// 0 below 2^-126 and where d * c is NaN, which is what a row of -inf (-inf - -inf) and an infinite
// temperature (-inf * 0) leave.
SPECDEC_SIMD V16 exp2_product(V16 d, V16 c) {
    const Exp2Factors e = exp2_factors(d, c);
    return as_floats(as_bits(e.power * e.fraction) & e.in_range);
}

// sum + 2^(d * c) for c > 0, with d raised to exp2_floor(c): 2^-120 in place of less, nothing beside
// a sum that holds a 1. Two steps fewer than adding exp2_product.
SPECDEC_SIMD V16 exp2_add(V16 sum, V16 d, V16 c, V16 floor) {
    const Exp2Factors e = exp2_factors(max(d, floor), c);
    return fma(e.power, e.fraction, sum);
}
inline float exp2_floor(float c) {
    return -120.0f / c;
}

}  // namespace specdec::cpu::SPECDEC_ISA
