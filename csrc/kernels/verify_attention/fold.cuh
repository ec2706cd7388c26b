// Merging partial softmax sums. A partial is (m, l, o): the largest score of a set of keys in units of
// log2, the sum of 2^(score - m), and the same sum weighted by V. Merging with an empty partial
// (m = -inf, l = 0, o = 0) on either side gives the other one back bit for bit.
#pragma once

#include "kernel.h"
#include "params.h"

namespace specdec::cuda {

constexpr float kLn2 = 0.693147180559945309f;

__device__ __forceinline__ float minus_infinity() {
    return bits_float(0xff800000u);
}

// The reference that exponents are taken against; any finite one does where there is no key at all.
__device__ __forceinline__ float exponent_base(float m) {
    return m == minus_infinity() ? 0.0f : m;
}

struct SoftmaxSum {
    float m;
    float l;
};

__device__ __forceinline__ SoftmaxSum empty_sum() {
    return SoftmaxSum{minus_infinity(), 0.0f};
}

// What the two sides of a merge are multiplied by.
struct FoldWeights {
    float old_part;
    float new_part;
};

// One step of the left fold over segments: every path to a result goes through this function.
__device__ __forceinline__ FoldWeights fold_sum(SoftmaxSum& sum, SoftmaxSum segment) {
    const float m = fmaxf(sum.m, segment.m);
    const float base = exponent_base(m);
    const FoldWeights weights{ptx::ex2(sum.m - base), ptx::ex2(segment.m - base)};
    sum.m = m;
    sum.l = fmaf(segment.l, weights.new_part, sum.l * weights.old_part);
    return weights;
}

__device__ __forceinline__ float fold_value(float sum, float segment, FoldWeights weights) {
    return fmaf(segment, weights.new_part, sum * weights.old_part);
}

// The partials of the four warps that share a segment, in warp order.
template <int kParts>
__device__ __forceinline__ SoftmaxSum merge_parts(const SoftmaxSum (&part)[kParts],
                                                  float (&weight)[kParts]) {
    float m = part[0].m;
#pragma unroll
    for (int i = 1; i < kParts; ++i) m = fmaxf(m, part[i].m);
    const float base = exponent_base(m);
    float l = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        weight[i] = ptx::ex2(part[i].m - base);
        l = fmaf(part[i].l, weight[i], l);
    }
    return SoftmaxSum{m, l};
}

// Adds the sink of a head, a key without a value, to a whole sum that is not empty. What the values of
// the sum are multiplied by for it.
__device__ __forceinline__ float add_sink(const VerifyAttentionParams& p, int head,
                                          SoftmaxSum& sum) {
    if (p.sinks == nullptr || sum.l == 0.0f) return 1.0f;
    const float sink = p.sinks[head] * kLog2E;
    const float m = fmaxf(sum.m, sink);
    const float keep = ptx::ex2(sum.m - m);
    sum = SoftmaxSum{m, fmaf(sum.l, keep, ptx::ex2(sink - m))};
    return keep;
}

// Natural log of the sum of exp(score); -inf without a key.
__device__ __forceinline__ float log_sum_exp(SoftmaxSum sum) {
    return sum.l == 0.0f ? minus_infinity() : (sum.m + log2f(sum.l)) * kLn2;
}

}  // namespace specdec::cuda
