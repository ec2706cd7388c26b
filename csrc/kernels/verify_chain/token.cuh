// The token after a chain, and the outputs of a request.
#pragma once

#include "judge.cuh"
#include "vocab_draw.cuh"

namespace specdec::cuda {

// --- Residuals --------------------------------------------------------------------------------------
// max(a p - q, 0) at the row of a decision.
struct ResidualJob {
    EntryMass<> weight;
    DraftMap map;     // where q has to be scattered; else q_values is nullptr
    float* q_values;  // shared memory for a tile of it
    const TileStats* tiles;
    bool filtered;  // tiles that keep nothing are passed over
    int num_tiles;
};

__device__ __forceinline__ void fill_residual(const VerifyChainParams& p, const Plan& plan,
                                              const Request& r, const Decision& d, float a,
                                              float* q_values, ResidualJob& job) {
    job.map = draft_map(p, plan);
    job.q_values = r.draft_row >= 0 && job.map.exists() ? q_values : nullptr;
    job.weight.p_row = target_row(p, r, d.row);
    job.weight.q_row = draft_row(p, r, d.row);
    job.weight.q_values = job.q_values;
    job.weight.p = d.p;
    job.weight.q = d.q;
    job.weight.removed = OneId{d.draft};
    job.weight.a = a;
    job.weight.b = 1.0f;
    const RowScratch scratch = target_scratch(p, plan, r.index, d.row);
    job.tiles = scratch.tiles;
    job.filtered = r.p.filtered;
    job.num_tiles = scratch.num_tiles;
}

__device__ __forceinline__ void prepare_tile(const ResidualJob& job, int tile) {
    if (job.q_values == nullptr) return;
    scatter_q(job.map, job.weight.q_row, job.weight.q, tile, job.q_values);
}

// Masses of the tiles of one share, by the whole block.
CU_NOINLINE __device__ inline void residual_masses(const ResidualJob& job, int share,
                                                   int num_shares, float* masses, float* strips) {
    for (int tile = share; tile < job.num_tiles; tile += num_shares) {
        float mass = 0.0f;
        if (!job.filtered || load_stats(job.tiles + tile).sum > 0.0f) {
            prepare_tile(job, tile);
            mass = tile_mass(job.weight, tile, strips);
        }
        if (threadIdx.x == 0) masses[tile] = mass;
    }
}

// Whether this is the last of a request's blocks to come here; it then sees what they all wrote.
__device__ __forceinline__ bool is_last_block(uint32_t* ticket, uint32_t num_blocks) {
    CU_SHARED(last, bool);
    if (threadIdx.x == 0) last = ptx::atom_add_acq_rel(ticket, 1u) == num_blocks - 1;
    __syncthreads();
    return last;
}

// --- Outputs ----------------------------------------------------------------------------------------
// Writes every output of a request, by the whole block; `token` follows the accepted drafts (-1: the
// request is inactive).
CU_NOINLINE __device__ inline void write_outputs(const VerifyChainParams& p, const Plan& plan,
                                                 const Request& r, int64_t accepted, int64_t token,
                                                 int32_t status) {
    const int64_t b = r.index, width = p.max_path + 1, n = top_n(p);
    const auto id_at = [&](int64_t i) {
        return i < accepted ? p.input_ids[r.first + 1 + i] : i == accepted ? token : -1;
    };
    const int64_t written = token < 0 ? 0 : accepted + 1;
    for (int64_t i = threadIdx.x; i < width; i += kTileThreads) {
        write_id(p, p.tokens, b * width + i, id_at(i));
        if (i >= written || p.logprobs_wanted.count < 0) p.logprobs[b * width + i] = 0.0f;
    }
    if (p.logprobs_wanted.count >= 0) {
        for (int64_t i = threadIdx.x / kWarpSize; i < written; i += kTileWarps) {
            const float logprob = logprob_of(target_row(p, r, i), target_scratch(p, plan, b, i),
                                             r.p, wants_processed(p), id_at(i));
            if (threadIdx.x % kWarpSize == 0) p.logprobs[b * width + i] = logprob;
        }
    }
    // The rows before have theirs from the launch that selects.
    for (int64_t i = written * n + threadIdx.x; i < width * n; i += kTileThreads) {
        write_id(p, p.top_ids, b * width * n + i, -1);
        p.top_logprobs[b * width * n + i] = 0.0f;
    }
    if (threadIdx.x != 0) return;
    p.num_accepted[b] = static_cast<int32_t>(accepted);
    p.status[b] = status;
}

}  // namespace specdec::cuda
