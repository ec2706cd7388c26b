// tree_from_mask(tree_mask [R, W], cu_rows [B+1])
//     -> (parents [R], depth [R], first_child [R], next_sibling [R], status [B]), all int32
// The inverse of tree_links: bit j of node i's row says that node j is i or an ancestor of i.
// A row that is not its parent's row plus its own bit sets BAD_TREE: kernels/tree_from_mask/params.h.
#include "tree_from_mask/params.h"

#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "tree_from_mask";

using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Result tree_from_mask(const Tensor& tree_mask, const Tensor& cu_rows) {
    // 1. Validate.
    Arg(kOp, "tree_mask", tree_mask).dims(2, "[R, W]").dtype({DType::kI32}).dense_last();
    Arg(kOp, "cu_rows", cu_rows).same_device(tree_mask, "tree_mask").offsets();

    // 2. Allocate.
    const int64_t num_rows = tree_mask.size(0);
    const int64_t batch = cu_rows.size(0) - 1;
    Tensor parents = empty_on(tree_mask, {num_rows}, DType::kI32);
    Tensor depth = empty_on(tree_mask, {num_rows}, DType::kI32);
    Tensor first_child = empty_on(tree_mask, {num_rows}, DType::kI32);
    Tensor next_sibling = empty_on(tree_mask, {num_rows}, DType::kI32);
    Tensor status = empty_on(tree_mask, {batch}, DType::kI32);
    Result result = {parents, depth, first_child, next_sibling, status};
    if (batch == 0 && num_rows == 0) return result;

    // 3. Parameters.
    Launch launch(kOp, tree_mask);
    const auto out = [&](const char* name, const Tensor& t) {
        return static_cast<int32_t*>(launch.out_data(name, t));
    };
    TreeFromMaskParams p;
    p.tree_mask = launch.in<2>("tree_mask", tree_mask).as<const int32_t>();
    p.cu_rows = static_cast<const int32_t*>(launch.in_data("cu_rows", cu_rows));
    p.batch = batch;
    p.num_rows = num_rows;
    p.parents = out("parents", parents);
    p.depth = out("depth", depth);
    p.first_child = out("first_child", first_child);
    p.next_sibling = out("next_sibling", next_sibling);
    p.status = out("status", status);

    // 4. Run.
    SPECDEC_RUN(tree_from_mask, launch, p);
    return result;
}

}  // namespace

SPECDEC_REGISTER(tree_from_mask, tree_from_mask)

}  // namespace specdec::ops
