// verify_chain on CUDA: row j accepts draft j+1 iff coin * q < p; the first row that does not draws
// the next token from max(p - q, 0), the row after the last draft from p (params.h has the rules).
//   p(v) = 2^((x[v] - max) * c - log2(sum)) is evaluated where it is needed and never stored.
//   Launch 1, grid (B * rows, tiles), 256 threads: statistics of one vocabulary tile of one target
//   or draft row; rows that no chain can reach are skipped. Also resets the tickets.
//   Launch 2, grid (B, S), 256 threads: every block replays its request's chain from the
//   statistics, one warp per row. If it ends in a residual, the S blocks share its tiles; the last
//   one to finish draws the token. Otherwise block 0 draws it. That block writes the outputs.
//   A thread owns 16 entries of a tile. Bytes moved: target rows, and draft rows where q is read,
//   once; the two rows of a residual again, and one tile of them once more.
//   Determinism: fixed trees over absolute tiles, sums of tiles in a fixed order; S, B and padding
//   decide only who evaluates them. No float atomics.
#include "kernel.h"

#include "params.h"
#include "philox.h"
#include "vocab_draw.cuh"

namespace specdec::cuda {
namespace {

constexpr int64_t kWantedBlocks = 512;  // of launch 2: a few per multiprocessor

// --- Scratch --------------------------------------------------------------------------------------
// Target statistics [B, K+1, tiles], draft statistics [B, K, tiles], residual masses [B, tiles],
// tickets [B]; sized from capacities, uninitialised on entry.
struct Plan {
    int64_t target_stats, draft_stats, masses, tickets, bytes;
    int num_tiles;
};

SPECDEC_HD Plan plan_of(const VerifyChainParams& p) {
    Plan plan;
    plan.num_tiles = static_cast<int>(num_vocab_tiles(p.vocab_size));
    const int64_t row = plan.num_tiles * static_cast<int64_t>(sizeof(TileStats));
    const int64_t drafts = p.draft_logits.data == nullptr ? 0 : p.max_drafts;
    plan.target_stats = 0;
    plan.draft_stats = p.batch * (p.max_drafts + 1) * row;
    plan.masses = plan.draft_stats + p.batch * drafts * row;
    plan.tickets = plan.masses + p.batch * plan.num_tiles * static_cast<int64_t>(sizeof(float));
    plan.bytes = plan.tickets + p.batch * static_cast<int64_t>(sizeof(uint32_t));
    return plan;
}

template <class T>
__device__ __forceinline__ T* scratch_at(const VerifyChainParams& p, int64_t bytes) {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(p.scratch) + bytes);
}

__device__ __forceinline__ TileStats* target_stats(const VerifyChainParams& p, const Plan& plan,
                                                   int64_t b, int64_t j) {
    return scratch_at<TileStats>(p, plan.target_stats) +
           (b * (p.max_drafts + 1) + j) * plan.num_tiles;
}

__device__ __forceinline__ TileStats* draft_stats(const VerifyChainParams& p, const Plan& plan,
                                                  int64_t b, int64_t j) {
    return scratch_at<TileStats>(p, plan.draft_stats) + (b * p.max_drafts + j) * plan.num_tiles;
}

// --- A request, as far as its chain is concerned --------------------------------------------------
struct Request {
    int64_t first;     // its first row
    int64_t num_rows;  // anchor and drafts in use; 0: inactive
    bool greedy;
    float scale;        // of p
    int64_t draft_row;  // of draft_logits; -1: q is one-hot
    float draft_scale;  // of q
};

__device__ __forceinline__ int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : (x > high ? high : x);
}

