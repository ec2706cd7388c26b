// fuse_features on the CPU, behind the product: RMSNorm of rows of float32 sums, rounded once.
// Work: rows are spread over threads. Bytes moved: the sums twice, the second time from cache, y once.
// Determinism: the sum of squares has 32 lanes and a fixed tree (squares.h); a row does not know others.
#include <cmath>

#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "squares.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

template <class T>
void norm_row(const FuseFeaturesParams& p, int64_t row) {
    const int64_t size = p.sums.size[1];
    const float* s = p.sums.at(row);
    T* y = p.y.as<T>().at(row);
    const float mean = sum_of_squares(s, size) / static_cast<float>(size);
    const float factor = 1.0f / std::sqrt(mean + p.eps);
    for (int64_t n = 0; n < size; ++n) {
        const float weight = float_at(p.norm_weight.data, p.norm_weight.dtype, n);
        y[n] = from_float<T>(s[n] * factor * weight);
    }
}

}  // namespace

void fuse_features(const FuseFeaturesParams& p) {
    constexpr int64_t kGrain = 8;  // a row takes some microseconds
    dispatch_float(p.dtype, [&](auto tag) {
        parallel_for(0, p.sums.size[0], kGrain, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                norm_row<typename decltype(tag)::type>(p, row);
            }
        });
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
