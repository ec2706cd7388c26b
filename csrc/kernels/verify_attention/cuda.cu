// verify_attention on CUDA, for row j of a request, query head h and the KV head of h:
//   s_t = scale q . k_t over the visible places t,  out = sum_t exp(s_t - lse) v_t,
//   lse = log sum_t exp(s_t). With a soft cap c, s_t becomes c tanh(s_t / c); a sink is one more s_t
//   without a v_t.
//
// bf16 and fp16 (kernel.cuh, steps.cuh, values.cuh): tensor cores, fp32 sums, P rounded to the element
//   type. fp8 caches are copied as bytes and become that type in registers (fp8.cuh); the scale of K is
//   part of that of the scores, the scale of V multiplies the result.
//   Rows of a request that share a KV head are packed, M = rows x group, in tiles of 16, 32 or 64
//   (tuning.h, as are the stages of the ring for each head dim).
//   Grid: persistent; work items are (request, KV head, row tile, 512-token segment), and block c takes
//   an equal, contiguous run of the list of them (schedule.cuh). Every block reads lengths on the device.
//   Block: 4 warps side by side along the tokens (2 x 4 for 64 rows). Warp w owns tokens 16 w.. of each
//   64-token tile, copies their K and V into its own ring (cp.async, 64 KB per block), and so waits for
//   no other warp before the end of a segment. A thread owns 2 x 2 of every 16 x 8 block of sums.
//   Bytes: K and V of each item once (2 x 512 x head_dim elements), q and out once; where a block
//   boundary cuts a sequence also one partial of rows x Dv floats per segment, written and read.
//   A second launch (combine.cuh) folds the cut ones; there is none where capacities rule cuts out.
// fp32 rows (simt.cuh): one block per (row, head), same order of summation, one launch.
//
// Determinism: the order of summation of a row hangs on absolute places only: keys of a tile by warp,
// tiles of a segment one after the other (online softmax), four warps in order, segments in a left
// fold, whoever computes them. Tiles that a row does not see leave its sums as they are. So a row's
// bits depend neither on batch, neighbours, page layout and grid, nor on how many drafts follow it.
#include "kernel.h"

#include <utility>

#include "attend.h"
#include "dispatch.h"
#include "simt.cuh"

namespace specdec::cuda {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}
int64_t at_most(int64_t a, int64_t b) {
    return a < b ? a : b;
}

template <class C, int kHeadDim, int kValueDim>
Status launch_simt(const VerifyAttentionParams& p, Stream stream) {
    using Tr = SimtTraits<C, kHeadDim, kValueDim>;
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(p.q.size[0] * p.q.size[1]));
    cfg.block = dim3(Tr::kThreads);
    cfg.stream = stream;
    return cu::launch(cfg, verify_attention_simt_kernel<Tr>, p, logit_scale(p));
}

// Calls fn with the index of the head dims, if they are among kHeadDims.
template <int... kIndex, class Fn>
void dispatch_head_dims(const VerifyAttentionParams& p, std::integer_sequence<int, kIndex...>,
                        const Fn& fn) {
    const HeadDims wanted{static_cast<int>(p.q.size[2]), static_cast<int>(p.out.size[2])};
    (void)((kHeadDims[kIndex] == wanted && (fn(IntTag<kIndex>{}), true)) || ...);
}

int num_sms(const VerifyAttentionParams& p) {
    int count = p.num_sms;
    if (count < 1 && !cu::sm_count(&count).ok()) count = 1;
    return count;
}

}  // namespace

AttendPlan plan_attend(const VerifyAttentionParams& p) {
    const int64_t kv_heads = p.k_cache.size[2];
    const int64_t packed = p.max_rows * (p.q.size[1] / kv_heads);
    AttendPlan plan{};
    plan.tile = attention_tile(packed, p.out.size[2]);
    const AttentionTile& tile = kAttentionTiles[plan.tile];
    const int64_t segments = ceil_div(p.block_table.size[1] * p.k_cache.size[1], kSegmentTokens);
    const int64_t items =
        p.batch * kv_heads * ceil_div(packed, tile.rows()) * (segments > 1 ? segments : 1);
    const int64_t resident = static_cast<int64_t>(tile.blocks_per_sm) * num_sms(p);
    plan.grid = static_cast<int>(items < 1 ? 1 : at_most(items, resident));
    // A block that enters a sequence late writes at most its own items, and never segment 0.
    if (segments > 1) {
        plan.slots = static_cast<int>(at_most(ceil_div(items, plan.grid), segments - 1)) + 1;
    }
    const int64_t rows = static_cast<int64_t>(plan.grid) * plan.slots * tile.rows();
    plan.value_bytes = rows * p.out.size[2] * static_cast<int64_t>(sizeof(float));
    plan.sum_bytes = rows * static_cast<int64_t>(sizeof(SoftmaxSum));
    return plan;
}

int64_t verify_attention_scratch_bytes(const VerifyAttentionParams& p) {
    if (p.dtype == DType::kF32) return 0;
    const AttendPlan plan = plan_attend(p);
    return plan.value_bytes + plan.sum_bytes;
}

Status verify_attention(const VerifyAttentionParams& p, Stream stream) {
    if (p.q.size[0] == 0 || p.q.size[1] == 0) return Status{};
    if (p.scratch_bytes < verify_attention_scratch_bytes(p)) {
        return Status{1,
                      "verify_attention: scratch is smaller than verify_attention_scratch_bytes"};
    }
    const bool fp8 = p.cache_dtype == DType::kF8E4M3;
    Status status{1, "verify_attention: there is no kernel for these head dims"};
    dispatch_head_dims(p, std::make_integer_sequence<int, kNumHeadDims>(), [&](auto i) {
        constexpr HeadDims kDims = kHeadDims[decltype(i)::value];
        switch (p.dtype) {
            case DType::kF32:
                status = fp8 ? launch_simt<f8e4m3, kDims.key, kDims.value>(p, stream)
                             : launch_simt<float, kDims.key, kDims.value>(p, stream);
                break;
            case DType::kF16:
                status =
                    fp8 ? attend<f16, f8e4m3, kDims.key, kDims.value>(p, plan_attend(p), stream)
                        : attend<f16, f16, kDims.key, kDims.value>(p, plan_attend(p), stream);
                break;
            case DType::kBF16:
                status =
                    fp8 ? attend<bf16, f8e4m3, kDims.key, kDims.value>(p, plan_attend(p), stream)
                        : attend<bf16, bf16, kDims.key, kDims.value>(p, plan_attend(p), stream);
                break;
            default:
                status = Status{1, "verify_attention: q must be float32, float16 or bfloat16"};
        }
    });
    return status;
}

bool verify_attention_has_kernel(int64_t head_dim, int64_t value_dim) {
    return has_kernel(head_dim, value_dim);
}

}  // namespace specdec::cuda
