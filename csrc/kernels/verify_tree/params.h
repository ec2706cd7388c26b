// verify_tree: accepts a path of each request's draft tree and draws the token after it. The rules are
// those of common/verify.h.
//   Node u > 0 belongs to the tree iff 0 <= parents[u] < u and its parent belongs to it; others, and
//   parents[0] != -1, set kBadTree. Nodes deeper than max_depth are treated as absent.
//   Siblings with the same id: the later one is absent (deterministic, or drawn without replacement).
#pragma once

#include "isa.h"
#include "verify.h"

namespace specdec {

struct VerifyTreeParams : VerifyParams {
    IndexView parents;                 // [R] local node numbers, int32
    View<const void, 2> draft_logits;  // [R, >= draft_vocab]; data nullptr: deterministic siblings
    Siblings siblings;
    int32_t* path;  // [B, max_path + 1] accepted nodes, the anchor first, padded with -1
};

namespace cuda {
int64_t verify_tree_scratch_bytes(const VerifyTreeParams& p);
Status verify_tree(const VerifyTreeParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU(verify_tree, ::specdec::VerifyTreeParams)
