// What a step of markov_draft chose, from the statistics of its chunks; and the head's output for the next
// one. By one warp per request; sums and walks are those of cpu.cpp, bit for bit.
#pragma once

#include "block.cuh"
#include "params.h"

namespace specdec::cuda {

// Calls fn(pointer of the element type) with what a float type's data is.
template <class F>
__device__ __forceinline__ void with_floats(const void* data, DType dtype, F fn) {
    switch (dtype) {
        case DType::kF32:
            return fn(static_cast<const float*>(data));
        case DType::kF16:
            return fn(static_cast<const f16*>(data));
        default:
            return fn(static_cast<const bf16*>(data));
    }
}

// --- Scratch ----------------------------------------------------------------------------------------
// Two sets, of even and of odd steps: a step reads the set before while it writes its own.
struct MarkovScratch {
    ChunkStats* stats;  // [B, chunks]
    float* z;           // [B, width of a row] logits; rows of p.logits where they are asked for
    float* state;       // [B, rank]
    float* y;           // [B, padded rank], one set: widened for the dtype of w2
};

SPECDEC_HD int64_t markov_row_floats(const MarkovDraftParams& p) {
    return (p.columns + 31) / 32 * 32;
}

SPECDEC_HD int64_t markov_set_bytes(const MarkovDraftParams& p) {
    const int64_t floats = (p.logits == nullptr ? markov_row_floats(p) : 0) +
                           (p.head == MarkovHead::kRnn ? p.rank : 0);
    const int64_t bytes = p.batch * (markov_chunks(p) * static_cast<int64_t>(sizeof(ChunkStats)) +
                                     floats * static_cast<int64_t>(sizeof(float)));
    return (bytes + 15) / 16 * 16;
}

__device__ __forceinline__ MarkovScratch scratch_of(const MarkovDraftParams& p, int64_t k) {
    MarkovScratch s;
    unsigned char* set = static_cast<unsigned char*>(p.scratch) + (k % 2) * markov_set_bytes(p);
    s.stats = reinterpret_cast<ChunkStats*>(set);
    float* floats = reinterpret_cast<float*>(s.stats + p.batch * markov_chunks(p));
    s.z = floats;
    s.state = floats + (p.logits == nullptr ? p.batch * markov_row_floats(p) : 0);
    s.y =
        reinterpret_cast<float*>(static_cast<unsigned char*>(p.scratch) + 2 * markov_set_bytes(p));
    return s;
}

// y of all requests, then 1 or 0 each: whether it is alive.
SPECDEC_HD int64_t markov_vector_bytes(const MarkovDraftParams& p) {
    const int64_t floats = p.batch * (markov_padded_rank(p) + 1);
    return (floats * static_cast<int64_t>(sizeof(float)) + 15) / 16 * 16;
}

// Where the logits of a row lie.
__device__ __forceinline__ float* z_row(const MarkovDraftParams& p, int64_t b, int64_t k) {
    if (p.logits != nullptr) return logits_row(p, b, k);
    return scratch_of(p, k).z + b * markov_row_floats(p);
}

// --- Numbers in rows of 32 --------------------------------------------------------------------------
struct Rows32Place {
    int64_t index;
    double fraction;
};

// mass_of(i) for i < count, asked for by lane i % 32 (Rows32 of cpu.cpp).
template <class MassOf>
__device__ __forceinline__ double total_of_rows(int64_t count, MassOf mass_of) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    double sum = 0.0;
    for (int64_t i = 0; i < count; i += kWarpSize) {
        sum += static_cast<double>(warp_sum(i + lane < count ? mass_of(i + lane) : 0.0f));
    }
    return sum;
}

template <class MassOf>
__device__ __forceinline__ Rows32Place find_in_rows(int64_t count, double target, MassOf mass_of) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int64_t chosen = 0;
    for (int64_t i = 0; i < count; i += kWarpSize) {
        const double sum =
            static_cast<double>(warp_sum(i + lane < count ? mass_of(i + lane) : 0.0f));
        if (sum > 0.0) chosen = i;
        if (sum > target) break;
        target -= sum;
    }
    const float own = chosen + lane < count ? mass_of(chosen + lane) : 0.0f;
    Rows32Place place{chosen, 1.0};
    bool found = false;
    for (int i = 0; i < kWarpSize; ++i) {
        const double here = static_cast<double>(__shfl_sync(kFullMask, own, i));
        if (found) continue;
        if (here > 0.0) place.index = chosen + i;
        if (here > target) {
            place.fraction = target / here;
            found = true;
        } else {
            target -= here;
        }
    }
    return place;
}

