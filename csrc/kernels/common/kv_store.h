// What ops keep of a number in a KV cache, and how they read scales that differ by layer.
#pragma once

#include <type_traits>

#include "paged.h"

namespace specdec {

// Of x, already rounded to T: itself in a cache of T, x / scale in an fp8 cache.
template <class C, class T>
SPECDEC_HD C stored(T x, float scale) {
    if constexpr (std::is_same_v<C, T>) {
        return x;
    } else if constexpr (std::is_same_v<C, f8e4m3>) {
        return from_float<C>(to_float(x) / scale);
    } else {
        return from_float<C>(x);
    }
}

// Scales of the caches of all layers.
struct LayerScale {
    const float* data = nullptr;  // [1], [L] or [L, Hkv], or null: 1
    int64_t layer_stride = 0;     // 0 for one scale altogether
    int64_t head_stride = 0;      // 0 for one scale per layer

    SPECDEC_HD HeadScale layer(int64_t l) const {
        return HeadScale{data == nullptr ? nullptr : data + l * layer_stride, head_stride};
    }
};

}  // namespace specdec
