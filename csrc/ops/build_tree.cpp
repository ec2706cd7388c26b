// build_tree(candidate_tokens [B, C], candidate_scores [B, C], candidate_parents [B, C], anchor_ids [B],
//            positions [B], num_nodes)
//     -> (input_ids [B, N], parents [B, N], tree_mask [B, N, W], node_positions [B, N], first_child [B, N],
//         next_sibling [B, N], status [B]), W = ceil(N / 32)
// The best N - 1 candidates and the anchor as a tree: kernels/build_tree/params.h.
#include "build_tree/params.h"

#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "build_tree";

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Result build_tree(const Tensor& candidate_tokens, const Tensor& candidate_scores,
                  const Tensor& candidate_parents, const Tensor& anchor_ids,
                  const Tensor& positions, int64_t num_nodes) {
    // 1. Validate.
    const Arg tokens_arg(kOp, "candidate_tokens", candidate_tokens);
    tokens_arg.dims(2, "[B, C]").index();
    const int64_t batch = candidate_tokens.size(0), count = candidate_tokens.size(1);
    check_option(count <= kMaxBuildCandidates, kOp, "candidate_tokens",
                 "at most 2048 candidates of a request", count);
    const auto beside = [&](const char* name, const Tensor& t, DType dtype) {
        Arg(kOp, name, t)
            .same_device(candidate_tokens, "candidate_tokens")
            .dims(2, "[B, C]")
            .dtype({dtype})
            .size(0, batch, "B of candidate_tokens")
            .size(1, count, "C of candidate_tokens");
    };
    const auto per_request = [&](const char* name, const Tensor& t) {
        Arg(kOp, name, t)
            .same_device(candidate_tokens, "candidate_tokens")
            .dims(1, "[B]")
            .index()
            .size(0, batch, "B of candidate_tokens");
    };
    beside("candidate_scores", candidate_scores, DType::kF32);
    beside("candidate_parents", candidate_parents, DType::kI32);
    per_request("anchor_ids", anchor_ids);
    per_request("positions", positions);
    check_option(num_nodes >= 1 && num_nodes <= kMaxBuildNodes, kOp, "num_nodes",
                 "a number from 1 to 256", num_nodes);

    // 2. Allocate.
    const int64_t num_words = (num_nodes + kMaskBits - 1) / kMaskBits;
    const DType id_type = tokens_arg.type();
    const Tensor& like = candidate_tokens;
    Tensor input_ids = empty_on(like, {batch, num_nodes}, id_type);
    Tensor parents = empty_on(like, {batch, num_nodes}, DType::kI32);
    Tensor tree_mask = empty_on(like, {batch, num_nodes, num_words}, DType::kI32);
    Tensor node_positions = empty_on(like, {batch, num_nodes}, DType::kI64);
    Tensor first_child = empty_on(like, {batch, num_nodes}, DType::kI32);
    Tensor next_sibling = empty_on(like, {batch, num_nodes}, DType::kI32);
    Tensor status = empty_on(like, {batch}, DType::kI32);
    const Result result = {input_ids,   parents,      tree_mask, node_positions,
                           first_child, next_sibling, status};
    if (batch == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, candidate_tokens);
    const auto out = [&](const char* name, const Tensor& t) {
        return static_cast<int32_t*>(launch.out_data(name, t));
    };
    BuildTreeParams p;
    p.tokens = launch.in<2>("candidate_tokens", candidate_tokens);
    p.id_type = id_type;
    p.scores = launch.in<2>("candidate_scores", candidate_scores).as<const float>();
    p.parents = launch.in<2>("candidate_parents", candidate_parents).as<const int32_t>();
    p.anchor_ids = launch.index("anchor_ids", anchor_ids);
    p.positions = launch.index("positions", positions);
    p.batch = batch;
    p.num_candidates = count;
    p.num_nodes = num_nodes;
    p.num_words = num_words;
    p.input_ids = launch.out_data("input_ids", input_ids);
    p.node_parents = out("parents", parents);
    p.tree_mask = out("tree_mask", tree_mask);
    p.node_positions = static_cast<int64_t*>(launch.out_data("node_positions", node_positions));
    p.first_child = out("first_child", first_child);
    p.next_sibling = out("next_sibling", next_sibling);
    p.status = out("status", status);

    // 4. Run.
    SPECDEC_RUN(build_tree, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(build_tree, build_tree)

}  // namespace specdec::ops