// --- The token of a step ----------------------------------------------------------------------------
// Of step k, by a whole warp; every lane gets the result.
__device__ __forceinline__ MarkovPick choose_token(const MarkovDraftParams& p, int64_t b,
                                                   int64_t k) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int64_t chunks = markov_chunks(p);
    const ChunkStats* stats = scratch_of(p, k).stats + b * chunks;
    const MarkovLaw law = markov_law(p, b);
    const float infinity = bits_float(0x7f800000u);
    float peak = -infinity;
    for (int64_t c = lane; c < chunks; c += kWarpSize) peak = fmaxf(peak, stats[c].max);
    peak = warp_max(peak);
    if (peak == infinity || peak == -infinity) return markov_end();

    // 1. The row's sum, from its chunks.
    const auto mass_of = [&](int64_t c) {
        const ChunkStats chunk = stats[c];
        return chunk.sum * exp2_of((chunk.max - peak) * law.scale);
    };
    const bool summed = needs_sum(p, law);
    const double total = summed ? total_of_rows(chunks, mass_of) : 0.0;

    // 2. A chunk.
    Rows32Place place{0, 0.0};
    if (law.greedy) {
        for (int64_t c = 0; c < chunks; c += kWarpSize) {
            const bool here = c + lane < chunks && stats[c + lane].max == peak;
            const unsigned found = __ballot_sync(kFullMask, here);
            if (found != 0) {
                place.index = c + __ffs(static_cast<int>(found)) - 1;
                break;
            }
        }
    } else {
        const float u = uniform_at(p.seeds[b], p.positions[b], k + 1, Purpose::kDraft);
        place = find_in_rows(chunks, static_cast<double>(u) * total, mass_of);
    }

    // 3. A column of it.
    const int64_t begin = place.index * kMarkovChunk;
    const int64_t n = p.columns - begin < kMarkovChunk ? p.columns - begin : kMarkovChunk;
    const float* z = z_row(p, b, k) + begin;
    int64_t column = 0;
    if (law.greedy) {
        for (int64_t i = 0; i < n; i += kWarpSize) {
            const bool here = i + lane < n && z[i + lane] == peak;
            const unsigned found = __ballot_sync(kFullMask, here);
            if (found != 0) {
                column = i + __ffs(static_cast<int>(found)) - 1;
                break;
            }
        }
    } else {
        const float from = stats[place.index].max;
        const auto weight_of = [&](int64_t i) { return exp2_of((z[i] - from) * law.scale); };
        const double sum = total_of_rows(n, weight_of);
        column = find_in_rows(n, place.fraction * sum, weight_of).index;
    }
    const int64_t token = markov_token(p, begin + column);
    if (!summed) return MarkovPick{token, 0.0f, 0.0f};
    return markov_pick(token, law, z[column], peak, log2_of(total));
}

// What comes before step k.
__device__ __forceinline__ MarkovPick pick_before(const MarkovDraftParams& p, int64_t b,
                                                  int64_t k) {
    if (k > 0) return choose_token(p, b, k - 1);
    const int64_t anchor = first_token(p, b);
    return MarkovPick{is_token(p, anchor) ? anchor : -1, 0.0f, 0.0f};
}

// --- The heads --------------------------------------------------------------------------------------
// Where place i of y lies, which goes by the dtype of w2 (Widened of dot_rows.h).
__device__ __forceinline__ int64_t y_place(const MarkovDraftParams& p, int64_t i) {
    return p.w2.dtype == DType::kBF16 ? i / 32 * 32 + i % 2 * 16 + i % 32 / 2 : i;
}

// sum of w[k] x(k), 32 lanes; every lane gets the result.
template <class XOf>
__device__ __forceinline__ float dot32(const void* w, DType dtype, int64_t size, XOf x_of) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float sum = 0.0f;
    with_floats(w, dtype, [&](const auto* weights) {
        for (int64_t k = lane; k < size; k += kWarpSize) {
            sum = fmaf(to_float(weights[k]), x_of(k), sum);
        }
    });
    return warp_sum(sum);
}

struct HeadInput {
    const void* embedding;  // row of w1
    const void* hidden;

    __device__ __forceinline__ float e(const MarkovDraftParams& p, int64_t i) const {
        return float_at(embedding, p.w1.dtype, i);
    }
};
__device__ __forceinline__ HeadInput head_input(const MarkovDraftParams& p, int64_t b, int64_t k,
                                                int64_t token) {
    return HeadInput{row_of(p.w1, token), p.depth > 0 ? hidden_row(p, b, k) : nullptr};
}

__device__ __forceinline__ float dot_hidden(const MarkovDraftParams& p, const HeadInput& in,
                                            const FloatsView& w, int64_t row, int64_t from) {
    const void* weights = float_row(row_of(w, row), w.dtype, from);
    return dot32(weights, w.dtype, p.depth,
                 [&](int64_t i) { return float_at(in.hidden, p.hidden_dtype, i); });
}
__device__ __forceinline__ float dot_embedding(const MarkovDraftParams& p, const HeadInput& in,
                                               const FloatsView& w, int64_t row, int64_t from) {
    const void* weights = float_row(row_of(w, row), w.dtype, from);
    return dot32(weights, w.dtype, p.rank, [&](int64_t i) { return in.e(p, i); });
}