__device__ __forceinline__ Request read_request(const VerifyChainParams& p, int64_t b) {
    Request r;
    r.first = clamp(p.cu_rows[b], 0, p.num_rows);
    r.num_rows = clamp(clamp(p.cu_rows[b + 1], 0, p.num_rows) - r.first, 0, p.max_drafts + 1);
    const float temperature = p.temperature == nullptr ? 1.0f : p.temperature[b];
    r.greedy = is_greedy(temperature);
    r.scale = r.greedy ? 0.0f : exponent_scale(temperature);
    r.draft_row = -1;
    r.draft_scale = 0.0f;
    const bool one_hot = p.draft_is_one_hot != nullptr && p.draft_is_one_hot[b];
    if (p.draft_logits.data == nullptr || r.greedy || one_hot) return r;
    const float draft_temperature = p.draft_temperature == nullptr ? 1.0f : p.draft_temperature[b];
    const int64_t row = p.draft_rows == nullptr ? b : p.draft_rows[b];
    if (is_greedy(draft_temperature) || row < 0 || row >= p.draft_logits.size[0]) return r;
    r.draft_row = row;
    r.draft_scale = exponent_scale(draft_temperature);
    return r;
}

__device__ __forceinline__ Row target_row(const VerifyChainParams& p, const Request& r, int64_t j) {
    return row_of(p.target_logits, p.logits_dtype, r.first + j);
}

// Where q of draft j+1 is read; no row where it is one-hot.
__device__ __forceinline__ Row draft_row(const VerifyChainParams& p, const Request& r, int64_t j) {
    return r.draft_row < 0 ? Row{} : row_of(p.draft_logits, p.draft_dtype, r.draft_row, j);
}

__device__ __forceinline__ bool is_token(const VerifyChainParams& p, int64_t id) {
    return id >= 0 && id < p.vocab_size;
}

// Whether a chain can come to row j: the draft fed there exists and is a token.
__device__ __forceinline__ bool is_reachable(const VerifyChainParams& p, const Request& r,
                                             int64_t j) {
    return j < r.num_rows && (j == 0 || is_token(p, p.input_ids[r.first + j]));
}

// --- Launch 1 -------------------------------------------------------------------------------------
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm)
    verify_statistics_kernel(const __grid_constant__ VerifyChainParams p,
                             unsigned rows_per_request) {
    CU_SHARED(shared, StatsPlan);
    const int64_t b = blockIdx.x / rows_per_request;
    const int64_t slot = blockIdx.x % rows_per_request;
    const int tile = static_cast<int>(blockIdx.y);
    const Plan plan = plan_of(p);
    if (slot == 0 && tile == 0 && threadIdx.x == 0) scratch_at<uint32_t>(p, plan.tickets)[b] = 0;

    const Request r = read_request(p, b);
    const bool is_draft = slot > p.max_drafts;
    const int64_t j = is_draft ? slot - p.max_drafts - 1 : slot;
    // A draft row is read for the draft that its target row tests, the one fed at row j+1.
    if (!is_reachable(p, r, is_draft ? j + 1 : j) || (is_draft && r.draft_row < 0)) return;
    tile_statistics<false>(
        is_draft ? draft_row(p, r, j) : target_row(p, r, j), p.vocab_size, tile,
        is_draft ? r.draft_scale : r.scale, shared,
        (is_draft ? draft_stats(p, plan, b, j) : target_stats(p, plan, b, j)) + tile);
}

// --- Launch 2: the chain --------------------------------------------------------------------------
enum class Verdict : int32_t {
    kAccept,    // goes on with the next row
    kArgmax,    // the token is the row's argmax
    kBonus,     // the token comes from p
    kResidual,  // the token comes from max(p - q, 0)
};

struct Decision {
    int64_t row;    // where the chain ends, = number of accepted drafts
    int64_t draft;  // the one that was tested there
    RowLaw p, q;
    Verdict verdict;
    int32_t status;
    int32_t argmax;
};

__device__ __forceinline__ RowLaw law_of(const TileStats* tiles, int num_tiles, float max,
                                         float scale) {
    return RowLaw{max, scale, log2f(row_sum<&TileStats::sum>(tiles, num_tiles, max, scale))};
}

