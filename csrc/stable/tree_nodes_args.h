// A drafted tree as results of an op (build_tree, block_tree): its sizes checked, allocated, and as kernels write it.
#pragma once

#include "kernels/common/tree_nodes.h"
#include "stable/check.h"

namespace specdec::ops {

struct TreeNodesArgs {
    using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

    const char* op;
    const Tensor& first;  // the argument that sets device and batch
    const char* first_name;
    const Tensor &anchor_ids, &positions;
    int64_t num_nodes;

    void check() const {
        const std::string batch_of = std::string("B of ") + first_name;
        for (const auto& [name, t] :
             {std::pair{"anchor_ids", &anchor_ids}, std::pair{"positions", &positions}}) {
            Arg(op, name, *t)
                .same_device(first, first_name)
                .dims(1, "[B]")
                .index()
                .size(0, first.size(0), batch_of.c_str());
        }
        check_option(num_nodes >= 1 && num_nodes <= kMaxDraftedNodes, op, "num_nodes",
                     "a number from 1 to 256", num_nodes);
    }
    int64_t num_words() const { return (num_nodes + kMaskBits - 1) / kMaskBits; }
    Result allocate(DType id_type) const {
        const int64_t batch = first.size(0);
        const auto rows = [&](DType dtype) { return empty_on(first, {batch, num_nodes}, dtype); };
        return {rows(id_type),
                rows(DType::kI32),
                empty_on(first, {batch, num_nodes, num_words()}, DType::kI32),
                rows(DType::kI64),
                rows(DType::kI32),
                rows(DType::kI32),
                empty_on(first, {batch}, DType::kI32)};
    }
    TreeNodes fill(Launch& launch, DType id_type, const Result& result) const {
        const auto out = [&](const char* name, const Tensor& t) {
            return static_cast<int32_t*>(launch.out_data(name, t));
        };
        TreeNodes t;
        t.anchor_ids = launch.index("anchor_ids", anchor_ids);
        t.positions = launch.index("positions", positions);
        t.num_nodes = num_nodes;
        t.num_words = num_words();
        t.id_type = id_type;
        t.input_ids = launch.out_data("input_ids", std::get<0>(result));
        t.parents = out("parents", std::get<1>(result));
        t.tree_mask = out("tree_mask", std::get<2>(result));
        t.node_positions =
            static_cast<int64_t*>(launch.out_data("node_positions", std::get<3>(result)));
        t.first_child = out("first_child", std::get<4>(result));
        t.next_sibling = out("next_sibling", std::get<5>(result));
        t.status = out("status", std::get<6>(result));
        return t;
    }
};

}  // namespace specdec::ops
