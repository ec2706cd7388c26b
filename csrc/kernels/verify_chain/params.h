// verify_chain: accepts a prefix of each request's drafts and draws the token after it.
#pragma once

#include "isa.h"
#include "view.h"

namespace specdec {

struct VerifyChainParams {
    View<const void, 2> target_logits;  // [R, >= vocab_size]
    DType logits_dtype;
    IndexView input_ids;               // [R]; row 0 of a request is its anchor, then its drafts
    const int32_t* cu_rows;            // [B+1], trusted non-decreasing, clamped to 0..R before use
    IndexView seeds;                   // [B] int64
    IndexView positions;               // [B] absolute position of the anchor
    const float* temperature;          // [B] or nullptr (= 1); below kGreedyTemperature: argmax
    View<const void, 3> draft_logits;  // [B', max_drafts, >= vocab_size]; data nullptr: all one-hot
    DType draft_dtype;
    const int32_t* draft_rows;       // [B] row of draft_logits (-1: one-hot) or nullptr: identity
    const float* draft_temperature;  // [B] or nullptr (= 1); below kGreedyTemperature: one-hot
    const bool* draft_is_one_hot;    // [B] or nullptr
    int64_t num_rows, batch, max_drafts, vocab_size;

    void* tokens;           // [B, max_drafts + 1], dtype of input_ids, padded with -1
    int32_t* num_accepted;  // [B]
    int32_t* status;        // [B]
    void* scratch;          // CUDA: verify_chain_scratch_bytes(p) bytes, uninitialised
};

namespace cuda {
int64_t verify_chain_scratch_bytes(const VerifyChainParams& p);
Status verify_chain(const VerifyChainParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU(verify_chain, ::specdec::VerifyChainParams)