// What row j says. By a whole warp; every lane gets the result.
__device__ __forceinline__ Decision judge(const VerifyChainParams& p, const Plan& plan,
                                          const Request& r, int64_t b, int64_t j) {
    const TileStats* tiles = target_stats(p, plan, b, j);
    const RowPeak peak = row_peak(tiles, plan.num_tiles);
    Decision d;
    d.row = j;
    d.draft = j + 1 < r.num_rows ? p.input_ids[r.first + j + 1] : -1;
    d.argmax = peak.argmax;
    d.p = RowLaw{peak.max, r.scale, 0.0f};
    d.q = RowLaw{0.0f, r.draft_scale, 0.0f};
    d.verdict = Verdict::kArgmax;
    d.status = 0;
    if (!peak.usable) {
        d.status = kTargetNan;
        return d;
    }
    const bool is_chain = is_token(p, d.draft);
    if (!is_chain && d.draft != -1) d.status = kBadId;
    if (r.greedy) {
        if (is_chain && d.draft == peak.argmax) d.verdict = Verdict::kAccept;
        return d;
    }
    d.verdict = Verdict::kBonus;
    if (!is_chain) return d;

    d.p = law_of(tiles, plan.num_tiles, peak.max, r.scale);
    float q_draft = 1.0f;
    if (r.draft_row >= 0) {
        const TileStats* q_tiles = draft_stats(p, plan, b, j);
        const RowPeak q_peak = row_peak(q_tiles, plan.num_tiles);
        if (!q_peak.usable) {
            d.status = kDraftNan;
            return d;
        }
        d.q = law_of(q_tiles, plan.num_tiles, q_peak.max, r.draft_scale);
        q_draft = d.q(entry_of(draft_row(p, r, j), d.draft));
    }
    const float p_draft = d.p(entry_of(target_row(p, r, j), d.draft));
    const float coin = uniform_at(p.seeds[b], p.positions[b], j + 1, Purpose::kAccept);
    d.verdict = coin * q_draft < p_draft ? Verdict::kAccept : Verdict::kResidual;
    return d;
}

// The row where the chain ends: rows are judged side by side, and the first that does not accept
// decides, so no row behind it has a say. Every thread gets the result.
__device__ __forceinline__ const Decision& replay(const VerifyChainParams& p, const Plan& plan,
                                                  const Request& r, int64_t b,
                                                  Decision* decisions) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    for (int64_t first = 0;; first += kTileWarps) {
        Decision mine{};
        mine.verdict = Verdict::kArgmax;  // ends the search among rows no chain comes to
        if (is_reachable(p, r, first + warp)) mine = judge(p, plan, r, b, first + warp);
        if (first > 0) __syncthreads();  // the previous decisions have been read
        if (threadIdx.x % kWarpSize == 0) decisions[warp] = mine;
        __syncthreads();
        for (int w = 0; w < kTileWarps; ++w) {
            if (decisions[w].verdict != Verdict::kAccept) return decisions[w];
        }
    }
}

// --- Launch 2: the token --------------------------------------------------------------------------
// Whether this is the last of a request's blocks to come here; it then sees what they all wrote.
__device__ __forceinline__ bool is_last_block(uint32_t* ticket, uint32_t num_blocks) {
    CU_SHARED(last, bool);
    if (threadIdx.x == 0) last = ptx::atom_add_acq_rel(ticket, 1u) == num_blocks - 1;
    __syncthreads();
    return last;
}

// Writes every output of a request. By warp 0; `token` follows the accepted drafts.
__device__ __forceinline__ void write_outputs(const VerifyChainParams& p, int64_t b, int64_t first,
                                              int64_t accepted, int64_t token, int32_t status) {
    const int64_t width = p.max_drafts + 1;
    for (int64_t i = threadIdx.x; i < width; i += kWarpSize) {
        const int64_t id = i < accepted ? p.input_ids[first + 1 + i] : i == accepted ? token : -1;
        if (p.input_ids.dtype == DType::kI64) {
            static_cast<int64_t*>(p.tokens)[b * width + i] = id;
        } else {
            static_cast<int32_t*>(p.tokens)[b * width + i] = static_cast<int32_t>(id);
        }
    }
    if (threadIdx.x != 0) return;
    p.num_accepted[b] = static_cast<int32_t>(accepted);
    p.status[b] = status;
}

