// verify_tree on the CPU: the rules of common/verify.h on a tree, one request after the other, lazily:
// a row that the walk does not come to is never read.
// Work: a thread takes whole requests, or tiles of one row where there are fewer requests than threads.
// Bytes moved: the target rows of the accepted path (traversal: of the nodes visited) once, and once
// more for every rejection, with the draft row where q is read; nothing is written but the results.
// Determinism: fixed sums over absolute tiles (vocab_row.h); a request depends on nothing but itself.
#include <algorithm>
#include <vector>

#include "params.h"

#include "tree.h"
#include "verify_results.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// The valid part of a request's tree, down to max_path: links from node to first child and sibling.
class Tree {
  public:
    Tree(const VerifyTreeParams& p, int64_t begin, int64_t count) : p_(p), begin_(begin) {
        first_child_.assign(count, -1);
        next_sibling_.assign(count, -1);
        std::vector<int64_t> depth(count, -1);
        depth[0] = 0;
        bad_ = p.parents[begin] != -1;
        for (int64_t u = 1; u < count; ++u) {
            const int64_t parent = p.parents[begin + u];
            if (parent < 0 || parent >= u || depth[parent] < 0) {
                bad_ = true;
                continue;
            }
            depth[u] = depth[parent] + 1;
        }
        link_children(
            count, [&](int64_t u) { return depth[u] >= 0 && depth[u] <= p.max_path; },
            [&](int64_t u) { return p.parents[begin + u]; }, first_child_.data(),
            next_sibling_.data());
    }
    bool bad() const { return bad_; }

    int64_t num_nodes() const { return static_cast<int64_t>(first_child_.size()); }
    int64_t token(int64_t u) const { return p_.input_ids[begin_ + u]; }
    int64_t first_child(int64_t u) const { return first_child_[u]; }
    int64_t next_sibling(int64_t u) const { return next_sibling_[u]; }
    const void* draft_row(int64_t u) const {
        return static_cast<const char*>(p_.draft_logits.data) +
               (begin_ + u) * p_.draft_logits.stride[0] * dtype_size(p_.draft_dtype);
    }

  private:
    const VerifyTreeParams& p_;
    const int64_t begin_;
    bool bad_ = false;
    std::vector<int64_t> first_child_, next_sibling_;
};

void write_path(const VerifyTreeParams& p, int64_t b, const std::vector<int64_t>& path) {
    const int64_t width = p.max_path + 1, length = static_cast<int64_t>(path.size());
    for (int64_t i = 0; i < width; ++i) {
        p.path[b * width + i] = i < length ? static_cast<int32_t>(path[i]) : -1;
    }
}

// Which requests share no row with another one: all of them, where cu_rows does not decrease.
std::vector<char> requests_alone(const VerifyTreeParams& p) {
    std::vector<char> alone(p.batch, 1);
    const auto look = [&](int64_t b, int64_t i, int64_t entry) {
        if (shares_rows(rows_of_request(p.cu_rows, b, p.num_rows), b, i, entry)) alone[b] = 0;
    };
    int64_t most = 0, least = p.num_rows;
    for (int64_t b = 0; b < p.batch; ++b) {
        most = std::max(most, clamp_row(p.cu_rows[b], p.num_rows));
        look(b, b, most);
    }
    for (int64_t b = p.batch - 1; b >= 0; --b) {
        least = std::min(least, clamp_row(p.cu_rows[b + 1], p.num_rows));
        look(b, b + 1, least);
    }
    return alone;
}

}  // namespace

void verify_tree(const VerifyTreeParams& p) {
    const std::vector<char> alone = requests_alone(p);
    for_requests<Tree>(p, [&](auto& walk, int64_t b) {
        const RowSpan rows = rows_of_request(p.cu_rows, b, p.num_rows);
        if (rows.count == 0 || !alone[b]) {
            write_path(p, b, {});
            return write_inactive(p, b);
        }
        const Tree tree(p, rows.first, rows.count);
        const bool one_hot = p.siblings == Siblings::kDeterministic ||
                             (p.draft_temperature != nullptr && is_greedy(p.draft_temperature[b]));
        const RequestOf request{b,
                                rows.first,
                                p.seeds[b],
                                p.positions[b],
                                one_hot ? Siblings::kDeterministic : p.siblings,
                                one_hot};
        const auto outcome = walk.run(tree, request);
        write_path(p, b, walk.path());
        write_results(p, b, tree, walk, outcome.token,
                      outcome.status | (tree.bad() ? kBadTree : 0));
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
