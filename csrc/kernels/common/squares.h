// The sum of squares of a row on the CPU: 32 lanes of elements l, l + 32, .., added as a butterfly, which is the
// order of a warp too.
#pragma once

#include <algorithm>

#include "simd.h"

namespace specdec::cpu::SPECDEC_ISA {

SPECDEC_SIMD float sum_of_squares(const float* x, int64_t count) {
    constexpr int kStep = 2 * kLanes;
    V16 low = set1(0.0f), high = set1(0.0f);
    const auto add = [&](const float* at) {
        const V16 a = load(at), b = load(at + kLanes);
        low = low + a * a;
        high = high + b * b;
    };
    int64_t i = 0;
    for (; i + kStep <= count; i += kStep) add(x + i);
    if (i < count) {
        float rest[kStep] = {};
        std::copy(x + i, x + count, rest);
        add(rest);
    }
    return sum_lanes(low + high);
}

}  // namespace specdec::cpu::SPECDEC_ISA
