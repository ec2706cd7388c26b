// fuse_features(hiddens [R, d_i][], fc_weight [d, sum d_i], norm_weight=None [d], eps=1e-6) -> y [R, d]
// The linear layer of features that lie in several tensors, and RMSNorm of its float32 sums.
#include "fuse_features/params.h"
#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "fuse_features";
constexpr size_t kMostHiddens = 16;

// Returns how many columns they have together.
int64_t check_hiddens(const TensorList& hiddens) {
    check_option(!hiddens.empty() && hiddens.size() <= kMostHiddens, kOp, "hiddens",
                 "1 to 16 tensors", hiddens.size());
    int64_t columns = 0;
    for (size_t i = 0; i < hiddens.size(); ++i) {
        const std::string name = "hiddens[" + std::to_string(i) + "]";
        const Arg arg(kOp, name.c_str(), hiddens[i]);
        arg.dims(2, "[R, d_i]").dtype({DType::kF32, DType::kF16, DType::kBF16}).dense_last();
        if (i > 0) {
            arg.dtype({*dtype_of(hiddens[0])})
                .size(0, hiddens[0].size(0), "R of hiddens[0]")
                .same_device(hiddens[0], "hiddens[0]");
        }
        columns += hiddens[i].size(1);
    }
    return columns;
}

Tensor fuse_features(TensorList hiddens, const Tensor& fc_weight, const OptionalTensor& norm_weight,
                     double eps) {
    // 1. Validate.
    const int64_t columns = check_hiddens(hiddens);
    const Tensor& first = hiddens[0];
    Arg(kOp, "fc_weight", fc_weight)
        .dims(2, "[d, sum of d_i]")
        .dtype({*dtype_of(first)})
        .size(1, columns, "sum of d_i")
        .dense_last()
        .same_device(first, "hiddens[0]");
    if (norm_weight) {
        Arg(kOp, "norm_weight", *norm_weight)
            .dims(1, "[d]")
            .dtype({DType::kF32, DType::kF16, DType::kBF16})
            .size(0, fc_weight.size(0), "d of fc_weight")
            .dense()
            .same_device(first, "hiddens[0]");
    }
    check_option(eps >= 0.0, kOp, "eps", "a number >= 0", eps);

    // 2. The product, and what there is to allocate.
    const bool rounded = !norm_weight.has_value();
    const auto [sums] =
        call_op<Tensor>(SPECDEC_OP_NAME(_linear_of_parts), hiddens, fc_weight, rounded);
    if (rounded) return sums;
    Tensor y = empty_on(first, {first.size(0), fc_weight.size(0)}, *dtype_of(first));
    if (y.numel() == 0) return y;

    // 3. Parameters.
    Launch launch(kOp, first);
    FuseFeaturesParams p;
    p.sums = launch.in<2>("sums", sums).as<const float>();
    p.norm_weight = {launch.in_data("norm_weight", *norm_weight), *dtype_of(*norm_weight), 0};
    p.y = launch.out<2>("y", y);
    p.dtype = *dtype_of(first);
    p.eps = static_cast<float>(eps);

    // 4. Run.
    SPECDEC_RUN(fuse_features, launch, p);
    return y;
}

}  // namespace

SPECDEC_REGISTER(fuse_features, fuse_features)

}  // namespace specdec::ops
