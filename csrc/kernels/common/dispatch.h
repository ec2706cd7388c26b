// Run-time values to compile-time constants. Each helper names its alternatives, calls
// fn(Tag<...>{}) with the matching one, and returns false when there is none.
#pragma once

#include "types.h"

namespace specdec {

template <class T>
struct Tag {
    using type = T;
};
template <int V>
struct IntTag {
    static constexpr int value = V;
};

// fp32, fp16, bf16: the types of logits and activations.
template <class F>
bool dispatch_float(DType dtype, F&& fn) {
    switch (dtype) {
        case DType::kF32:
            fn(Tag<float>{});
            return true;
        case DType::kF16:
            fn(Tag<f16>{});
            return true;
        case DType::kBF16:
            fn(Tag<bf16>{});
            return true;
        default:
            return false;
    }
}

template <int... Vs, class F>
bool dispatch_int(int value, F&& fn) {
    bool found = false;
    (void)((value == Vs ? (fn(IntTag<Vs>{}), found = true) : false) || ...);
    return found;
}

}  // namespace specdec
