// row_linear: a linear layer for the few rows of a verification pass, row by row the same bits.
#pragma once

#include "isa.h"
#include "view.h"

namespace specdec {

struct RowLinearParams {
    View<const void, 2> x;       // [R, K]
    View<const void, 2> weight;  // [N, K]
    const void* bias;            // [N] or nullptr
    View<void, 2> y;             // [R, N]
    DType dtype;                 // of all
};

namespace cuda {
Status row_linear(const RowLinearParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU_BF16(row_linear, ::specdec::RowLinearParams)
