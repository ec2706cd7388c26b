// A request of verify_chain on CUDA: its rows, what it wants of them, and the scratch of a call.
#pragma once

#include "draft_map.cuh"
#include "params.h"
#include "philox.h"
#include "rows.h"
#include "verify_call.cuh"

namespace specdec::cuda {

constexpr int64_t kWantedBlocks = 512;  // of the last launch: a few per multiprocessor

// --- What a call wants ------------------------------------------------------------------------------
// Whether the call has a launch between the statistics and the decisions.
SPECDEC_HD bool wants_selection(const VerifyParams& p) {
    return p.controls.any_filters || top_n(p) > 0;
}
SPECDEC_HD bool uses_q(const VerifyParams& p) {
    return p.method != Method::kSampled && p.method != Method::kTypical;
}

// --- Scratch ----------------------------------------------------------------------------------------
// Statistics of the target rows [B, K+1] and of the draft rows [B, K], facts about d2t [draft tiles],
// residual masses [B, rows, tiles], acceptances of `block` [B, S, K+1], tickets [B]; sized from
// capacities, uninitialised on entry.
struct Plan {
    RowLayout target_layout, draft_layout;
    int64_t target, draft, map, masses, alphas, tickets, bytes;
    int64_t draft_rows;  // of a request
    int64_t mass_rows;   // of a request
    int64_t shares;      // S: blocks of a request in the last launch
    bool has_map;        // draft columns are looked up through d2t
};

SPECDEC_HD Plan plan_of(const VerifyChainParams& p) {
    Plan plan;
    RowNeeds needs;
    needs.edited = p.controls.any_edits;  // d2t takes ids away from draft rows alone
    needs.filtered = p.controls.any_filters;
    needs.raw = wants_raw(p);
    needs.entropy = p.method == Method::kTypical;
    needs.top = top_n(p) > 0;
    needs.raw_top = wants_raw(p);
    plan.target_layout = row_layout(p.vocab_size, needs);
    needs.filtered = needs.filtered && p.draft_controls;
    needs.raw = needs.entropy = needs.top = needs.raw_top = false;
    plan.draft_layout = row_layout(p.draft_vocab, needs);

    const int64_t tiles = plan.target_layout.num_tiles;
    const bool block = p.method == Method::kBlock;
    plan.draft_rows = p.draft_logits.data == nullptr || !uses_q(p) ? 0 : p.max_path;
    plan.mass_rows = block && p.max_path > 0 ? p.max_path : 1;
    plan.has_map = p.d2t != nullptr && plan.draft_rows > 0;
    const int64_t shares = uses_q(p) ? (kWantedBlocks + p.batch - 1) / p.batch : 1;
    plan.shares = shares < tiles ? shares : tiles;
    plan.target = 0;
    plan.draft = p.batch * (p.max_path + 1) * plan.target_layout.bytes();
    plan.map = plan.draft + p.batch * plan.draft_rows * plan.draft_layout.bytes();
    plan.masses = plan.map + (plan.has_map ? plan.draft_layout.num_tiles : 0) *
                                 static_cast<int64_t>(sizeof(MapTile));
    plan.alphas =
        plan.masses + p.batch * plan.mass_rows * tiles * static_cast<int64_t>(sizeof(float));
    plan.tickets = plan.alphas + (block ? p.batch * plan.shares * (p.max_path + 1) : 0) *
                                     static_cast<int64_t>(sizeof(float));
    plan.bytes = plan.tickets + p.batch * static_cast<int64_t>(sizeof(uint32_t));
    return plan;
}

template <class T>
__device__ __forceinline__ T* scratch_at(const VerifyChainParams& p, int64_t bytes) {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(p.scratch) + bytes);
}

__device__ __forceinline__ RowScratch target_scratch(const VerifyChainParams& p, const Plan& plan,
                                                     int64_t b, int64_t j) {
    return plan.target_layout.at(scratch_at<void>(p, plan.target), b * (p.max_path + 1) + j);
}

__device__ __forceinline__ RowScratch draft_scratch(const VerifyChainParams& p, const Plan& plan,
                                                    int64_t b, int64_t j) {
    return plan.draft_layout.at(scratch_at<void>(p, plan.draft), b * p.max_path + j);
}

__device__ __forceinline__ DraftMap draft_map(const VerifyChainParams& p, const Plan& plan) {
    return DraftMap{IdMap{p.d2t, p.d2t_is_offset}, scratch_at<MapTile>(p, plan.map), p.draft_vocab,
                    p.vocab_size};
}

// --- A request --------------------------------------------------------------------------------------
struct Request {
    int64_t index;
    int64_t first;     // its first row
    int64_t num_rows;  // anchor and drafts in use; 0: inactive
    LawPlan p;
    int64_t draft_row;  // of draft_logits; -1: q is one-hot, or not used
    LawPlan q;
};

__device__ __forceinline__ Request read_request(const VerifyChainParams& p, int64_t b) {
    Request r;
    r.index = b;
    const RowSpan rows = rows_of_request(p.cu_rows, b, p.num_rows);
    r.first = rows.first;
    r.num_rows = min(rows.count, p.max_path + 1);
    r.p = law_plan(p.controls, b, p.vocab_size, wants_processed(p));
    r.draft_row = -1;
    r.q = r.p;
    r.q.scale = 0.0f;
    r.q.filtered = p.draft_controls && !r.p.filters.none;
    const bool one_hot = p.draft_is_one_hot != nullptr && p.draft_is_one_hot[b];
    if (p.draft_logits.data == nullptr || r.p.greedy || one_hot || !uses_q(p)) return r;
    const float draft_temperature = p.draft_temperature == nullptr ? 1.0f : p.draft_temperature[b];
    const int64_t row = p.draft_rows == nullptr ? b : p.draft_rows[b];
    if (is_greedy(draft_temperature) || row < 0 || row >= p.draft_logits.size[0]) return r;
    r.draft_row = row;
    r.q.scale = exponent_scale(draft_temperature);
    return r;
}

// Row j under the request's controls: the drafts 1..j come before it.
__device__ __forceinline__ VocabRow target_row(const VerifyChainParams& p, const Request& r,
                                               int64_t j) {
    VocabRow row;
    row.row = row_of(p.target_logits, p.logits_dtype, r.first + j);
    row.columns = p.vocab_size;
    row.edits = edits_of(p.controls, r.index, r.first + j,
                         DraftsBefore{p.input_ids, IndexView{}, r.first, j}, IdMap{}, p.vocab_size);
    return row;
}

// Where q of draft j+1 is read; no row where it is one-hot.
__device__ __forceinline__ VocabRow draft_row(const VerifyChainParams& p, const Request& r,
                                              int64_t j) {
    VocabRow row;
    if (r.draft_row < 0) return row;
    row.row = row_of(p.draft_logits, p.draft_dtype, r.draft_row, j);
    row.columns = p.draft_vocab;
    if (!p.draft_controls) return row;
    row.edits = edits_of(p.controls, r.index, r.first + j,
                         DraftsBefore{p.input_ids, IndexView{}, r.first, j},
                         IdMap{p.d2t, p.d2t_is_offset}, p.vocab_size);
    return row;
}

// Whether a chain can come to row j: the draft fed there exists and is a token.
__device__ __forceinline__ bool is_reachable(const VerifyChainParams& p, const Request& r,
                                             int64_t j) {
    return j < r.num_rows && (j == 0 || is_token(p, p.input_ids[r.first + j]));
}

}  // namespace specdec::cuda
