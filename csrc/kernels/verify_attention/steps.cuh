// The tensor-core kernel of verify_attention: the steps of one warp in one tile. kernel.cuh puts them in
// order.
#pragma once

#include "layout.cuh"

namespace specdec::cuda {

// --- Load: the stream of this part's K and V rows through the ring -----------------------------------

template <class Tr>
struct KvStream {
    using C = typename Tr::C;
    // Of this lane's token in the tile after the one being copied, read ahead of its use.
    int page = -1, place = 0;
    // Of its row in the tile being copied: of K in lanes 0..15, of V in lanes 16..31; -1: zeros.
    int64_t offset = -1;
    // Which tokens exist: 16 bits for each tile in the ring, the oldest lowest.
    typename Tr::RingBits valid = 0;

    // Reads the page of this lane's token, one tile before it is needed.
    __device__ __forceinline__ void look_up(const VerifyAttentionParams& p, const Task& task,
                                            int tile, const Lane<Tr>& at) {
        const int page_size = static_cast<int>(p.k_cache.size[1]);
        const int token = tile * kTileTokens + at.part * Tr::kWarpTokens + at.lane % 16;
        const int entry = token / page_size;
        place = token - entry * page_size;
        const bool seen = token >= task.begin && token < task.limit;
        page = seen ? p.block_table.at(task.item.b)[entry * p.block_table.stride[1]] : -1;
    }

    // Turns the page into this lane's offset and notes which tokens of the tile exist.
    __device__ __forceinline__ void next_tile(const VerifyAttentionParams& p, const Lane<Tr>& at) {
        const bool exists = page >= 0 && page < p.k_cache.size[0];
        const int64_t(&stride)[4] = at.lane < 16 ? p.k_cache.stride : p.v_cache.stride;
        offset = exists ? page * stride[0] + place * stride[1] : -1;
        const typename Tr::RingBits mask = __ballot_sync(kFullMask, exists) & 0xffffu;
        valid = valid >> 16 | mask << (16 * (Tr::kStages - 1));
    }

    // Copies one side of the tile: 8 lanes take 128 bytes of a row, a warp 4 rows at once; of rows of
    // 64 bytes 4 lanes and 8 rows.
    template <int kDim>
    __device__ __forceinline__ void copy(C* slot, const View<const void, 4>& cache,
                                         const Task& task, bool aligned, int source_lane,
                                         const Lane<Tr>& at) {
        constexpr int kChunks = kDim / Tr::kChunk, kLanes = kChunks <= 4 ? 4 : 8;
        constexpr int kRowsAtOnce = 32 / kLanes;
        const C* base = static_cast<const C*>(cache.data) + task.item.head * cache.stride[2];
#pragma unroll
        for (int i = 0; i < Tr::kWarpTokens / kRowsAtOnce / Tr::kRowWarps; ++i) {
            const int token = (i * Tr::kRowWarps + at.row_warp) * kRowsAtOnce + at.lane / kLanes;
            const int64_t row = __shfl_sync(kFullMask, offset, source_lane + token);
            const C* source = row < 0 ? base : base + row;
#pragma unroll
            for (int chunk = 0; chunk < kChunks; chunk += kLanes) {
                const int c = chunk + at.lane % kLanes;
                if (chunk + kLanes > kChunks && c >= kChunks) continue;
                copy_chunk(slot + swizzled<C, kDim>(token, c), source + c * Tr::kChunk, row >= 0,
                           aligned);
            }
        }
    }
    // One group each, empty where there is nothing to copy: waits count groups.
    __device__ __forceinline__ void copy_keys(C* slot, int tile, const AttendArgs& args,
                                              const Task& task, const Lane<Tr>& at) {
        if (tile < task.end_tile) {
            copy<Tr::kHeadDim>(slot, args.p.k_cache, task, args.aligned, 0, at);
        }
        ptx::cp_async_commit();
    }
    __device__ __forceinline__ void copy_values(C* slot, int tile, const AttendArgs& args,
                                                const Task& task, const Lane<Tr>& at) {
        if (tile < task.end_tile) {
            copy<Tr::kValueDim>(slot, args.p.v_cache, task, args.aligned, 16, at);
        }
        ptx::cp_async_commit();
    }
};

// --- Query -------------------------------------------------------------------------------------------

// Eight elements of a row, as pairs.
template <class T>
__device__ __forceinline__ uint4 read_pairs(const T* source, bool aligned) {
    if (aligned) return *reinterpret_cast<const uint4*>(source);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = source[2 * i].bits | static_cast<uint32_t>(source[2 * i + 1].bits) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Packed row i of a (request, KV head) is query head i % group of row i / group.
template <class Tr>
__device__ __forceinline__ void load_query(const AttendArgs& args, const Item& item,
                                           typename Tr::T* query) {
    using T = typename Tr::T;
    const View<const T, 3> q = args.p.q.as<const T>();
    const int group = group_size(args.p), num_packed = packed_rows(args.p, item);
    constexpr int kChunks = Tr::kHeadDim / 8;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < Tr::kRows * kChunks; i += Tr::kThreads) {
        const int row = i / kChunks, chunk = i % kChunks;
        const int packed = item.row_block * Tr::kRows + row;
        const bool exists = packed < num_packed;
        const int j = exists ? packed / group : 0;
        const T* source = q.at(item.request.first_row + j, item.head * group + packed - j * group);
        if constexpr (Tr::kFp8) {
            const ChannelHalves halves = interleave_channels(
                exists ? read_pairs(source + chunk * 8, args.aligned) : make_uint4(0, 0, 0, 0));
            // Eight threads write into the left one of two chunks that lie side by side while the next
            // eight write into the right one: different places of 128 bytes.
            T* left = query + swizzled<T, Tr::kHeadDim>(row, chunk / 2 * 2) + chunk % 2 * 4;
            T* right = query + swizzled<T, Tr::kHeadDim>(row, chunk / 2 * 2 + 1) + chunk % 2 * 4;
            const bool right_first = (right < left) != (static_cast<int>(threadIdx.x) / 8 % 2 != 0);
            *reinterpret_cast<uint2*>(right_first ? right : left) =
                right_first ? halves.right : halves.left;
            *reinterpret_cast<uint2*>(right_first ? left : right) =
                right_first ? halves.left : halves.right;
            continue;
        }
        copy_chunk(query + swizzled<T, Tr::kHeadDim>(row, chunk),
                   exists ? source + chunk * 8 : q.data, exists, args.aligned);
    }
    ptx::cp_async_commit();
}

template <class Tr>
struct QueryFragments {
    static constexpr int kSteps = Tr::kHeadDim / 16;
    uint32_t held[Tr::kQueryInRegisters ? kSteps : 1][Tr::kRowBlocks][4];

