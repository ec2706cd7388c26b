// tree_links(parents [R], cu_rows [B+1], max_nodes)
//     -> (tree_mask [R, W], depth [R], first_child [R], next_sibling [R], status [B]), all int32,
//        W = ceil(max_nodes / 32)
// Bit j of node i's mask row: node j is i or an ancestor of i. Children are linked in ascending order.
// Malformed trees set BAD_TREE; what is in the tree then: kernels/tree_links/params.h.
#include "tree_links/params.h"

#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "tree_links";

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Result tree_links(const Tensor& parents, const Tensor& cu_rows, int64_t max_nodes) {
    // 1. Validate.
    Arg(kOp, "parents", parents).dims(1, "[R]").dtype({DType::kI32});
    Arg(kOp, "cu_rows", cu_rows).same_device(parents, "parents").offsets();
    check_option(max_nodes >= 0 && max_nodes <= kMaxTreeNodes, kOp, "max_nodes",
                 "a number from 0 to 2^31 - 1", max_nodes);

    // 2. Allocate.
    const int64_t num_rows = parents.size(0);
    const int64_t batch = cu_rows.size(0) - 1;
    const int64_t num_words = (max_nodes + kMaskBits - 1) / kMaskBits;
    Tensor tree_mask = empty_on(parents, {num_rows, num_words}, DType::kI32);
    Tensor depth = empty_on(parents, {num_rows}, DType::kI32);
    Tensor first_child = empty_on(parents, {num_rows}, DType::kI32);
    Tensor next_sibling = empty_on(parents, {num_rows}, DType::kI32);
    Tensor status = empty_on(parents, {batch}, DType::kI32);
    Result result = {tree_mask, depth, first_child, next_sibling, status};
    if (batch == 0 && num_rows == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, parents);
    const auto out = [&](const char* name, const Tensor& t) {
        return static_cast<int32_t*>(launch.out_data(name, t));
    };
    TreeLinksParams p;
    p.parents = launch.in<1>("parents", parents).as<const int32_t>();
    p.cu_rows = static_cast<const int32_t*>(launch.in_data("cu_rows", cu_rows));
    p.batch = batch;
    p.num_rows = num_rows;
    p.max_nodes = max_nodes;
    p.num_words = num_words;
    p.tree_mask = out("tree_mask", tree_mask);
    p.depth = out("depth", depth);
    p.first_child = out("first_child", first_child);
    p.next_sibling = out("next_sibling", next_sibling);
    p.status = out("status", status);

    // 4. Run.
    SPECDEC_RUN(tree_links, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(tree_links, tree_links)

}  // namespace specdec::ops
