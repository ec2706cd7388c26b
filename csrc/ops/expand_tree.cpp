// expand_tree(logits [B, F, >= columns], parent_scores [B, F], topk, *, vocab_size, d2t=None [Vd])
//     -> (tokens [B, k], parent_slot [B, k], scores [B, k], candidate_tokens [B, F * k],
//         candidate_scores [B, F * k], candidate_index [B, k])
// One depth of an EAGLE-2/3 draft tree: kernels/expand_tree/params.h.
#include "expand_tree/params.h"

#include "stable/top_rows_args.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "expand_tree";

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Result expand_tree(const Tensor& logits, const Tensor& parent_scores, int64_t topk,
                   int64_t vocab_size, const OptionalTensor& d2t, bool d2t_is_offset) {
    // 1. Validate.
    const TopRowsArgs rows{kOp, logits, "[B, F, V']", topk, vocab_size, d2t, d2t_is_offset};
    rows.check();
    const int64_t batch = logits.size(0), nodes = logits.size(1);
    constexpr int64_t kMaxNodes = 0x7fffffff / kMaxTop;  // places are int32
    check_option(nodes <= kMaxNodes, kOp, "logits", "at most 2^26 - 1 frontier nodes", nodes);
    Arg(kOp, "parent_scores", parent_scores)
        .same_device(logits, "logits")
        .dims(2, "[B, F]")
        .dtype({DType::kF32})
        .size(0, batch, "B of logits")
        .size(1, nodes, "F of logits");

    // 2. Allocate.
    Tensor tokens = empty_on(logits, {batch, topk}, DType::kI64);
    Tensor parent_slot = empty_on(logits, {batch, topk}, DType::kI32);
    Tensor scores = empty_on(logits, {batch, topk}, DType::kF32);
    Tensor candidate_tokens = empty_on(logits, {batch, nodes * topk}, DType::kI64);
    Tensor candidate_scores = empty_on(logits, {batch, nodes * topk}, DType::kF32);
    Tensor candidate_index = empty_on(logits, {batch, topk}, DType::kI32);
    const Result result = {tokens,           parent_slot,      scores,
                           candidate_tokens, candidate_scores, candidate_index};
    if (batch == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, logits);
    ExpandTreeParams p;
    p.top = rows.fill(launch);
    p.top.row_scores = launch.in<2>("parent_scores", parent_scores).as<const float>();
    p.tokens = static_cast<int64_t*>(launch.out_data("tokens", tokens));
    p.parent_slot = static_cast<int32_t*>(launch.out_data("parent_slot", parent_slot));
    p.scores = static_cast<float*>(launch.out_data("scores", scores));
    p.candidate_tokens =
        static_cast<int64_t*>(launch.out_data("candidate_tokens", candidate_tokens));
    p.candidate_scores = static_cast<float*>(launch.out_data("candidate_scores", candidate_scores));
    p.candidate_index = static_cast<int32_t*>(launch.out_data("candidate_index", candidate_index));
    p.scratch = nullptr;
#if !defined(SPECDEC_BACKEND_CPU)
    const Tensor scratch = empty_on(logits, {cuda::expand_tree_scratch_bytes(p)}, DType::kBool);
    p.scratch = launch.out_data("scratch", scratch);
#endif

    // 4. Run.
    SPECDEC_RUN(expand_tree, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(expand_tree, expand_tree)

}  // namespace specdec::ops
