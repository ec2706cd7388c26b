// verify_tree(target_logits [R, >= V], input_ids [R], parents [R], cu_rows [B+1], seeds [B],
//             positions [B], max_depth, *, vocab_size V, draft_logits [R, >= Vd],
//             draft_temperature [B], children, method, d2t [Vd], controls)
//     -> (tokens [B, max_depth+1], path [B, max_depth+1], num_accepted [B], status [B],
//         logprobs [B, max_depth+1], top_ids [B, max_depth+1, n], top_logprobs)
// Accepts a path of each request's draft tree; then comes one token. The emitted tokens have the law of p
// under the request's controls. A request's result depends on that request alone.
// Rules: kernels/common/verify.h; laws: docs/sampling.md.
#include "verify_tree/params.h"

#include "stable/verify_args.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "verify_tree";

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Siblings siblings_of(const std::string& name) {
    if (name == "deterministic") return Siblings::kDeterministic;
    if (name == "sampled") return Siblings::kSampled;
    if (name == "sampled_with_replacement") return Siblings::kSampledWithReplacement;
    fail(kOp, "children",
         "wanted \"deterministic\", \"sampled\" or \"sampled_with_replacement\", got \"", name,
         "\"");
}

Result verify_tree(const Tensor& target_logits, const Tensor& input_ids, const Tensor& parents,
                   const Tensor& cu_rows, const Tensor& seeds, const Tensor& positions,
                   int64_t max_depth, int64_t vocab_size, const OptionalTensor& draft_logits,
                   const OptionalTensor& draft_temperature, const std::string& children,
                   const std::string& method, const OptionalTensor& d2t, bool d2t_is_offset,
                   bool draft_controls, SPECDEC_CONTROL_PARAMETERS) {
    // 1. Validate.
    const VerifyArgs args{kOp,
                          target_logits,
                          input_ids,
                          cu_rows,
                          seeds,
                          positions,
                          max_depth,
                          "max_depth",
                          vocab_size,
                          draft_logits,
                          draft_temperature,
                          d2t,
                          d2t_is_offset,
                          draft_controls,
                          SPECDEC_CONTROL_ARGUMENTS};
    const Siblings siblings = siblings_of(children);
    check_option(method == "token" || method == "traversal", kOp, "method",
                 "\"token\" or \"traversal\"", "\"" + method + "\"");
    args.check(2, "[R, >= vocab_size]");
    args.on_device("parents", parents)
        .dims(1, "[R]")
        .dtype({DType::kI32})
        .size(0, args.num_rows(), "R of target_logits");
    if (siblings != Siblings::kDeterministic && !draft_logits) {
        fail(kOp, "draft_logits", "wanted the law of the children with children=\"", children,
             "\", got none");
    }
    if (draft_logits) {
        Arg(kOp, "draft_logits", *draft_logits).size(0, args.num_rows(), "R of target_logits");
    }

    // 2. Allocate.
    const VerifyArgs::Results r = args.allocate();
    const Tensor path = empty_on(target_logits, {args.batch(), max_depth + 1}, DType::kI32);
    const Result result = {r.tokens,   path,      r.num_accepted, r.status,
                           r.logprobs, r.top_ids, r.top_logprobs};
    if (args.batch() == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, target_logits);
    VerifyTreeParams p;
    args.fill(launch, r, method == "token" ? Method::kToken : Method::kTraversal, 0.0, 0.0, &p);
    p.parents = launch.index("parents", parents);
    p.siblings = siblings;
    if (siblings != Siblings::kDeterministic) {
        p.draft_logits = launch.in<2>("draft_logits", *draft_logits);
    }
    p.path = static_cast<int32_t*>(launch.out_data("path", path));
#if !defined(SPECDEC_BACKEND_CPU)
    const Tensor scratch =
        empty_on(target_logits, {cuda::verify_tree_scratch_bytes(p)}, DType::kBool);
    p.scratch = launch.out_data("scratch", scratch);
#endif

    // 4. Run.
    SPECDEC_RUN(verify_tree, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(verify_tree, verify_tree)

}  // namespace specdec::ops
