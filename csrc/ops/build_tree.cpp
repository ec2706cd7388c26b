// build_tree(candidate_tokens [B, C], candidate_scores [B, C], candidate_parents [B, C], anchor_ids [B],
//            positions [B], num_nodes)
//     -> (input_ids [B, N], parents [B, N], tree_mask [B, N, W], node_positions [B, N], first_child [B, N],
//         next_sibling [B, N], status [B]), W = ceil(N / 32)
// The best N - 1 candidates and the anchor as a tree: kernels/build_tree/params.h.
#include "build_tree/params.h"

#include "stable/tree_nodes_args.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "build_tree";

TreeNodesArgs::Result build_tree(const Tensor& candidate_tokens, const Tensor& candidate_scores,
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
    beside("candidate_scores", candidate_scores, DType::kF32);
    beside("candidate_parents", candidate_parents, DType::kI32);
    const TreeNodesArgs tree{kOp,        candidate_tokens, "candidate_tokens",
                             anchor_ids, positions,        num_nodes};
    tree.check();

    // 2. Allocate.
    const TreeNodesArgs::Result result = tree.allocate(tokens_arg.type());
    if (batch == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, candidate_tokens);
    BuildTreeParams p;
    p.tokens = launch.in<2>("candidate_tokens", candidate_tokens);
    p.scores = launch.in<2>("candidate_scores", candidate_scores).as<const float>();
    p.parents = launch.in<2>("candidate_parents", candidate_parents).as<const int32_t>();
    p.batch = batch;
    p.num_candidates = count;
    p.nodes = tree.fill(launch, tokens_arg.type(), result);

    // 4. Run.
    SPECDEC_RUN(build_tree, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(build_tree, build_tree)

}  // namespace specdec::ops