    __device__ __forceinline__ void hold(const typename Tr::T* query, const Lane<Tr>& at) {
        if constexpr (Tr::kQueryInRegisters) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) read(held[step], query, step, at);
        }
    }
    __device__ __forceinline__ void get(uint32_t (&a)[Tr::kRowBlocks][4],
                                        const typename Tr::T* query, int step,
                                        const Lane<Tr>& at) const {
        if constexpr (Tr::kQueryInRegisters) {
#pragma unroll
            for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[r][i] = held[step][r][i];
            }
        } else {
            read(a, query, step, at);
        }
    }

  private:
    __device__ __forceinline__ static void read(uint32_t (&a)[Tr::kRowBlocks][4],
                                                const typename Tr::T* query, int step,
                                                const Lane<Tr>& at) {
#pragma unroll
        for (int r = 0; r < Tr::kRowBlocks; ++r) {
            const int row = at.first_row + r * 16 + at.down_row;
            ptx::ldmatrix_x4(a[r], query + swizzled<typename Tr::T, Tr::kHeadDim>(
                                               row, step * 2 + at.down_chunk));
        }
    }
};

// --- Steps of a tile: a thread owns rows lane/4 and lane/4 + 8 of each block, columns 2 (lane%4) + {0,1}
//     of every 8; of outputs with fp8 caches, columns 4 (lane%4) + {0,2} and + {1,3} of every 16 -----

template <class Tr>
using Scores = float[Tr::kRowBlocks][2][4];  // [block of 16 rows, block of 8 tokens, fragment]

template <class Tr>
struct Sums {  // of one segment, over this warp's tokens
    float o[Tr::kRowBlocks][Tr::kValueDim / 8][4];
    float m[Tr::kRowBlocks][2];
    float l[Tr::kRowBlocks][2];  // over this thread's columns

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
            for (int n = 0; n < Tr::kValueDim / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) o[r][n][i] = 0.0f;
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                m[r][h] = minus_infinity();
                l[r][h] = 0.0f;
            }
        }
    }
};

template <class Tr>
__device__ __forceinline__ void score_tile(Scores<Tr>& s, const QueryFragments<Tr>& fragments,
                                           const typename Tr::T* query, const typename Tr::C* keys,
                                           const Lane<Tr>& at) {
    using T = typename Tr::T;
#pragma unroll
    for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[r][i / 4][i % 4] = 0.0f;
    }
    constexpr int kSteps = Tr::kHeadDim / 16;
    const auto multiply = [&](int step, const uint32_t(&low)[2], const uint32_t(&high)[2]) {
        uint32_t a[Tr::kRowBlocks][4];
        fragments.get(a, query, step, at);
#pragma unroll
        for (int r = 0; r < Tr::kRowBlocks; ++r) {
            ptx::mma_m16n8k16<T>(s[r][0], a[r], low, s[r][0]);
            ptx::mma_m16n8k16<T>(s[r][1], a[r], high, s[r][1]);
        }
    };
    uint32_t b[4];  // tokens 0..7, then 8..15, at two chunks each
    if constexpr (Tr::kFp8) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {  // a chunk is a step
            if (step % 2 == 0) {
                const int chunk = min(step + at.right_chunk, kSteps - 1);
                ptx::ldmatrix_x4(
                    b, keys + swizzled<typename Tr::C, Tr::kHeadDim>(at.right_row, chunk));
            }
            const uint32_t left = b[step % 2], right = b[2 + step % 2];
            multiply(step, {widen_even<T>(left), widen_odd<T>(left)},
                     {widen_even<T>(right), widen_odd<T>(right)});
        }
    } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            ptx::ldmatrix_x4(
                b, keys + swizzled<T, Tr::kHeadDim>(at.right_row, step * 2 + at.right_chunk));
            multiply(step, {b[0], b[1]}, {b[2], b[3]});
        }
    }
}

