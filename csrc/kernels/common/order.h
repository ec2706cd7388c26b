// An order of (value, id) as numbers: ascending numbers are values descending, then ids ascending, so that no
// sort depends on where an element came from. -0 and +0 are one value; NaN has no place and must not come here.
#pragma once

#include "types.h"

namespace specdec {

constexpr uint64_t kNoOrder = ~uint64_t{0};  // behind every finite value

SPECDEC_HD uint64_t order_of(float value, uint32_t id) {
    const uint32_t bits = float_bits(value + 0.0f);
    const uint32_t descending = (bits >> 31) != 0 ? bits : ~(bits | 0x80000000u);
    return static_cast<uint64_t>(descending) << 32 | id;
}
SPECDEC_HD float value_of_order(uint64_t order) {
    const uint32_t descending = static_cast<uint32_t>(order >> 32);
    return bits_float((descending >> 31) != 0 ? descending : ~descending & 0x7fffffffu);
}
SPECDEC_HD uint32_t id_of_order(uint64_t order) {
    return static_cast<uint32_t>(order);
}

// {order <= last} without orders, in a float comparison or two: what loops over registers want.
struct OrderBound {
    float value;
    uint32_t id;

    SPECDEC_HD explicit OrderBound(uint64_t last)
        : value(value_of_order(last)),
          // Zeros come before -0, which is nobody's.
          id(last >> 32 == 0x80000000u ? 0xffffffffu : id_of_order(last)) {}
    SPECDEC_HD bool holds(float x, uint32_t of) const {
        return x > value || (x == value && of <= id);
    }
};

}  // namespace specdec
