// fuse_features: features of several target layers as one row of the draft's width.
//   s = sum over the layers of hiddens[i][r] . fc_weight[n, columns of i]     by row_linear's kernel, float32
//   y[r, n] = s[n] / sqrt(mean over n of s^2 + eps) * norm_weight[n]          here, rounded once
#pragma once

#include "floats_view.h"
#include "isa.h"
#include "view.h"

namespace specdec {

struct FuseFeaturesParams {
    View<const float, 2> sums;  // [R, d]
    FloatsView norm_weight;     // [d]
    View<void, 2> y;            // [R, d]
    DType dtype;                // of y
    float eps;
};

namespace cuda {
Status fuse_features(const FuseFeaturesParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(fuse_features, ::specdec::FuseFeaturesParams)
