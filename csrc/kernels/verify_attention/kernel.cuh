// The tensor-core kernel of verify_attention: merging the warps' sums of a segment, folding segments,
// and the schedule of a block. The steps inside a tile are in steps.cuh and
// values.cuh.
#pragma once

#include "values.cuh"

namespace specdec::cuda {

// --- Segment end: from the warps' sums to one result with its own owners -----------------------------

// A thread's share of the result so far: four columns of every slice, in one row.
template <class Tr>
struct Owned {
    SoftmaxSum sum;
    float o[Tr::kSlices][4];

    __device__ __forceinline__ void clear() {
        sum = empty_sum();
#pragma unroll
        for (int i = 0; i < Tr::kSlices * 4; ++i) o[i / 4][i % 4] = 0.0f;
    }
    __device__ __forceinline__ static int row() {
        return static_cast<int>(ptx::thread_x()) / Tr::kSliceQuads;
    }
    __device__ __forceinline__ static int column() {  // within a slice
        return static_cast<int>(ptx::thread_x()) % Tr::kSliceQuads * 4;
    }
    // Whether there is such a column in the slice: the last one may be cut short.
    __device__ __forceinline__ static bool in_slice(int slice) {
        return (slice + 1) * Tr::kSliceColumns <= Tr::kValueDim ||
               slice * Tr::kSliceColumns + column() < Tr::kValueDim;
    }
};

// What the parts of a row are multiplied by in the merge, and the two sides of the fold after it.
template <class Tr>
struct MergeWeights {
    float part[Tr::kParts];
    FoldWeights fold;
};

// Merges (m, l) of the parts, and folds it or writes it as a partial. Borrows the exchange buffer.
template <class Tr>
__device__ __forceinline__ void merge_sums(const Sums<Tr>& sums, Owned<Tr>& owned,
                                           SoftmaxSum* partial, float* exchange, const Lane<Tr>& at,
                                           MergeWeights<Tr>& weights) {
    static_assert(sizeof(SoftmaxSum) <= Tr::kSliceColumns * sizeof(float),
                  "fits into the exchange");
    SoftmaxSum* shared = reinterpret_cast<SoftmaxSum*>(exchange);  // [part, row]
#pragma unroll
    for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float l = sums.l[r][h];
            l += __shfl_xor_sync(kFullMask, l, 1);
            l += __shfl_xor_sync(kFullMask, l, 2);
            const int row = at.first_row + r * 16 + h * 8 + at.lane / 4;
            if (at.lane % 4 == 0) shared[at.part * Tr::kRows + row] = SoftmaxSum{sums.m[r][h], l};
        }
    }
    __syncthreads();
    const int row = owned.row();
    SoftmaxSum part[Tr::kParts];
#pragma unroll
    for (int i = 0; i < Tr::kParts; ++i) part[i] = shared[i * Tr::kRows + row];
    const SoftmaxSum segment = merge_parts(part, weights.part);
    if (partial == nullptr) {
        weights.fold = fold_sum(owned.sum, segment);
    } else if (owned.column() == 0) {
        partial[row] = segment;
    }
    __syncthreads();
}

template <class Tr>
__device__ __forceinline__ void publish_slice(const Sums<Tr>& sums, int slice, float* exchange,
                                              const Lane<Tr>& at) {
    float* part = exchange + at.part * Tr::kRows * Tr::kSliceColumns;
#pragma unroll
    for (int r = 0; r < Tr::kRowBlocks; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = at.first_row + r * 16 + h * 8 + at.lane / 4;
#pragma unroll
            for (int n = 0; n < Tr::kSliceColumns / 8; ++n) {
                if (slice * Tr::kSliceColumns + n * 8 >= Tr::kValueDim) break;
                const float* o = sums.o[r][slice * (Tr::kSliceColumns / 8) + n];
                if constexpr (!Tr::kFp8) {
                    *reinterpret_cast<float2*>(part +
                                               exchange_index<Tr>(row, n * 8 + at.lane % 4 * 2)) =
                        make_float2(o[2 * h], o[2 * h + 1]);
                } else if (n % 2 == 0) {
                    const float* odd = sums.o[r][slice * (Tr::kSliceColumns / 8) + n + 1];
                    *reinterpret_cast<float4*>(part +
                                               exchange_index<Tr>(row, n * 8 + at.lane % 4 * 4)) =
                        make_float4(o[2 * h], odd[2 * h], o[2 * h + 1], odd[2 * h + 1]);
                }
            }
        }
    }
}

