// block_tree on the CPU: the first k tokens of every position, then a heap of paths that may be taken next.
// Work: a thread takes whole rows (tiles of one where there are fewer rows than threads), then whole requests.
// Bytes moved: B G V logits once; per node two paths and its results.
// Determinism: top_rows.h defines every sum, block_tree/params.h the order; no two paths are equal in it.
#include <algorithm>
#include <functional>
#include <vector>

#include "cpu_top_rows.h"
#include "dispatch.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

struct Node {
    int parent, depth, rank;
    float score;
};

// lists: those of the request's positions.
void request_tree(const BlockTreeParams& p, int64_t b, const TopList* lists) {
    const int depths = static_cast<int>(p.top.rows());
    const auto logprob = [&](int depth, int rank) {
        const bool some = depth <= depths && rank < lists[depth - 1].count;
        return some ? score_of(0.0f, lists[depth - 1].logprob[rank]) : kMinusInfinity;
    };
    std::vector<Node> nodes{{-1, 0, 0, 0.0f}};
    std::vector<uint64_t> paths;
    const auto later = std::greater<uint64_t>();
    const auto add = [&](int depth, int parent, int rank) {
        if (rank >= p.top.k) return;
        const uint64_t order =
            block_path(nodes[parent].score, depth, parent, rank, logprob(depth, rank));
        if (order == kNoOrder) return;
        paths.push_back(order);
        std::push_heap(paths.begin(), paths.end(), later);
    };
    add(1, 0, 0);
    while (static_cast<int64_t>(nodes.size()) < p.nodes.num_nodes && !paths.empty()) {
        std::pop_heap(paths.begin(), paths.end(), later);
        const BlockPath path = BlockPath::of(paths.back());
        paths.pop_back();
        nodes.push_back({path.parent, path.depth, path.rank, path.score});
        add(path.depth, path.parent, path.rank + 1);
        add(path.depth + 1, static_cast<int>(nodes.size()) - 1, 0);
    }

    const int64_t count = static_cast<int64_t>(nodes.size());
    write_tree(
        p.nodes, b, count,
        [&](int64_t node) { return lists[nodes[node].depth - 1].token[nodes[node].rank]; },
        [&](int64_t node) { return nodes[node].parent; });
    int32_t status = count < p.nodes.num_nodes ? kBadTree : 0;
    for (int g = 0; g < depths; ++g) status |= lists[g].has_law ? 0 : kDraftNan;
    p.nodes.status[b] = status;
}

}  // namespace

void block_tree(const BlockTreeParams& p) {
    std::vector<TopList> lists(p.top.batch() * p.top.rows());
    dispatch_float(p.top.dtype, [&](auto tag) {
        for_top_rows<typename decltype(tag)::type>(
            p.top,
            [&](int64_t b, int64_t g, const TopList& list) { lists[b * p.top.rows() + g] = list; });
    });
    parallel_for(0, p.top.batch(), 8, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) request_tree(p, b, lists.data() + b * p.top.rows());
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
