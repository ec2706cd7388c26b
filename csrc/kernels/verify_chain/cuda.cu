// verify_chain on CUDA: row j accepts draft j+1 iff coin * q < p; the first row that does not draws
// the next token from max(p - q, 0), the row after the last draft from p (common/verify.h has the
// rules of all methods).
//   p(v) = 2^((z[v] - max) * c - log2(sum)) is evaluated where it is needed and never stored.
//   Launch 1, grid (B * rows, tiles), 256 threads: statistics of one vocabulary tile of one target
//   or draft row; rows that no chain can reach are skipped. Also resets the tickets, and looks at d2t.
//   Launch 2, only with filters or top ids, grid (B * rows), 512 threads: the prefix that the filters
//   keep of one row, and its most probable ids; a warp owns a group of 256 entries.
//   Last launch, grid (B, S), 256 threads: every block replays its request's chain from the
//   statistics, one warp per row. If it ends in a residual, the S blocks share its tiles; the last
//   one to finish draws the token. Otherwise block 0 draws it. That block writes the outputs.
//   A thread owns 16 entries of a tile. Bytes moved: target rows, and draft rows where q is read,
//   once; the two rows of a residual again, and one tile of them once more. With filters the groups
//   that can be kept again. `block` may look at more than one residual.
//   Determinism: fixed trees over absolute tiles, sums of tiles in a fixed order, integer sums in the
//   selection; S, B and padding decide only who evaluates them. No float atomics.
#include "kernel.h"

#include "block_walk.cuh"
#include "row_top.cuh"