// The parts of one quad, in the order of the warps.
template <class Tr>
__device__ __forceinline__ float4 gather_quad(const float* exchange, int row, int column,
                                              const float (&weight)[Tr::kParts]) {
    float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < Tr::kParts; ++part) {
        const float4 x = *reinterpret_cast<const float4*>(
            exchange + part * Tr::kRows * Tr::kSliceColumns + exchange_index<Tr>(row, column));
        quad.x = fmaf(x.x, weight[part], quad.x);
        quad.y = fmaf(x.y, weight[part], quad.y);
        quad.z = fmaf(x.z, weight[part], quad.z);
        quad.w = fmaf(x.w, weight[part], quad.w);
    }
    return quad;
}

// Folds the segment into `owned`, or writes it as a partial to `slot` where that is not negative.
template <class Tr>
__device__ __forceinline__ void merge_segment(const Sums<Tr>& sums, Owned<Tr>& owned,
                                              const PartialStore& partials, int64_t slot,
                                              float* exchange) {
    const Lane<Tr> at;
    const bool fold = slot < 0;
    MergeWeights<Tr> weights{};
    merge_sums(sums, owned, fold ? nullptr : partials.sums + slot * Tr::kRows, exchange, at,
               weights);
    const int row = owned.row(), column = owned.column();
#pragma unroll
    for (int slice = 0; slice < Tr::kSlices; ++slice) {
        publish_slice(sums, slice, exchange, at);
        __syncthreads();
        const float4 quad = owned.in_slice(slice)
                                ? gather_quad<Tr>(exchange, row, column, weights.part)
                                : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (fold) {
            float(&o)[4] = owned.o[slice];
            o[0] = fold_value(o[0], quad.x, weights.fold);
            o[1] = fold_value(o[1], quad.y, weights.fold);
            o[2] = fold_value(o[2], quad.z, weights.fold);
            o[3] = fold_value(o[3], quad.w, weights.fold);
        } else if (owned.in_slice(slice)) {
            float* target = partials.values + (slot * Tr::kRows + row) * Tr::kValueDim;
            *reinterpret_cast<float4*>(target + slice * Tr::kSliceColumns + column) = quad;
        }
        __syncthreads();
    }
}

// --- Epilogue ----------------------------------------------------------------------------------------

// Four columns of a row of `out`, times `keep` (see add_sink). Adding +0 makes zeros positive: the sign of an empty sum would
// otherwise tell how many fully masked tiles went by.
template <class T>
__device__ __forceinline__ void write_quad(T* target, float a, float b, float c, float d,
                                           float keep, SoftmaxSum sum) {
    const float inverse = sum.l == 0.0f ? 0.0f : keep / sum.l;
    *reinterpret_cast<uint2*>(target) = make_uint2(pack<T>(a * inverse + 0.0f, b * inverse + 0.0f),
                                                   pack<T>(c * inverse + 0.0f, d * inverse + 0.0f));
}

// Where the result of a packed row of an item goes: row * Hq + head, or -1 for padding.
__device__ __forceinline__ int64_t result_index(const VerifyAttentionParams& p, const Item& item,
                                                int packed) {
    const int group = group_size(p);
    const int j = packed / group;
    if (j >= item.request.rows) return -1;
    return (item.request.first_row + static_cast<int64_t>(j)) * p.q.size[1] + item.head * group +
           packed - j * group;
}

