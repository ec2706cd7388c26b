// Matrices and lists of float32, fp16 or bf16, told apart at run time: for what is read seldom.
#pragma once

#include "types.h"

namespace specdec {

struct FloatsView {
    const void* data = nullptr;
    DType dtype = DType::kF32;
    int64_t stride = 0;  // of rows
};

SPECDEC_HD float float_at(const void* data, DType dtype, int64_t i) {
    switch (dtype) {
        case DType::kF32:
            return static_cast<const float*>(data)[i];
        case DType::kF16:
            return to_float(static_cast<const f16*>(data)[i]);
        default:
            return to_float(static_cast<const bf16*>(data)[i]);
    }
}
SPECDEC_HD const void* float_row(const void* data, DType dtype, int64_t offset) {
    return static_cast<const char*>(data) + offset * dtype_size(dtype);
}
SPECDEC_HD const void* row_of(const FloatsView& m, int64_t row) {
    return float_row(m.data, m.dtype, row * m.stride);
}

}  // namespace specdec
