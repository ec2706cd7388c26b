// Second launch of verify_attention: finishes the (request, KV head, row block) triples that a block
// boundary of the first launch cuts.
//   Grid: x = block of the first launch, which owns the triple it begins and does not finish (if any);
//   y = slices of its rows. A thread owns four columns of one row and folds the partials in the order
//   of the segments, with the operations of the first launch: where the cuts are changes no bit.
//   Bytes: the partials once, and the rows of out. Blocks without such a triple leave at once.
#pragma once

#include "kernel.cuh"

namespace specdec::cuda {

template <class Tr>
struct CombineTraits {
    static constexpr int kThreads = 128;
    static constexpr int kLanesPerRow = Tr::kValueDim / 4;
    static constexpr int kRowsPerBlock = kLanesPerRow <= 16 ? 8 : kLanesPerRow <= 32 ? 4 : 2;
    static_assert(kRowsPerBlock * kLanesPerRow <= kThreads, "a thread per four columns");
    static constexpr int kSlices = Tr::kRows / kRowsPerBlock;
    static_assert(kSlices * kRowsPerBlock == Tr::kRows, "slices cover the tile");
};

template <class Tr>
__global__ void __launch_bounds__(CombineTraits<Tr>::kThreads)
    verify_attention_combine_kernel(const __grid_constant__ AttendArgs args) {
    using Combine = CombineTraits<Tr>;
    using T = typename Tr::T;
    CU_SHARED(scratch, ScheduleScratch<Combine::kThreads>);
    const VerifyAttentionParams& p = args.p;
    const PartialStore& partials = args.partials;
    const int block = static_cast<int>(blockIdx.x), grid = static_cast<int>(gridDim.x);

    // The triple that is cut at the end of the block's range.
    const ItemList<Combine::kThreads> list(p, Tr::kRows, scratch);
    const int64_t begin = range_begin(list.total, block, grid);
    const int64_t cut = range_begin(list.total, block + 1, grid);
    if (begin == cut || cut == list.total) return;
    const Item item = list.find(p, cut, Tr::kRows, scratch);
    if (item.first == cut || item.first < begin) return;

    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= Combine::kRowsPerBlock * Combine::kLanesPerRow) return;
    const int row =
        static_cast<int>(blockIdx.y) * Combine::kRowsPerBlock + thread / Combine::kLanesPerRow;
    const int column = thread % Combine::kLanesPerRow * 4;
    const int64_t index = result_index(p, item, item.row_block * Tr::kRows + row);
    if (index < 0) return;

    // Left fold: what the owner has, then one segment after the other.
    const auto quad_of = [&](int64_t slot) {
        return *reinterpret_cast<const float4*>(partials.values +
                                                (slot * Tr::kRows + row) * Tr::kValueDim + column);
    };
    SoftmaxSum sum = partials.sums[partials.fold_slot(block) * Tr::kRows + row];
    float4 o = quad_of(partials.fold_slot(block));
    int writer = block + 1;
    int64_t writer_begin = cut, writer_end = range_begin(list.total, writer + 1, grid);
    for (int64_t i = cut; i < item.first + item.num_segments; ++i) {
        while (i >= writer_end) {
            writer_begin = writer_end;
            writer_end = range_begin(list.total, ++writer + 1, grid);
        }
        const int64_t slot = partials.segment_slot(writer, i - writer_begin);
        const float4 x = quad_of(slot);
        const FoldWeights weights = fold_sum(sum, partials.sums[slot * Tr::kRows + row]);
        o.x = fold_value(o.x, x.x, weights);
        o.y = fold_value(o.y, x.y, weights);
        o.z = fold_value(o.z, x.z, weights);
        o.w = fold_value(o.w, x.w, weights);
    }
    const float keep =
        add_sink(p, static_cast<int>(index % p.q.size[1]), sum) * p.v_scale[item.head];
    write_quad(static_cast<T*>(p.out.data) + index * Tr::kValueDim + column, o.x, o.y, o.z, o.w,
               keep, sum);
    if (column == 0) p.lse[index] = log_sum_exp(sum);
}

}  // namespace specdec::cuda