template <class Tr>
__device__ __forceinline__ void write_result(const VerifyAttentionParams& p, const Item& item,
                                             const Owned<Tr>& owned) {
    using T = typename Tr::T;
    const int64_t index = result_index(p, item, item.row_block * Tr::kRows + owned.row());
    if (index < 0) return;
    SoftmaxSum sum = owned.sum;
    const float keep =
        add_sink(p, static_cast<int>(index % p.q.size[1]), sum) * p.v_scale[item.head];
    T* target = static_cast<T*>(p.out.data) + index * Tr::kValueDim + owned.column();
#pragma unroll
    for (int slice = 0; slice < Tr::kSlices; ++slice) {
        const float* o = owned.o[slice];
        if (!owned.in_slice(slice)) continue;
        write_quad(target + slice * Tr::kSliceColumns, o[0], o[1], o[2], o[3], keep, sum);
    }
    if (owned.column() == 0) p.lse[index] = log_sum_exp(sum);
}

template <class Tr>
__device__ __forceinline__ void write_fold(const PartialStore& partials, int64_t slot,
                                           const Owned<Tr>& owned) {
    const int64_t row = slot * Tr::kRows + owned.row();
    float* target = partials.values + row * Tr::kValueDim + owned.column();
#pragma unroll
    for (int slice = 0; slice < Tr::kSlices; ++slice) {
        const float* o = owned.o[slice];
        if (!owned.in_slice(slice)) continue;
        *reinterpret_cast<float4*>(target + slice * Tr::kSliceColumns) =
            make_float4(o[0], o[1], o[2], o[3]);
    }
    if (owned.column() == 0) partials.sums[row] = owned.sum;
}

// --- Schedule ----------------------------------------------------------------------------------------

// Makes item `index` and its successors in the same sequence the block's work. One thread calls.
template <class Tr>
__device__ __forceinline__ void set_task(const AttendArgs& args, const Item& item, int64_t index,
                                         int64_t range_begin, int64_t range_end, Task& task) {
    constexpr int kTilesPerSegment = kSegmentTokens / kTileTokens;
    const int64_t item_end = item.first + item.num_segments;
    task.item = item;
    task.range_begin = range_begin;
    task.range_end = range_end;
    task.stop = item_end < range_end ? item_end : range_end;
    task.partial_slot =
        index == item.first
            ? -1
            : args.partials.segment_slot(static_cast<int>(blockIdx.x), index - range_begin);
    task.first = static_cast<int>(index - item.first);
    task.last = static_cast<int>(task.stop - item.first);
    task.factor = args.scale.factor * args.p.k_scale[item.head];
    find_reach<Tr>(args.p, task);
    const int tiles = task.limit < 1 ? 0 : (task.limit - 1) / kTileTokens + 1;
    task.end_tile = min(task.last * kTilesPerSegment, tiles);
}

