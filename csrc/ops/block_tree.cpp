// block_tree(logits [B, G, >= columns], anchor_ids [B], positions [B], num_nodes, topk, *, vocab_size, d2t=None,
//            temperature=None [B]) -> as build_tree
// The best tree from the logits of a block drafter: kernels/block_tree/params.h.
#include "block_tree/params.h"

#include "stable/top_rows_args.h"
#include "stable/tree_nodes_args.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "block_tree";

TreeNodesArgs::Result block_tree(const Tensor& logits, const Tensor& anchor_ids,
                                 const Tensor& positions, int64_t num_nodes, int64_t topk,
                                 int64_t vocab_size, const OptionalTensor& d2t, bool d2t_is_offset,
                                 const OptionalTensor& temperature) {
    // 1. Validate.
    const TopRowsArgs rows{kOp, logits, "[B, G, V']", topk, vocab_size, d2t, d2t_is_offset};
    rows.check();
    check_option(logits.size(1) <= kMaxBlockRows, kOp, "logits", "at most 64 positions",
                 logits.size(1));
    const TreeNodesArgs tree{kOp, logits, "logits", anchor_ids, positions, num_nodes};
    tree.check();
    if (temperature) {
        Arg(kOp, "temperature", *temperature)
            .same_device(logits, "logits")
            .dims(1, "[B]")
            .dtype({DType::kF32})
            .size(0, logits.size(0), "B of logits")
            .dense();
    }

    // 2. Allocate.
    const DType id_type = *dtype_of(anchor_ids);
    const TreeNodesArgs::Result result = tree.allocate(id_type);
    if (logits.size(0) == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, logits);
    BlockTreeParams p;
    p.top = rows.fill(launch);
    if (temperature) {
        p.top.temperature = static_cast<const float*>(launch.in_data("temperature", *temperature));
    }
    p.nodes = tree.fill(launch, id_type, result);
    p.scratch = nullptr;
#if !defined(SPECDEC_BACKEND_CPU)
    const Tensor scratch = empty_on(logits, {cuda::block_tree_scratch_bytes(p)}, DType::kBool);
    p.scratch = launch.out_data("scratch", scratch);
#endif

    // 4. Run.
    SPECDEC_RUN(block_tree, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(block_tree, block_tree)

}  // namespace specdec::ops
