// verify_chain: accepts a prefix of each request's drafts and draws the token after it.
//   Row j = 0.. of a request, in this order; the first that does not say "accept" ends the request:
//   1. target row with NaN or +inf or nothing finite: kTargetNan, finite argmax (0 when none)
//   2. no draft j+1 (j == K_b), draft -1, or draft outside [0, vocab_size) (then kBadId): the chain
//      ends here
//   3. greedy: accept iff the draft is the argmax, else the argmax
//   4. draft row (where q is read) with NaN or +inf or nothing finite: kDraftNan, the chain ends here
//   5. accept iff uniform(position, j+1, kAccept) * q(draft) < p(draft), else draw from the residual
//      max(p - q, 0) with uniform(position, j+1, kResidual); its mass < 1e-6: from p, same number
//   End of chain: the argmax when greedy, else from p of row j with uniform(position, j, kBonus).
//   q of a draft row is read only if the request is not greedy, has draft_logits, draft_rows[b] is
//   in [0, B'), draft_is_one_hot[b] is false and draft_temperature[b] >= kGreedyTemperature.
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
