// What verify_chain and verify_tree share: their arguments, and the rules of a request.
//
// A request is a tree of nodes. Node 0 is the anchor, the id of node u > 0 is a draft; a chain is a tree
// whose node u + 1 is the only child of node u. Target row u is the law p of the token after node u,
// draft row u the law q from which the children of u were drawn. At a node, in this order:
//   1. target row with NaN or +inf or nothing finite: kTargetNan, the finite argmax among the allowed ids
//   2. nothing left by the controls: kEmptySupport, the lowest id that the bitmask allows (without a
//      bitmask, or where it allows nothing: the argmax of the raw row)
//   3. children whose id is no token are absent (kBadId unless it is -1)
//   4. greedy (temperature < 1e-5 or top_k == 1): the child that is the argmax, else stop there
//   5. no child: the token comes from p, uniform(BONUS, u)
//   6. draft row without a law: kDraftNan, the token comes from p, uniform(BONUS, u)
//   7. the method's test:
//      target-only (one-hot q, deterministic siblings): uniform(ACCEPT, u+1) against the cumulative p of
//         the children in order; then p without them
//      token: child c iff uniform(ACCEPT, c) * q(c) < p(c), else p <- max(p - q, 0) normalised and, without
//         replacement, q <- q off c normalised, for the next sibling
//      sampled (chains): the token from p with uniform(SAMPLE, position + u), goes on while it is a child
//      typical (chains): p(c) > min(threshold, alpha e^-H(p)); else from p
//      block (chains), traversal: bottom up, see walk_up in verify_walk.h
//   8. what is left after a rejection is drawn from with uniform(RESIDUAL, u+1); a mass below 1e-6 counts
//      as none: then from p, with the same number.
// Status bits are those of the nodes on the accepted path.
#pragma once

#include "controls.h"

namespace specdec {

enum class Method : int32_t { kToken, kBlock, kSampled, kTypical, kTraversal };
enum class Siblings : int32_t { kDeterministic, kSampled, kSampledWithReplacement };

struct VerifyParams {
    View<const void, 2> target_logits;  // [R, >= vocab_size]
    DType logits_dtype;
    IndexView input_ids;     // [R]
    const int32_t* cu_rows;  // [B+1], trusted non-decreasing, clamped to 0..R before use
    IndexView seeds;         // [B] int64
    IndexView positions;     // [B] absolute position of the anchor
    SamplingControls controls;
    DType draft_dtype;
    const float* draft_temperature;  // [B] or nullptr (= 1); below kGreedyTemperature: one-hot
    const int64_t* d2t;              // [draft_vocab] or nullptr: draft ids are target ids
    bool d2t_is_offset;              // target id = draft id + d2t[draft id], else d2t[draft id]
    bool draft_controls;             // the request's controls act on q as well
    Method method;
    float posterior_threshold, posterior_alpha;
    LogprobsWanted logprobs_wanted;
    int64_t num_rows, batch, vocab_size;
    int64_t max_path;     // drafts on a path: max_drafts, max_depth
    int64_t draft_vocab;  // columns of draft rows in use: vocab_size, or the length of d2t

    void* tokens;           // [B, max_path + 1], dtype of input_ids, padded with -1
    int32_t* num_accepted;  // [B]
    int32_t* status;        // [B]
    float* logprobs;        // [B, max_path + 1]
    void* top_ids;          // [B, max_path + 1, n], dtype of input_ids, padded with -1
    float* top_logprobs;    // [B, max_path + 1, n]
    void* scratch;          // CUDA only
};

}  // namespace specdec
