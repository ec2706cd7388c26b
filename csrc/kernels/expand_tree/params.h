// expand_tree: one depth of an EAGLE-2/3 draft tree (arXiv 2406.16858, section 4.1).
//   Candidates: the first k tokens of every frontier node (common/top_rows.h), candidate i of node f at place
//   f * k + i with score parent_scores[f] + its log-probability, one rounding. Where there is none (a row
//   without a law, a parent that is -inf or NaN, fewer than k tokens): token -1, score -inf.
//   Winners: the first k candidates by (score descending, place ascending); they are the next frontier.
#pragma once

#include "isa.h"
#include "top_rows.h"

namespace specdec {

struct ExpandTreeParams {
    TopRows top;                // [B, F]; row_scores: parent_scores
    int64_t* tokens;            // [B, k]
    int32_t* parent_slot;       // [B, k], frontier node of each winner
    float* scores;              // [B, k]
    int64_t* candidate_tokens;  // [B, F * k]
    float* candidate_scores;    // [B, F * k]
    int32_t* candidate_index;   // [B, k], place of each winner
    void* scratch;              // CUDA: expand_tree_scratch_bytes(p) bytes, uninitialised
};

// Winner i of request b; order kNoOrder: there are no candidates at all.
SPECDEC_HD void write_winner(const ExpandTreeParams& p, int64_t b, int64_t i, uint64_t order) {
    const int64_t at = b * p.top.k + i, count = p.top.rows() * p.top.k;
    const int64_t place = order == kNoOrder ? -1 : static_cast<int64_t>(id_of_order(order));
    p.tokens[at] = place < 0 ? -1 : p.candidate_tokens[b * count + place];
    p.parent_slot[at] = static_cast<int32_t>(place < 0 ? -1 : place / p.top.k);
    p.scores[at] = place < 0 ? -bits_float(0x7f800000u) : value_of_order(order);
    p.candidate_index[at] = static_cast<int32_t>(place);
}

namespace cuda {
int64_t expand_tree_scratch_bytes(const ExpandTreeParams& p);
Status expand_tree(const ExpandTreeParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU(expand_tree, ::specdec::ExpandTreeParams)