namespace specdec::cuda {
namespace {

// --- Launch 1 -------------------------------------------------------------------------------------
// Rows of a request in a grid: its target rows, then its draft rows.
struct Slot {
    int64_t b, j;
    bool is_draft;
};

__device__ __forceinline__ Slot slot_of(const VerifyChainParams& p, unsigned rows_per_request) {
    const int64_t slot = blockIdx.x % rows_per_request;
    const bool is_draft = slot > p.max_path;
    return Slot{blockIdx.x / rows_per_request, is_draft ? slot - p.max_path - 1 : slot, is_draft};
}

// A draft row is read for the draft that its target row tests, the one fed at row j+1.
__device__ __forceinline__ bool is_needed(const VerifyChainParams& p, const Request& r,
                                          const Slot& slot) {
    if (!slot.is_draft) return is_reachable(p, r, slot.j);
    return r.draft_row >= 0 && is_reachable(p, r, slot.j + 1);
}

template <bool kEdits, bool kMore>
__global__ void __launch_bounds__(kTileThreads, kEdits  ? 2
                                                : kMore ? 4
                                                        : kTileBlocksPerSm)
    verify_statistics_kernel(const __grid_constant__ VerifyChainParams p,
                             unsigned rows_per_request) {
    CU_SHARED(shared, StatsPlan);
    CU_SHARED(more, MoreStatsPlan);
    const Slot slot = slot_of(p, rows_per_request);
    const int tile = static_cast<int>(blockIdx.y);
    const Plan plan = plan_of(p);
    if (slot.b == p.batch) {  // the row of blocks behind the last request
        if (tile < plan.draft_layout.num_tiles) {
            const DraftMap map = draft_map(p, plan);
            map_statistics(map, tile, scratch_at<MapTile>(p, plan.map) + tile);
        }
        return;
    }
    const bool is_first = !slot.is_draft && slot.j == 0 && tile == 0;
    if (is_first && threadIdx.x == 0) scratch_at<uint32_t>(p, plan.tickets)[slot.b] = 0;

    const Request r = read_request(p, slot.b);
    const RowLayout& layout = slot.is_draft ? plan.draft_layout : plan.target_layout;
    if (tile >= layout.num_tiles || !is_needed(p, r, slot)) return;
    const bool sum_wanted = !r.p.greedy || wants_processed(p);
    StatsWanted wanted{slot.is_draft ? r.q.scale
                       : sum_wanted  ? r.p.scale
                                     : 0.0f,
                       false, false, false};
    if constexpr (kMore) {
        wanted.raw_sum = !slot.is_draft && wants_raw(p);
        wanted.exponent_sum = layout.exponent_sum && !r.p.greedy;
        wanted.groups = layout.groups;
    }
    VocabRow row;
    if constexpr (kEdits) {
        row = slot.is_draft ? draft_row(p, r, slot.j) : target_row(p, r, slot.j);
    } else if (slot.is_draft) {
        row.row = row_of(p.draft_logits, p.draft_dtype, r.draft_row, slot.j);
        row.columns = p.draft_vocab;
    } else {
        row.row = row_of(p.target_logits, p.logits_dtype, r.first + slot.j);
        row.columns = p.vocab_size;
    }
    tile_statistics<kMore, kEdits, kMore>(row, tile, wanted, shared, &more,
                                          slot.is_draft ? draft_scratch(p, plan, slot.b, slot.j)
                                                        : target_scratch(p, plan, slot.b, slot.j));
}

// --- Launch 2 -------------------------------------------------------------------------------------
__global__ void __launch_bounds__(kSelectThreads, 1)
    verify_filter_kernel(const __grid_constant__ VerifyChainParams p, unsigned rows_per_request) {
    CU_SHARED(shared, SelectPlan);
    CU_SHARED(shared_job, Uniform<FilterJob>);
    const Slot slot = slot_of(p, rows_per_request);
    const Plan plan = plan_of(p);
    const Request r = read_request(p, slot.b);
    const LawPlan& law = slot.is_draft ? r.q : r.p;
    const int n = slot.is_draft ? 0 : top_n(p);
    if ((!law.filtered && n == 0) || !is_needed(p, r, slot)) return;
    const RowScratch scratch = slot.is_draft ? draft_scratch(p, plan, slot.b, slot.j)
                                             : target_scratch(p, plan, slot.b, slot.j);
    const RowPeak peak = row_peak(scratch.tiles, scratch.num_tiles);
    const VocabRow row = slot.is_draft ? draft_row(p, r, slot.j) : target_row(p, r, slot.j);
    const bool entropy = !slot.is_draft && p.method == Method::kTypical && !r.p.greedy;
    const FilterJob& job = shared_job.set(FilterJob{{row, scratch.z_maxima(), peak.max, law.scale},
                                                    scratch,
                                                    law.filters,
                                                    p.vocab_size,
                                                    entropy});
    const int64_t first = (slot.b * (p.max_path + 1) + slot.j) * n;
    filter_and_report(job, peak, law.filtered, n, wants_processed(p), shared,
                      [&](int i, int64_t id, float logprob) {
                          write_id(p, p.top_ids, first + i, id);
                          p.top_logprobs[first + i] = logprob;
                      });
}

// --- Last launch ----------------------------------------------------------------------------------
struct AcceptPlan {
    Uniform<Plan> plan;
    Uniform<Request> request;
    Uniform<Decision> end;
    Uniform<ResidualJob> residual;
    Uniform<Pick> pick;
    Decision decisions[kTileWarps];
    float strips[kStrips];
    int64_t token;
    FallbackPlan fallback;
};

// Each of these fills a part of the plan, for all threads; one thread computes it.
CU_NOINLINE __device__ inline void set_request(const VerifyChainParams& p, AcceptPlan& shared) {
    if (threadIdx.x == 0) {
        shared.plan.get() = plan_of(p);
        shared.request.get() = read_request(p, blockIdx.x);
    }
    __syncthreads();
}

CU_NOINLINE __device__ inline void set_residual(const VerifyChainParams& p, const Decision& d,
                                                float alpha, float* q_values, AcceptPlan& shared) {
    __syncthreads();  // the one before has been read
    if (threadIdx.x == 0) {
        fill_residual(p, shared.plan.get(), shared.request.get(), d, alpha, q_values,
                      shared.residual.get());
    }
    __syncthreads();
}

CU_NOINLINE __device__ inline void set_pick_from_law(const VerifyChainParams& p, const Decision& d,
                                                     float u, AcceptPlan& shared) {
    const Request& r = shared.request.get();
    pick_from_law(target_row(p, r, d.row), target_scratch(p, shared.plan.get(), r.index, d.row),
                  d.p, r.p.filtered, u, shared.pick);
}

// Of the residual of shared.residual, whose mass is `total`; of p where that is none.
CU_NOINLINE __device__ inline void set_pick_from_residual(const VerifyChainParams& p,
                                                          const Decision& d, const float* masses,
                                                          float total, float u,
                                                          AcceptPlan& shared) {
    if (!(total >= kMinResidualMass)) {
        set_pick_from_law(p, d, u, shared);
        return;
    }
    const ResidualJob& job = shared.residual.get();
    const auto mass_of = [&](int tile) { return masses[tile]; };
    const Bucket tile = pick_bucket(job.num_tiles, u, total, mass_of);
    if (threadIdx.x == 0) {
        shared.pick.get().weight = job.weight;
        shared.pick.get().tile = tile;
    }
    __syncthreads();
    prepare_tile(job, tile.index);
}

// A token that one warp knows, for all threads.
__device__ __forceinline__ int64_t share_token(int64_t token, AcceptPlan& shared) {
    if (threadIdx.x == 0) shared.token = token;
    __syncthreads();
    return shared.token;
}

// The chain ends at row j, or is looked at there.
__device__ __forceinline__ void set_end(const VerifyChainParams& p, int64_t j, AcceptPlan& shared) {
    const Decision& d =
        judge_alone(p, shared.plan.get(), shared.request.get(), j, shared.decisions);
    shared.end.set(d);
}

// The number that draws the token where no residual is drawn from.
__device__ __forceinline__ float uniform_of(const VerifyChainParams& p, const Request& r,
                                            const Decision& d) {
    const int64_t seed = p.seeds[r.index], position = p.positions[r.index];
    if (p.method == Method::kSampled) {
        return uniform_at(seed, position + d.row, 0, Purpose::kSample);
    }
    const bool rejected = d.verdict == Verdict::kRedraw;
    return uniform_at(seed, position, rejected ? d.row + 1 : d.row,
                      rejected ? Purpose::kResidual : Purpose::kBonus);
}

// Masses of the residuals that decide anything, this block's share of each.
__device__ __forceinline__ void share_residuals(const VerifyChainParams& p, const Plan& plan,
                                                const Request& r, const Decision& end,
                                                bool is_block, const float* alphas, float* masses,
                                                float* q_values, AcceptPlan& shared) {
    float alpha = 1.0f;
    for (int64_t v = end.row;; --v) {
        const Decision* d = &end;
        if (is_block) {
            v = next_wanted(p, r, v == end.row ? v - 1 : v, alphas);
            if (v < 0) return;
            alpha = alphas[v];
            d = &judge_alone(p, plan, r, v, shared.decisions);
        }
        set_residual(p, *d, alpha, q_values, shared);
        const ResidualJob& job = shared.residual.get();
        residual_masses(job, static_cast<int>(blockIdx.y), static_cast<int>(gridDim.y),
                        is_block ? masses + v * job.num_tiles : masses, shared.strips);
        if (alpha >= 1.0f) return;
    }
}

__global__ void __launch_bounds__(kTileThreads, 2)
    verify_accept_kernel(const __grid_constant__ VerifyChainParams p) {
    CU_SHARED(shared, AcceptPlan);
    CU_DYN_SHARED(dynamic);
    const int64_t b = blockIdx.x;
    const int share = static_cast<int>(blockIdx.y), num_shares = static_cast<int>(gridDim.y);
    set_request(p, shared);
    const Plan& plan = shared.plan.get();
    const Request& r = shared.request.get();
    Decision& end = shared.end.get();
    float* q_values = plan.has_map ? cu::smem_at<float>(dynamic, 0, kTileEntries) : nullptr;
    if (r.num_rows == 0) {
        if (share == 0) write_outputs(p, plan, r, 0, -1, 0);
        return;
    }

    // Where the chain ends; the same in all blocks of the request.
    const int num_tiles = plan.target_layout.num_tiles;
    float* masses = scratch_at<float>(p, plan.masses) + b * plan.mass_rows * num_tiles;
    float* alphas = scratch_at<float>(p, plan.alphas) + (b * num_shares + share) * (p.max_path + 1);
    const bool is_block = p.method == Method::kBlock && !r.p.greedy;
    const bool is_sampled = p.method == Method::kSampled && !r.p.greedy;
    const float alpha_of_end = walk_down(p, plan, r, shared.decisions, alphas, end);
    bool rejected = end.verdict == Verdict::kResidual;
    if (is_block) rejected = end.row > 0 && !(coin_of(p, r, end.row) < alpha_of_end);

    // The residual's tiles, shared; then the last block alone, or block 0 where there is none.
    if (rejected) {
        share_residuals(p, plan, r, end, is_block, alphas, masses, q_values, shared);
        if (!is_last_block(scratch_at<uint32_t>(p, plan.tickets) + b, num_shares)) return;
    } else if (share != 0) {
        return;
    }

    // The token. `sampled` goes on while it is the draft.
    for (;;) {
        const bool is_law =
            !rejected && end.verdict != Verdict::kArgmax && end.verdict != Verdict::kFallback;
        if (rejected) {
            float alpha = 1.0f, total;
            if (is_block) {
                const Climb climb = walk_up(p, r, end.row, alphas, masses, num_tiles);
                set_end(p, climb.row, shared);
                alpha = climb.alpha;
                total = climb.mass;
                masses += climb.row * num_tiles;
            } else {
                total = total_mass(num_tiles, [&](int tile) { return masses[tile]; });
            }
            const float u = uniform_at(p.seeds[b], p.positions[b], end.row + 1, Purpose::kResidual);
            set_residual(p, end, alpha, q_values, shared);
            set_pick_from_residual(p, end, masses, total, u, shared);
        } else if (is_law) {
            set_pick_from_law(p, end, uniform_of(p, r, end), shared);
        }
        int64_t token = end.argmax;
        if (rejected || is_law) {
            token = share_token(draw(shared.pick.get(), shared.strips), shared);
        } else if (end.verdict == Verdict::kFallback && p.controls.any_edits) {
            token = fallback_token(target_row(p, r, end.row), end.status, shared.fallback);
        }
        if (!is_sampled || !is_law || token != end.draft) {
            write_outputs(p, plan, r, end.row, token, end.status);
            return;
        }
        set_end(p, end.row + 1, shared);
    }
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
int64_t verify_chain_scratch_bytes(const VerifyChainParams& p) {
    return plan_of(p).bytes;
}

Status verify_chain(const VerifyChainParams& p, Stream stream) {
    if (p.batch == 0) return Status{};
    const Plan plan = plan_of(p);
    const int64_t num_tiles = plan.target_layout.num_tiles,
                  draft_tiles = plan.draft_layout.num_tiles;
    const int64_t most_tiles =
        num_tiles < draft_tiles && plan.draft_rows > 0 ? draft_tiles : num_tiles;
    const int64_t rows_per_request = p.max_path + 1 + plan.draft_rows;
    const int64_t rows = p.batch * rows_per_request;
    Status status = check_grid(rows + 1, most_tiles);
    if (!status.ok()) return status;

    const unsigned per_request = static_cast<unsigned>(rows_per_request);
    const bool more = wants_selection(p) || wants_raw(p) || p.method == Method::kTypical;
    cu::LaunchCfg cfg;
    cfg.block = dim3(kTileThreads);
    cfg.stream = stream;
    cfg.grid = dim3(static_cast<unsigned>(rows + (plan.has_map ? 1 : 0)),
                    static_cast<unsigned>(most_tiles));
    // Columns without a target id are edited away too.
    const bool edits = p.controls.any_edits || (p.draft_controls && plan.has_map);
    status = edits  ? cu::launch(cfg, verify_statistics_kernel<true, true>, p, per_request)
             : more ? cu::launch(cfg, verify_statistics_kernel<false, true>, p, per_request)
                    : cu::launch(cfg, verify_statistics_kernel<false, false>, p, per_request);
    if (!status.ok()) return status;

    if (wants_selection(p)) {
        cfg.grid = dim3(static_cast<unsigned>(rows));
        cfg.block = dim3(kSelectThreads);
        status = cu::launch(cfg, verify_filter_kernel, p, per_request);
        if (!status.ok()) return status;
    }
    cu::SmemLayout smem;
    if (plan.has_map) smem.add<float>(kTileEntries);
    cfg.smem = smem.bytes();
    cfg.block = dim3(kTileThreads);
    cfg.grid = dim3(static_cast<unsigned>(p.batch), static_cast<unsigned>(plan.shares));
    return cu::launch(cfg, verify_accept_kernel, p);
}

}  // namespace specdec::cuda
