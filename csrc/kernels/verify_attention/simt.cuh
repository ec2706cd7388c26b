// verify_attention for float32 rows: the same order of summation without tensor cores.
//   Grid: one block of 4 warps per (row, query head). Warp w takes tokens 16 w.. of every tile; a lane
//   holds columns lane, lane + 32, ... of q and of its sums, so that any stride reads whole lines.
//   Bytes: K and V of the visible places once per query head. No scratch.
#pragma once

#include "fold.cuh"
#include "schedule.cuh"

namespace specdec::cuda {

template <class CacheElement, int kHeadDim_, int kValueDim_>
struct SimtTraits {
    using C = CacheElement;  // of K and V: float or f8e4m3
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    static constexpr int kParts = 4;
    static constexpr int kWarpTokens = kTileTokens / kParts;
    static_assert(kWarpTokens == 16, "reduce_16 and the two lanes per token");
    static constexpr int kThreads = 32 * kParts;
    static constexpr int kHeadRegisters = (kHeadDim + 31) / 32;
    static constexpr int kValueRegisters = (kValueDim + 31) / 32;
    // Thread t merges the parts of columns t, t + 128, ...
    static constexpr int kMergedColumns = (kValueDim + kThreads - 1) / kThreads;

    // Whether column lane + 32 i is one of kDim.
    template <int kDim>
    __device__ __forceinline__ static bool in_row(int i, int lane) {
        return (i + 1) * 32 <= kDim || lane + 32 * i < kDim;
    }
};

template <class Tr>
struct SimtShared {
    int64_t key_offset[Tr::kParts][Tr::kWarpTokens];  // -1: no such place
    int64_t value_offset[Tr::kParts][Tr::kWarpTokens];
    float p[Tr::kParts][Tr::kWarpTokens];
    SoftmaxSum sums[Tr::kParts];
    float o[Tr::kParts][Tr::kValueDim];
};

// Sums 16 values over a warp; lanes 2 t and 2 t + 1 end with the sum of value t.
__device__ __forceinline__ float reduce_16(float (&value)[16], int lane) {
#pragma unroll
    for (int half = 8; half >= 1; half /= 2) {
        const bool upper = (lane & (2 * half)) != 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i >= half) continue;
            const float kept = upper ? value[i + half] : value[i];
            const float sent = upper ? value[i] : value[i + half];
            value[i] = kept + __shfl_xor_sync(kFullMask, sent, 2 * half);
        }
    }
    return value[0] + __shfl_xor_sync(kFullMask, value[0], 1);
}

// Request of a row and its number there, or b = -1.
struct RowOwner {
    int b;
    int j;
};