// All segments of the task: into `owned`, or into partials.
template <class Tr>
__device__ __forceinline__ void attend_rows(const AttendArgs& args, const Task& task,
                                            Owned<Tr>& owned, const SharedArrays<Tr>& shared) {
    constexpr int kStages = Tr::kStages, kTilesPerSegment = kSegmentTokens / kTileTokens;
    constexpr int kPending = 2 * kStages - 2;  // groups that may be in flight behind the one needed
    const VerifyAttentionParams& p = args.p;
    // Segments that no row sees stay empty.
    int tile = max(task.first, task.begin / kSegmentTokens) * kTilesPerSegment;

    // Fill the ring: all stages of K, all but one of V.
    KvStream<Tr> stream;
    QueryFragments<Tr> fragments;
    {
        const Lane<Tr> at;
        load_query<Tr>(args, task.item, shared.query);
        stream.look_up(p, task, tile, at);
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            stream.next_tile(p, at);
            stream.look_up(p, task, tile + i + 1, at);
            stream.copy_keys(shared.key_slot(i, at), tile + i, args, task, at);
            if (i == kStages - 1) break;
            stream.copy_values(shared.value_slot(i, at), tile + i, args, task, at);
        }
        ptx::cp_async_wait<kPending + 1>();
        __syncthreads();
        fragments.hold(shared.query, at);
    }

    for (int segment = task.first; segment < task.last; ++segment) {
        Sums<Tr> sums;
        sums.clear();
        for (; tile < min((segment + 1) * kTilesPerSegment, task.end_tile); ++tile) {
            const Lane<Tr> at;
            const int stage = tile % kStages;  // 0 for the first tile of any segment
            // K of this tile has arrived, and nobody needs V of the previous tile any more.
            ptx::cp_async_wait<kPending>();
            at.sync_part();
            stream.copy_values(shared.value_slot((stage + kStages - 1) % kStages, at),
                               tile + kStages - 1, args, task, at);

            // Tokens that no row sees change nothing: skipping them only saves time.
            const uint32_t valid = static_cast<uint32_t>(stream.valid) & 0xffffu;
            const int first_packed = task.item.row_block * Tr::kRows + at.first_row;
            const bool busy = valid != 0 && first_packed < packed_rows(p, task.item);
            Scores<Tr> s;
            if (busy) {
                const int first_token = tile * kTileTokens + at.part * Tr::kWarpTokens;
                score_tile<Tr>(s, fragments, shared.query, shared.key_slot(stage, at), at);
                mask_tile<Tr>(s, args, task, valid, first_token, at);
                softmax_tile<Tr>(s, sums);
            }

            // V of this tile has arrived, and nobody needs its K any more.
            ptx::cp_async_wait<kPending>();
            const Lane<Tr> later;
            later.sync_part();
            stream.next_tile(p, later);
            stream.look_up(p, task, tile + kStages + 1, later);
            stream.copy_keys(shared.key_slot(stage, later), tile + kStages, args, task, later);
            if (busy) {
                const typename Tr::C* values = shared.value_slot(stage, later);
                const int first_token = tile * kTileTokens + later.part * Tr::kWarpTokens;
                const bool finite_only =
                    add_not_finite<Tr>(sums, values, args, task, valid, first_token, later);
                weigh_tile<Tr>(s, sums, values, finite_only, later);
            }
        }
        merge_segment<Tr>(sums, owned, args.partials,
                          task.partial_slot < 0 ? -1 : task.partial_slot + segment - task.first,
                          shared.exchange);
    }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kBlocksPerSm)
    verify_attention_kernel(const __grid_constant__ AttendArgs args) {
    CU_SHARED(scratch, ScheduleScratch<Tr::kThreads>);
    CU_SHARED(task, Task);
    CU_DYN_SHARED(memory);
    const VerifyAttentionParams& p = args.p;
    const SharedArrays<Tr> shared(memory);
    const int block = static_cast<int>(blockIdx.x), grid = static_cast<int>(gridDim.x);

    zero_uncovered_rows<typename Tr::T>(p);
    const ItemList<Tr::kThreads> list(p, Tr::kRows, scratch);
    const int64_t begin = range_begin(list.total, block, grid);
    const int64_t end = range_begin(list.total, block + 1, grid);
    if (begin == end) return;

    const Item first = list.find(p, begin, Tr::kRows, scratch);
    if (threadIdx.x == 0) set_task<Tr>(args, first, begin, begin, end, task);
    for (;;) {
        __syncthreads();
        Owned<Tr> owned;
        owned.clear();
        attend_rows<Tr>(args, task, owned, shared);
        if (task.partial_slot < 0) {
            if (task.last == task.item.num_segments) {
                write_result<Tr>(p, task.item, owned);
            } else {
                write_fold<Tr>(args.partials, args.partials.fold_slot(static_cast<int>(blockIdx.x)),
                               owned);
            }
        }
        if (task.stop == task.range_end) return;
        __syncthreads();
        if (threadIdx.x == 0) {
            const Item next = next_item(p, task.item, task.stop, Tr::kRows);
            set_task<Tr>(args, next, task.stop, task.range_begin, task.range_end, task);
        }
    }
}

}  // namespace specdec::cuda
