// Block verification of a chain (common/verify.h, oracle: `traverse`), by all blocks of a request.
//
// Down: alpha of node 0 is 1, alpha of the next min(1, alpha * p / q) at its draft, up to the leaf, the
// node that no usable draft follows. Up: the leaf is accepted iff coin < alpha. Where node v + 1 is
// rejected, R = sum max(alpha_v p - q, 0), alpha_v becomes R / (R + 1 - alpha_v), and v is accepted iff
// coin < alpha_v; node 0 always is. The token then comes from that residual.
//   R is only wanted of nodes that may be accepted: alpha never grows on the way up, so where the coin
// is not below alpha_v the node is rejected whatever R is, and a node of alpha 1 is accepted whatever
// R is. All R are independent: the blocks of a request share the tiles of each.
#pragma once

#include "token.cuh"

namespace specdec::cuda {

// Whether R of node v decides anything.
__device__ __forceinline__ bool may_be_accepted(const VerifyChainParams& p, const Request& r,
                                                int64_t v, float alpha) {
    return v == 0 || coin_of(p, r, v) < alpha;
}

// The next node at or above v whose R is wanted, -1: none.
__device__ __forceinline__ int64_t next_wanted(const VerifyChainParams& p, const Request& r,
                                               int64_t v, const float* alphas) {
    while (v >= 0 && !may_be_accepted(p, r, v, alphas[v])) --v;
    return v;
}

struct Climb {
    int64_t row;
    float alpha;  // as it was on the way down
    float mass;   // R
};

// Up from the rejected leaf to the node that is accepted. By whole warps.
__device__ __forceinline__ Climb walk_up(const VerifyChainParams& p, const Request& r, int64_t leaf,
                                         const float* alphas, const float* masses, int num_tiles) {
    for (int64_t v = leaf;;) {
        v = next_wanted(p, r, v - 1, alphas);
        const float alpha = alphas[v];
        const float* of_row = masses + v * num_tiles;
        const float mass = total_mass(num_tiles, [&](int tile) { return of_row[tile]; });
        const float whole = mass + (1.0f - alpha);
        const float after = whole > 0.0f ? mass / whole : 1.0f;
        if (v == 0 || coin_of(p, r, v) < after) return Climb{v, alpha, mass};
    }
}

}  // namespace specdec::cuda
