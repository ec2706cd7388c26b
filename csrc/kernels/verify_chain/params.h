// verify_chain: accepts a prefix of each request's drafts and draws the token after it. The rules are
// those of common/verify.h; K_b = min(rows_b - 1, max_drafts) drafts of request b are read.
//   q of a draft row is read only if the request is not greedy, has draft_logits, draft_rows[b] is
//   in [0, B'), draft_is_one_hot[b] is false and draft_temperature[b] >= kGreedyTemperature.
#pragma once

#include "isa.h"
#include "verify.h"

namespace specdec {

struct VerifyChainParams : VerifyParams {
    View<const void, 3>
        draft_logits;              // [B', max_drafts, >= draft_vocab]; data nullptr: all one-hot
    const int32_t* draft_rows;     // [B] row of draft_logits (-1: one-hot) or nullptr: identity
    const bool* draft_is_one_hot;  // [B] or nullptr
};

namespace cuda {
int64_t verify_chain_scratch_bytes(const VerifyChainParams& p);
Status verify_chain(const VerifyChainParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU(verify_chain, ::specdec::VerifyChainParams)
