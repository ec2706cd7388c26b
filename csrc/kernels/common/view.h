// A tensor as kernels see it: pointer, sizes and strides (in elements, 64-bit everywhere, so that
// no product of a row index and a stride can overflow).
#pragma once

#include "types.h"

namespace specdec {

template <class T, int N>
struct View {
    T* data = nullptr;
    int64_t size[N] = {};
    int64_t stride[N] = {};

    template <class U>
    SPECDEC_HD View<U, N> as() const {
        View<U, N> out;
        out.data = static_cast<U*>(data);
        for (int d = 0; d < N; ++d) {
            out.size[d] = size[d];
            out.stride[d] = stride[d];
        }
        return out;
    }

    SPECDEC_HD T* at(int64_t i) const { return data + i * stride[0]; }
    SPECDEC_HD T* at(int64_t i, int64_t j) const { return data + i * stride[0] + j * stride[1]; }
    SPECDEC_HD T* at(int64_t i, int64_t j, int64_t k) const {
        return data + i * stride[0] + j * stride[1] + k * stride[2];
    }
};

// A 1-D tensor of ids, positions or slots, which callers may pass as int32 or int64.
struct IndexView {
    const void* data = nullptr;
    DType dtype = DType::kI32;
    int64_t size = 0;
    int64_t stride = 1;

    SPECDEC_HD int64_t operator[](int64_t i) const {
        return dtype == DType::kI64 ? static_cast<const int64_t*>(data)[i * stride]
                                    : static_cast<const int32_t*>(data)[i * stride];
    }
};

}  // namespace specdec
