// row_linear(x [R, K], weight [N, K], bias=None [N]) -> y [R, N]
// A linear layer whose rows have the same bits in a call of any size.
#include "row_linear/params.h"
#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "row_linear";

Tensor row_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
    // 1. Validate.
    const Arg x_arg(kOp, "x", x);
    x_arg.dims(2, "[R, K]").dtype({DType::kF32, DType::kF16, DType::kBF16}).dense_last();
    Arg(kOp, "weight", weight)
        .dims(2, "[N, K]")
        .dtype({x_arg.type()})
        .size(1, x.size(1), "K of x")
        .dense_last()
        .same_device(x, "x");
    const int64_t outputs = weight.size(0);
    if (bias) {
        Arg(kOp, "bias", *bias)
            .dims(1, "[N]")
            .dtype({x_arg.type()})
            .size(0, outputs, "N of weight")
            .dense()
            .same_device(x, "x");
    }

    // 2. Allocate.
    Tensor y = empty_on(x, {x.size(0), outputs}, x_arg.type());
    if (y.numel() == 0) return y;

    // 3. Parameters.
    Launch launch(kOp, x);
    RowLinearParams p{};
    p.x.add(launch.in<2>("x", x));
    p.weight = launch.in<2>("weight", weight);
    p.bias = bias ? launch.in_data("bias", *bias) : nullptr;
    p.y = launch.out<2>("y", y);
    p.dtype = x_arg.type();
    p.rounded = true;

    // 4. Run.
    SPECDEC_RUN(row_linear, launch, p);
    return y;
}

// _linear_of_parts(parts [R, K_i][], weight [N, sum K_i], rounded) -> y [R, N], of their dtype or float32
// row_linear of parts that lie side by side, without putting them there. fuse_features, its only caller, has
// checked the arguments.
Tensor linear_of_parts(TensorList parts, const Tensor& weight, bool rounded) {
    Tensor y = empty_on(weight, {parts[0].size(0), weight.size(0)},
                        rounded ? *dtype_of(weight) : DType::kF32);
    if (y.numel() == 0) return y;
    Launch launch("fuse_features", weight);
    RowLinearParams p{};
    for (const Tensor& part : parts) {  // those without columns have no strides to speak of
        if (part.size(1) > 0 || p.x.count == 0) p.x.add(launch.in<2>("hiddens", part));
    }
    p.weight = launch.in<2>("fc_weight", weight);
    p.y = launch.out<2>("y", y);
    p.dtype = *dtype_of(weight);
    p.rounded = rounded;
    SPECDEC_RUN(row_linear, launch, p);
    return y;
}

}  // namespace

SPECDEC_REGISTER(row_linear, row_linear)
SPECDEC_REGISTER(_linear_of_parts, linear_of_parts)

}  // namespace specdec::ops