__device__ __forceinline__ RowOwner find_row(const VerifyAttentionParams& p, int row) {
    int low = 0, high = static_cast<int>(p.batch);  // first request that begins after the row
    while (low < high) {
        const int middle = (low + high) / 2;
        if (request_begin(p, middle) <= row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == 0) return RowOwner{-1, 0};
    const Request request = read_request(p, low - 1);
    const int j = row - request.first_row;
    return j < request.rows ? RowOwner{low - 1, j} : RowOwner{-1, 0};
}

// --- Steps of one warp -------------------------------------------------------------------------------

// Offsets of the tile's 16 tokens of this warp in both caches, -1 of those that the row does not see.
// False: it sees none of them.
template <class Tr>
__device__ __forceinline__ bool locate_tokens(const VerifyAttentionParams& p, int b,
                                              const Request& request, int j, int first_token,
                                              int part, int lane, SimtShared<Tr>& shared) {
    const int token = first_token + lane;
    bool exists = lane < Tr::kWarpTokens && sees(p, request, j, token);
    if (exists) {
        const int page_size = static_cast<int>(p.k_cache.size[1]);
        const int entry = token / page_size, place = token - entry * page_size;
        const int page = p.block_table.at(b)[entry * p.block_table.stride[1]];
        exists = page >= 0 && page < p.k_cache.size[0];
        shared.key_offset[part][lane] =
            exists ? page * p.k_cache.stride[0] + place * p.k_cache.stride[1] : -1;
        shared.value_offset[part][lane] =
            exists ? page * p.v_cache.stride[0] + place * p.v_cache.stride[1] : -1;
    } else if (lane < Tr::kWarpTokens) {
        shared.key_offset[part][lane] = -1;
        shared.value_offset[part][lane] = -1;
    }
    const bool any = __any_sync(kFullMask, exists) != 0;
    __syncwarp();
    return any;
}

// The scaled score of token lane / 2; -inf where there is none.
template <class Tr>
__device__ __forceinline__ float score_tokens(const float (&q)[Tr::kHeadRegisters],
                                              const typename Tr::C* keys, LogitScale scale,
                                              int part, int lane, const SimtShared<Tr>& shared) {
    float dot[Tr::kWarpTokens];
#pragma unroll
    for (int t = 0; t < Tr::kWarpTokens; ++t) {
        const int64_t offset = shared.key_offset[part][t];
        dot[t] = 0.0f;
        if (offset < 0) continue;
#pragma unroll
        for (int i = 0; i < Tr::kHeadRegisters; ++i) {
            if (!Tr::template in_row<Tr::kHeadDim>(i, lane)) continue;
            dot[t] = fmaf(q[i], to_float(keys[offset + lane + 32 * i]), dot[t]);
        }
    }
    float score = reduce_16(dot, lane) * scale.factor;
    if (scale.cap != 0.0f) score = scale.cap * tanhf(score);
    return shared.key_offset[part][lane / 2] < 0 ? minus_infinity() : score;
}

template <class Tr>
__device__ __forceinline__ void weigh_tokens(float (&o)[Tr::kValueRegisters],
                                             const typename Tr::C* values, float scale, int part,
                                             int lane, const SimtShared<Tr>& shared) {
#pragma unroll
    for (int i = 0; i < Tr::kValueRegisters; ++i) o[i] *= scale;
#pragma unroll
    for (int t = 0; t < Tr::kWarpTokens; ++t) {
        const int64_t offset = shared.value_offset[part][t];
        if (offset < 0) continue;
#pragma unroll
        for (int i = 0; i < Tr::kValueRegisters; ++i) {
            if (!Tr::template in_row<Tr::kValueDim>(i, lane)) continue;
            o[i] = fmaf(shared.p[part][t], to_float(values[offset + lane + 32 * i]), o[i]);
        }
    }
}

// One segment over this warp's tokens, published for the merge.
template <class Tr>
__device__ __forceinline__ void sum_segment(const VerifyAttentionParams& p, const RowOwner& owner,
                                            const Request& request, int head, int segment,
                                            int limit, LogitScale scale,
                                            const float (&q)[Tr::kHeadRegisters], int part,
                                            int lane, SimtShared<Tr>& shared) {
    using C = typename Tr::C;
    const C* keys = static_cast<const C*>(p.k_cache.data) + head * p.k_cache.stride[2];
    const C* values = static_cast<const C*>(p.v_cache.data) + head * p.v_cache.stride[2];
    SoftmaxSum sum = empty_sum();
    float o[Tr::kValueRegisters] = {};
    const int end = min((segment + 1) * kSegmentTokens, limit);
    for (int tile = segment * kSegmentTokens; tile < end; tile += kTileTokens) {
        const int first_token = tile + part * Tr::kWarpTokens;
        if (!locate_tokens<Tr>(p, owner.b, request, owner.j, first_token, part, lane, shared)) {
            continue;
        }
        const float score = score_tokens<Tr>(q, keys, scale, part, lane, shared);
        const float m = fmaxf(sum.m, warp_max(score));
        const float base = exponent_base(m);
        const float old_scale = ptx::ex2(sum.m - base), weight = ptx::ex2(score - base);
        sum.l = fmaf(sum.l, old_scale, weight);  // of this lane's tokens
        sum.m = m;
        if (lane % 2 == 0) shared.p[part][lane / 2] = weight;
        __syncwarp();
        weigh_tokens<Tr>(o, values, old_scale, part, lane, shared);
        __syncwarp();
    }
#pragma unroll
    for (int mask = 2; mask < 32; mask *= 2) sum.l += __shfl_xor_sync(kFullMask, sum.l, mask);
    if (lane == 0) shared.sums[part] = sum;
#pragma unroll
    for (int i = 0; i < Tr::kValueRegisters; ++i) {
        if (Tr::template in_row<Tr::kValueDim>(i, lane)) shared.o[part][lane + 32 * i] = o[i];
    }
}

// --- Kernel ------------------------------------------------------------------------------------------

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 4)
    verify_attention_simt_kernel(const __grid_constant__ VerifyAttentionParams p,
                                 LogitScale scale) {
    CU_SHARED(shared, SimtShared<Tr>);
    const int thread = static_cast<int>(threadIdx.x), part = thread / 32, lane = thread % 32;
    const int num_heads = static_cast<int>(p.q.size[1]);
    const int row = static_cast<int>(blockIdx.x) / num_heads;
    const int head = static_cast<int>(blockIdx.x) - row * num_heads;

    const RowOwner owner = find_row(p, row);
    Request request{};
    int begin = 0, limit = 0;
    if (owner.b >= 0) {
        request = read_request(p, owner.b);
        begin = static_cast<int>(prefix_window(p, pass_rows(request), owner.j).begin);
        limit = visible_places(p, request, owner.j);
    }
    float q[Tr::kHeadRegisters];
#pragma unroll
    for (int i = 0; i < Tr::kHeadRegisters; ++i) {
        const bool exists = limit > 0 && Tr::template in_row<Tr::kHeadDim>(i, lane);
        q[i] = exists ? p.q.as<const float>().at(row, head)[lane + 32 * i] : 0.0f;
    }

    const int kv_head = head / group_size(p);
    scale.factor *= p.k_scale[kv_head];
    SoftmaxSum total = empty_sum();
    float o[Tr::kMergedColumns] = {};
    for (int segment = begin / kSegmentTokens; segment * kSegmentTokens < limit; ++segment) {
        sum_segment<Tr>(p, owner, request, kv_head, segment, limit, scale, q, part, lane, shared);
        __syncthreads();
        SoftmaxSum parts[Tr::kParts];
        float weight[Tr::kParts];
#pragma unroll
        for (int i = 0; i < Tr::kParts; ++i) parts[i] = shared.sums[i];
        const FoldWeights fold = fold_sum(total, merge_parts(parts, weight));
#pragma unroll
        for (int c = 0; c < Tr::kMergedColumns; ++c) {
            const int column = c * Tr::kThreads + thread;
            if (column >= Tr::kValueDim) break;
            float merged = 0.0f;
#pragma unroll
            for (int i = 0; i < Tr::kParts; ++i) {
                merged = fmaf(shared.o[i][column], weight[i], merged);
            }
            o[c] = fold_value(o[c], merged, fold);
        }
        __syncthreads();
    }

    const int64_t index = static_cast<int64_t>(row) * num_heads + head;
    const float keep = add_sink(p, head, total) * p.v_scale[kv_head];
#pragma unroll
    for (int c = 0; c < Tr::kMergedColumns; ++c) {
        const int column = c * Tr::kThreads + thread;
        if (column >= Tr::kValueDim) break;
        // Zeros are positive, as in the tensor-core kernel.
        static_cast<float*>(p.out.data)[index * Tr::kValueDim + column] =
            total.l == 0.0f ? 0.0f : o[c] * keep / total.l + 0.0f;
    }
    if (thread == 0) p.lse[index] = log_sum_exp(total);
}

}  // namespace specdec::cuda
