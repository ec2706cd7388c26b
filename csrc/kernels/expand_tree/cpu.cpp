// expand_tree on the CPU: the first k tokens of every row with their scores, then the first k of a request.
// Work: a thread takes whole rows, or tiles of one row where there are fewer rows than threads.
// Bytes moved: B F V logits once, and about k blocks of 256 of a row again, from cache.
// Determinism: top_rows.h defines every sum, and orders are of (value, place): no two are equal.
#include <algorithm>
#include <vector>

#include "cpu_top_rows.h"
#include "dispatch.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

void write_candidates(const ExpandTreeParams& p, int64_t b, int64_t f, const TopList& list) {
    const int64_t first = (b * p.top.rows() + f) * p.top.k;
    for (int i = 0; i < p.top.k; ++i) {
        float score = kMinusInfinity;
        if (i < list.count) score = score_of(p.top.score(b, f), list.logprob[i]);
        p.candidate_scores[first + i] = score;
        p.candidate_tokens[first + i] = is_alive(score) ? list.token[i] : -1;
    }
}

void choose_winners(const ExpandTreeParams& p, int64_t b, std::vector<uint64_t>& orders) {
    const int64_t count = p.top.rows() * p.top.k;
    orders.assign(std::max<int64_t>(count, p.top.k), kNoOrder);
    for (int64_t c = 0; c < count; ++c) {
        orders[c] = order_of(p.candidate_scores[b * count + c], static_cast<uint32_t>(c));
    }
    std::partial_sort(orders.begin(), orders.begin() + p.top.k, orders.end());
    for (int64_t i = 0; i < p.top.k; ++i) write_winner(p, b, i, orders[i]);
}

}  // namespace

void expand_tree(const ExpandTreeParams& p) {
    dispatch_float(p.top.dtype, [&](auto tag) {
        for_top_rows<typename decltype(tag)::type>(
            p.top,
            [&](int64_t b, int64_t f, const TopList& list) { write_candidates(p, b, f, list); });
    });
    parallel_for(0, p.top.batch(), 64, [&](int64_t begin, int64_t end) {
        std::vector<uint64_t> orders;
        for (int64_t b = begin; b < end; ++b) choose_winners(p, b, orders);
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