// Hides the holes of trees and windows. The test is there once, and its results are gathered as bits:
// unrolled, it would take the registers of the sums.
template <class Tr>
__device__ __forceinline__ void hide_holes(Scores<Tr>& s, const VerifyAttentionParams& p,
                                           const Item& item, int first_token, const Lane<Tr>& at) {
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < Tr::kRowBlocks * 8; ++i) {
        const int row = at.first_row + i / 8 * 16 + i / 2 % 2 * 8 + at.lane / 4;
        const int token = i / 4 % 2 * 8 + at.lane % 4 * 2 + i % 2;
        if (sees(p, item.request, row_number<Tr>(p, item, row), first_token + token)) {
            seen |= 1u << i;
        }
    }
#pragma unroll
    for (int i = 0; i < Tr::kRowBlocks * 8; ++i) {
        if ((seen >> i & 1u) == 0) s[i / 8][i / 4 % 2][i % 4] = minus_infinity();
    }
}

// Scales, caps, and hides what a row does not see: -inf, whatever the score was.
template <class Tr>
__device__ __forceinline__ void mask_tile(Scores<Tr>& s, const AttendArgs& args, const Task& task,
                                          uint32_t valid, int first_token, const Lane<Tr>& at) {
#pragma unroll
    for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[r][i / 4][i % 4] *= task.factor;
    }
    if (args.scale.cap != 0.0f) {
#pragma unroll
        for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                s[r][i / 4][i % 4] = args.scale.cap * tanhf(s[r][i / 4][i % 4]);
            }
        }
    }
    if (seen_by_all<Tr>(task, valid, first_token)) return;
    int limit[Tr::kRowBlocks][2];
#pragma unroll
    for (int i = 0; i < Tr::kRowBlocks * 2; ++i) {
        limit[i / 2][i % 2] = row_limit<Tr>(args.p, task.item, at.first_row + i * 8 + at.lane / 4);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int token = i / 4 * 8 + at.lane % 4 * 2 + i % 2;
        const bool exists = (valid >> token & 1u) != 0;
#pragma unroll
        for (int r = 0; r < Tr::kRowBlocks; ++r) {
            if (!exists || first_token + token >= limit[r][i / 2 % 2]) {
                s[r][i / 4][i % 4] = minus_infinity();
            }
        }
    }
    if (has_holes(args.p)) hide_holes<Tr>(s, args.p, task.item, first_token, at);
}

// Online softmax: scores become probabilities relative to the new maximum, older sums are scaled to it.
template <class Tr>
__device__ __forceinline__ void softmax_tile(Scores<Tr>& s, Sums<Tr>& sums) {
    float scale[Tr::kRowBlocks][2];
    bool grew = false;
#pragma unroll
    for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float(&a)[4] = s[r][0], (&b)[4] = s[r][1];
            float m = fmaxf(fmaxf(a[2 * h], a[2 * h + 1]), fmaxf(b[2 * h], b[2 * h + 1]));
            m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 1));
            m = fmaxf(m, __shfl_xor_sync(kFullMask, m, 2));
            m = fmaxf(m, sums.m[r][h]);
            const float base = exponent_base(m);
            scale[r][h] = ptx::ex2(sums.m[r][h] - base);
            grew = grew || m != sums.m[r][h];
            a[2 * h] = ptx::ex2(a[2 * h] - base);
            a[2 * h + 1] = ptx::ex2(a[2 * h + 1] - base);
            b[2 * h] = ptx::ex2(b[2 * h] - base);
            b[2 * h + 1] = ptx::ex2(b[2 * h + 1] - base);
            const float own = (a[2 * h] + a[2 * h + 1]) + (b[2 * h] + b[2 * h + 1]);
            sums.l[r][h] = fmaf(sums.l[r][h], scale[r][h], own);
            sums.m[r][h] = m;
        }
    }
    if (!__any_sync(kFullMask, grew)) return;  // every scale is 1 or every sum is 0
#pragma unroll
    for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
        for (int n = 0; n < Tr::kValueDim / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums.o[r][n][i] *= scale[r][i / 2];
        }
    }
}

}  // namespace specdec::cuda