__global__ void __launch_bounds__(kTileThreads)
    verify_accept_kernel(const __grid_constant__ VerifyChainParams p) {
    CU_SHARED(decisions, Decision[kTileWarps]);
    CU_SHARED(strips, float[kStrips]);
    const int64_t b = blockIdx.x;
    const int share = static_cast<int>(blockIdx.y), num_shares = static_cast<int>(gridDim.y);
    const Plan plan = plan_of(p);
    const Request r = read_request(p, b);
    if (r.num_rows == 0) {
        if (share == 0 && threadIdx.x < kWarpSize) write_outputs(p, b, 0, 0, -1, 0);
        return;
    }

    // Where the chain ends; the same in all blocks of the request.
    const Decision& end = replay(p, plan, r, b, decisions);
    EntryMass weight{
        target_row(p, r, end.row), draft_row(p, r, end.row), end.draft, p.vocab_size, end.p, end.q};
    float* masses = scratch_at<float>(p, plan.masses) + b * plan.num_tiles;
    const bool rejected = end.verdict == Verdict::kResidual;

    // The residual's tiles, shared; then the last block alone, or block 0 where there is none.
    if (rejected) {
        for (int tile = share; tile < plan.num_tiles; tile += num_shares) {
            const float mass = tile_mass(weight, tile, strips);
            if (threadIdx.x == 0) masses[tile] = mass;
        }
        if (!is_last_block(scratch_at<uint32_t>(p, plan.tickets) + b, num_shares)) return;
    } else if (share != 0) {
        return;
    }

    // The token.
    int64_t token = end.argmax;
    if (end.verdict != Verdict::kArgmax) {
        const float u = uniform_at(p.seeds[b], p.positions[b], rejected ? end.row + 1 : end.row,
                                   rejected ? Purpose::kResidual : Purpose::kBonus);
        const auto mass_of = [&](int tile) { return masses[tile]; };
        const float total = rejected ? total_mass(plan.num_tiles, mass_of) : 0.0f;
        Bucket tile;
        if (total >= kMinResidualMass) {
            tile = pick_bucket(plan.num_tiles, u, total, mass_of);
        } else {
            const TileStats* tiles = target_stats(p, plan, b, end.row);
            tile = pick_tile(tiles, plan.num_tiles, end.p.max, r.scale, u);
            weight = softmax_in_tile(weight.p_row, p.vocab_size, load_stats(tiles + tile.index),
                                     r.scale);
        }
        token = draw_in_tile(weight, tile.index, tile.fraction, strips);
    }
    if (threadIdx.x < kWarpSize) write_outputs(p, b, r.first, end.row, token, end.status);
}

}  // namespace

// --- Launch ---------------------------------------------------------------------------------------
int64_t verify_chain_scratch_bytes(const VerifyChainParams& p) {
    return plan_of(p).bytes;
}

Status verify_chain(const VerifyChainParams& p, Stream stream) {
    if (p.batch == 0) return Status{};
    const int64_t num_tiles = num_vocab_tiles(p.vocab_size);
    const int64_t draft_rows = p.draft_logits.data == nullptr ? 0 : p.max_drafts;
    const int64_t rows_per_request = p.max_drafts + 1 + draft_rows;
    Status status = check_grid(p.batch * rows_per_request, num_tiles);
    if (!status.ok()) return status;

    cu::LaunchCfg cfg;
    cfg.block = dim3(kTileThreads);
    cfg.stream = stream;
    cfg.grid =
        dim3(static_cast<unsigned>(p.batch * rows_per_request), static_cast<unsigned>(num_tiles));
    status = cu::launch(cfg, verify_statistics_kernel, p, static_cast<unsigned>(rows_per_request));
    if (!status.ok()) return status;

    const int64_t shares = (kWantedBlocks + p.batch - 1) / p.batch;
    cfg.grid = dim3(static_cast<unsigned>(p.batch),
                    static_cast<unsigned>(shares < num_tiles ? shares : num_tiles));
    return cu::launch(cfg, verify_accept_kernel, p);
}

}  // namespace specdec::cuda