// By a whole warp; every lane gets the result.
__device__ __forceinline__ float confidence_of(const MarkovDraftParams& p, int64_t k,
                                               const HeadInput& in) {
    if (!p.has_confidence) return 1.0f;
    float logit = 0.0f;
    if (p.depth > 0) logit = dot_hidden(p, in, p.confidence_weight, 0, 0);
    if (p.confidence_on_embedding) {
        logit = logit + dot_embedding(p, in, p.confidence_weight, 0, p.depth);
    }
    return markov_confidence(p, k, logit);
}

// What one warp says about a request between two steps: the pick of step k - 1, and the confidence of step k.
__device__ __forceinline__ void report_step(const MarkovDraftParams& p, int64_t b, int64_t k,
                                            const MarkovPick& pick) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    if (k > 0 && lane == 0) write_pick(p, b, k - 1, pick);
    if (p.follows && lane == 0) write_chain_row(p, b);
    if (p.follows || k >= p.steps || pick.token < 0) return;
    const float confidence = confidence_of(p, k, head_input(p, b, k, pick.token));
    if (lane == 0) p.confidence[b * p.steps + k] = confidence;
}

// The token before step k, by a whole warp.
CU_NOINLINE __device__ inline int64_t resolve_before(const MarkovDraftParams& p, int64_t b,
                                                     int64_t k, bool reports) {
    const MarkovPick pick = pick_before(p, b, k);
    if (reports) report_step(p, b, k, pick);
    return pick.token;
}

// Columns past the last one are outside of the law. By a whole block.
__device__ __forceinline__ void fill_tail(const MarkovDraftParams& p, int64_t b, int64_t k) {
    if (p.logits == nullptr) return;
    for (int64_t i = p.columns + threadIdx.x; i < p.width; i += blockDim.x) {
        logits_row(p, b, k)[i] = -bits_float(0x7f800000u);
    }
}

// y of the vanilla head, by some threads; zeros for a request that has ended.
__device__ __forceinline__ void embed(const MarkovDraftParams& p, int64_t token, float* y,
                                      int thread, int threads) {
    const void* w1 = row_of(p.w1, token < 0 ? 0 : token);
    for (int64_t i = thread; i < markov_padded_rank(p); i += threads) {
        y[y_place(p, i)] = token >= 0 && i < p.rank ? float_at(w1, p.w1.dtype, i) : 0.0f;
    }
}

// y of the gated and rnn heads, by a whole block: a warp per place.
__device__ __forceinline__ void head_output(const MarkovDraftParams& p, int64_t b, int64_t k,
                                            int64_t token, float* y) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int warps = static_cast<int>(blockDim.x) / kWarpSize;
    const HeadInput in = head_input(p, b, k, token);
    const FloatsView& w = p.projection;
    const int64_t r = p.rank;
    const auto bias = [&](int64_t output) {
        return float_at(p.projection_bias.data, p.projection_bias.dtype, output);
    };
    for (int64_t i = r + threadIdx.x; i < markov_padded_rank(p); i += blockDim.x) {
        y[y_place(p, i)] = 0.0f;
    }
    if (p.head == MarkovHead::kGated) {
        for (int64_t i = warp; i < r; i += warps) {
            const float over_hidden = dot_hidden(p, in, w, i, 0);
            const float over_embedding = dot_embedding(p, in, w, i, p.depth);
            const float value = gated_value(over_hidden, over_embedding, bias(i), in.e(p, i));
            if (lane == 0) y[y_place(p, i)] = value;
        }
        return;
    }
    const float* old = scratch_of(p, k + 1).state + b * r;
    float* now = scratch_of(p, k).state + b * r;
    const auto old_at = [&](int64_t i) { return k > 0 ? old[i] : 0.0f; };
    const auto joint = [&](int64_t output) {
        const float over_state = dot32(row_of(w, output), w.dtype, r, old_at);
        const float over_embedding = dot_embedding(p, in, w, output, r);
        const float over_hidden = dot_hidden(p, in, w, output, 2 * r);
        return rnn_sum(over_state, over_embedding, over_hidden, bias(output));
    };
    for (int64_t i = warp; i < r; i += warps) {
        const float gate = joint(i), candidate = joint(r + i), output = joint(2 * r + i);
        if (lane == 0) {
            now[i] = rnn_state(gate, candidate, old_at(i));
            y[y_place(p, i)] = tanh_of(output);
        }
    }
}

}  // namespace specdec::cuda
