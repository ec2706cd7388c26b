// The way through a request's tree: from the anchor down, or for traversal down along first children and
// back up; then the token. Warp 0 decides until a rest has to be summed up, which all warps do.
#pragma once

#include "node.cuh"

namespace specdec::cuda {

// --- Rejections: by warp 0 ---------------------------------------------------------------------------
// Rejects the next `count` children of a node of acceptance alpha: what is left is max(alpha rest - q, 0).
// Its mass is to be summed up.
CU_NOINLINE __device__ inline void reject(const Walk& w, int32_t count, float alpha) {
    __syncwarp();  // the node has been read
    if (is_first_lane()) {
        TreeNode& at = w.shared.at;
        at.a = at.a * alpha;
        at.b = at.b * alpha + (w.shared.r.reads_q ? at.factor : 0.0);
        at.next += count;
        set_rest(w.p, w.shared.plan, w.shared.r, at, w.q_values, w.rest());
    }
    __syncwarp();
}

// After that, with its mass: the node's acceptance becomes R / (R + 1 - alpha); for the next child what
// is left becomes a law, and the rejected child leaves q. No child is looked at where nothing is left.
CU_NOINLINE __device__ inline void settle(const Walk& w) {
    TreeNode& at = w.shared.at;
    const float mass = total_mass(w.rest().num_tiles, [&](int tile) { return w.masses[tile]; });
    __syncwarp();
    if (is_first_lane()) {
        const float whole = mass + (1.0f - at.alpha);
        at.alpha = whole > 0.0f ? mass / whole : 1.0f;
        at.mass = mass;
        bool goes_on = at.next < at.count && mass >= kMinResidualMass;
        if (goes_on && w.shared.r.siblings == Siblings::kSampled) {
            at.removed += at.raw_q;
            const double left = 1.0 - at.removed;
            goes_on = left >= kMinResidualMass;
            if (goes_on) at.factor = 1.0 / left;
        }
        if (goes_on) {
            at.a /= mass;
            at.b /= mass;
        } else {
            at.count = at.next;
        }
    }
    __syncwarp();
}

// --- Decisions: by warp 0 ----------------------------------------------------------------------------
struct Step {
    enum Kind : int32_t { kDown, kReject, kEnd } kind;
    int32_t child;  // kDown: which one; kReject: how many
    float alpha;    // kDown: of the child; kReject: of the node
};

__device__ __forceinline__ void keep_raw_q(const Walk& w, float raw_q) {
    __syncwarp();
    if (is_first_lane()) w.shared.at.raw_q = raw_q;
    __syncwarp();
}

// From the anchor down.
__device__ __forceinline__ Step step_down(const Walk& w, const Chances& c) {
    const TreeNode& at = w.shared.at;
    if (at.next == at.count) return Step{Step::kEnd, 0, 1.0f};
    if (w.shared.r.reads_q) {
        const float coin = w.number(w.child(at.next).node, Purpose::kAccept);
        return coin * c.q < c.p ? Step{Step::kDown, at.next, 1.0f} : Step{Step::kReject, 1, 1.0f};
    }
    const bool greedy = w.shared.r.p.greedy;
    const int32_t chosen = greedy ? child_of(w, at.argmax) : one_coin(w);
    if (chosen >= 0) return Step{Step::kDown, chosen, 1.0f};
    return greedy ? Step{Step::kEnd, 0, 1.0f} : Step{Step::kReject, at.count, 1.0f};
}

// Down along first children: alpha(child) = min(1, alpha * rest / q). A node without children left is
// accepted iff its number lies below alpha; otherwise its parent loses it.
__device__ __forceinline__ Step step_through(const Walk& w, const Chances& c) {
    const TreeNode& at = w.shared.at;
    if (at.next < at.count) {
        const float scaled = at.alpha * c.p;
        const float alpha = scaled < c.q ? scaled / c.q : scaled > 0.0f ? 1.0f : 0.0f;
        return Step{Step::kDown, at.next, alpha};
    }
    for (;;) {
        if (w.shared.depth == 0 || w.number(at.node, Purpose::kAccept) < at.alpha) {
            return Step{Step::kEnd, 0, 1.0f};
        }
        go_up(w);
        // Alpha never grows: with this number the parent falls with its last child, whatever R is.
        const bool is_last = at.next + 1 == at.count && w.shared.depth > 0;
        if (!is_last || w.number(at.node, Purpose::kAccept) < at.alpha) {
            return Step{Step::kReject, 1, at.alpha};
        }
    }
}

// Goes on until a rest is to be summed up or the path ends. is_summed: the last one has been.
CU_NOINLINE __device__ inline void decide(const Walk& w, bool is_summed) {
    const bool climbs = w.p.method == Method::kTraversal && w.shared.r.reads_q;
    if (is_summed) {
        settle(w);
    } else {
        come_to(w, 0, 0, 0, 0, 1.0f);
    }
    for (;;) {
        const TreeNode& at = w.shared.at;
        Chances c{0.0f, 0.0f, 0.0f};
        if (w.shared.r.reads_q && at.next < at.count) {
            c = chances_of(w, w.child(at.next).id);
            keep_raw_q(w, c.raw_q);
        }
        const Step step = climbs ? step_through(w, c) : step_down(w, c);
        if (step.kind == Step::kDown) {
            go_down(w, step.child, step.alpha);
            continue;
        }
        if (step.kind == Step::kReject) reject(w, step.child, step.alpha);
        if (is_first_lane()) w.shared.ends = step.kind == Step::kEnd;
        return;
    }
}

// --- The walk and the token: by the whole block -------------------------------------------------------
__device__ __forceinline__ void walk(const Walk& w) {
    const bool decides = threadIdx.x < kWarpSize;
    for (bool is_summed = false;; is_summed = true) {
        if (decides) decide(w, is_summed);
        __syncthreads();
        if (w.shared.ends) return;
        sum_rest(w.rest(), w.masses, w.shared.strips);
    }
}

// Where the number that draws falls, by warp 0: among what is left after rejections, or in p.
CU_NOINLINE __device__ inline void pick_tile(const Walk& w) {
    const TreeNode& at = w.shared.at;
    const bool rejected = at.next > 0;
    const float u =
        rejected ? w.number(at.node + 1, Purpose::kResidual) : w.number(at.node, Purpose::kBonus);
    if (rejected && at.mass >= kMinResidualMass) {
        const auto mass_of = [&](int tile) { return w.masses[tile]; };
        const Bucket tile = pick_bucket(w.rest().num_tiles, u, at.mass, mass_of);
        if (is_first_lane()) w.shared.tile = tile;
        return;
    }
    const RowScratch scratch = w.scratch_of(at.node);
    const bool filtered = w.shared.r.p.filtered;
    const auto mass_of = [&](int t) {
        const TileStats tile = load_stats(scratch.tiles + t);
        return filtered ? tile.sum : tile_mass(tile, at.p.max, at.p.scale);
    };
    const Bucket tile =
        pick_bucket(scratch.num_tiles, u, total_mass(scratch.num_tiles, mass_of), mass_of);
    if (!is_first_lane()) return;
    w.shared.tile = tile;
    Rest& rest = w.rest();
    rest.weight.p_row = w.row_of_node(at.node);
    rest.weight.q_row = VocabRow{};
    rest.weight.q_values = rest.q_values = nullptr;
    rest.weight.p = law_in_tile(at.p, load_stats(scratch.tiles + tile.index).max);
    rest.weight.removed = RejectedIds{nullptr, 0};
    rest.weight.a = 1.0f;
}

// The token after the path.
CU_NOINLINE __device__ inline int64_t token_after(const Walk& w) {
    const TreeNode& at = w.shared.at;
    if (at.own_status != 0 && w.p.controls.any_edits) {
        return fallback_token(w.row_of_node(at.node), at.own_status, w.shared.fallback);
    }
    if (at.own_status != 0 || w.shared.r.p.greedy) return at.argmax;
    if (threadIdx.x < kWarpSize) pick_tile(w);
    __syncthreads();
    const Rest& rest = w.rest();
    const Bucket tile = w.shared.tile;
    rest.prepare(tile.index);
    sum_strips_by_block(rest.weight, tile.index, w.shared.strips);
    const int64_t token = draw_from_strips(rest.weight, tile.index, tile.fraction, w.shared.strips);
    if (threadIdx.x == 0) w.shared.token = token;
    __syncthreads();
    return w.shared.token;
}

}  // namespace specdec::cuda
