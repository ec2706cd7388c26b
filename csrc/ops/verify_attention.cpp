// verify_attention(q [R, Hq, D], k_cache, v_cache [pages, page_size, Hkv, D | Dv],
//                  block_table [B, P], cu_rows [B+1], seq_lens [B], *, max_rows, scale, mask,
//                  tree_mask [R, W], positions [R], window, softcap, sinks [Hq], k_scale, v_scale)
//   -> (out [R, Hq, Dv], lse [R, Hq])
// Attention of the rows of a verification pass over their requests' paged KV.
#include "verify_attention/params.h"

#include <cmath>

#include "stable/check.h"
#include "stable/kv_cache.h"
#include "tree.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "verify_attention";
constexpr int64_t kMaxRows = 0x7fffffff;  // cu_rows is int32

// On CUDA Dv follows from D, but for a few pairs: a wrong D is told apart from a wrong Dv.
void check_head_dims(int64_t head_dim, int64_t value_dim) {
#if defined(SPECDEC_BACKEND_CPU)
    const auto supported = [](int64_t dim) {
        return dim > 0 && dim <= kMaxHeadDim && dim % 16 == 0;
    };
    const bool key = supported(head_dim), value = supported(value_dim);
    const char* wanted = "a head_dim that is a multiple of 16 up to 256";
    const char* wanted_value = wanted;
#else
    const bool key = cuda::verify_attention_has_kernel(head_dim, head_dim);
    const bool value = cuda::verify_attention_has_kernel(head_dim, value_dim);
    const char* wanted = "head_dim 64, 80, 96, 128, 192 or 256";
    const char* wanted_value =
        "head_dim D of k_cache; or 128 for D 64, 64 for D 128, 128 for D 192";
#endif
    check_option(key, kOp, "k_cache", wanted, head_dim);
    check_option(value, kOp, "v_cache", wanted_value, value_dim);
}

void check_mask(const Tensor& q, int64_t max_rows, const std::string& mask,
                const OptionalTensor& tree_mask, const OptionalTensor& positions, int64_t window) {
    const bool tree = mask == "tree";
    check_option(tree || mask == "causal" || mask == "full", kOp, "mask",
                 "\"causal\", \"full\" or \"tree\"", "\"" + mask + "\"");
    if (tree_mask) {
        check_option(tree, kOp, "tree_mask", "None unless mask is \"tree\"",
                     "a tensor with mask \"" + mask + "\"");
        Arg(kOp, "tree_mask", *tree_mask)
            .dims(2, "[R, W]")
            .dtype({DType::kI32})
            .size(0, q.size(0), "R of q")
            .size_at_least(1, (max_rows + kMaskBits - 1) / kMaskBits, "ceil(max_rows / 32)")
            .dense_last()
            .same_device(q, "q");
    }
    check_option(!tree || tree_mask, kOp, "tree_mask", "a tensor with mask \"tree\"", "None");
    if (positions) {
        Arg(kOp, "positions", *positions)
            .dims(1, "[R]")
            .index()
            .size(0, q.size(0), "R of q")
            .same_device(q, "q");
    }
    check_option(window == -1 || window > 0, kOp, "window", "-1 or a number above 0", window);
    check_option(!tree || window == -1 || positions, kOp, "positions",
                 "a tensor with mask \"tree\" and a window", "None");
}

std::tuple<Tensor, Tensor> verify_attention(
    const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
    const Tensor& cu_rows, const Tensor& seq_lens, int64_t max_rows, std::optional<double> scale,
    std::string mask, const OptionalTensor& tree_mask, const OptionalTensor& positions,
    int64_t window, double softcap, const OptionalTensor& sinks, const OptionalTensor& k_scale,
    const OptionalTensor& v_scale) {
    // 1. Validate.
    const Arg q_arg(kOp, "q", q);
    q_arg.dims(3, "[R, Hq, D]").dtype({DType::kF32, DType::kF16, DType::kBF16}).dense_last();
    const Arg k_arg(kOp, "k_cache", k_cache), v_arg(kOp, "v_cache", v_cache);
    k_arg.dims(4, "[num_pages, page_size, Hkv, D]")
        .dtype({q_arg.type(), DType::kF8E4M3})
        .size(3, q.size(2), "D of q")
        .dense_last()
        .same_device(q, "q");
    v_arg.dims(4, "[num_pages, page_size, Hkv, Dv]")
        .dtype({k_arg.type()})
        .size(0, k_cache.size(0), "num_pages of k_cache")
        .size(1, k_cache.size(1), "page_size of k_cache")
        .size(2, k_cache.size(2), "Hkv of k_cache")
        .dense_last()
        .same_device(q, "q");
    check_head_dims(k_cache.size(3), v_cache.size(3));
    const int64_t page_size = k_cache.size(1), kv_heads = k_cache.size(2);
    check_option(page_size >= 1 && page_size <= 256, kOp, "k_cache", "a page_size of 1 .. 256",
                 page_size);
    check_option(kv_heads > 0 && q.size(1) % kv_heads == 0, kOp, "q",
                 "Hq a multiple of Hkv of k_cache",
                 std::to_string(q.size(1)) + " and " + std::to_string(kv_heads));
    Arg(kOp, "seq_lens", seq_lens).dims(1, "[B]").dtype({DType::kI32}).dense().same_device(q, "q");
    const int64_t batch = seq_lens.size(0);
    Arg(kOp, "block_table", block_table)
        .dims(2, "[B, P]")
        .dtype({DType::kI32})
        .size(0, batch, "B of seq_lens")
        .dense_last()
        .same_device(q, "q");
    Arg(kOp, "cu_rows", cu_rows)
        .dims(1, "[B+1]")
        .dtype({DType::kI32})
        .size(0, batch + 1, "B of seq_lens, plus 1")
        .dense()
        .same_device(q, "q");
    check_option(max_rows >= 0 && max_rows <= kMaxRows, kOp, "max_rows",
                 "a number from 0 to 2^31 - 1", max_rows);
    check_mask(q, max_rows, mask, tree_mask, positions, window);
    const double score_scale = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(q.size(2)));
    check_option(std::isfinite(static_cast<float>(score_scale)), kOp, "scale",
                 "a number that is finite in float32", score_scale);
    const float cap = static_cast<float>(softcap), uncapped = static_cast<float>(score_scale);
    check_option(
        softcap == 0.0 || (cap > 0.0f && std::isfinite(cap) && std::isfinite(uncapped / cap)), kOp,
        "softcap", "0 or a positive number with finite scale / softcap in float32", softcap);
    if (sinks) {
        Arg(kOp, "sinks", *sinks)
            .dims(1, "[Hq]")
            .dtype({DType::kF32})
            .size(0, q.size(1), "Hq of q")
            .dense()
            .same_device(q, "q");
    }

    check_scale(kOp, "k_scale", k_scale, k_arg.type(), kv_heads, q, "q");
    check_scale(kOp, "v_scale", v_scale, k_arg.type(), kv_heads, q, "q");

    // 2. Allocate.
    Tensor out = empty_on(q, {q.size(0), q.size(1), v_cache.size(3)}, q_arg.type());
    Tensor lse = empty_on(q, {q.size(0), q.size(1)}, DType::kF32);
    if (lse.numel() == 0) return {out, lse};

    // 3. Parameters.
    Launch launch(kOp, q);
    VerifyAttentionParams p{};
    p.q = launch.in<3>("q", q);
    p.k_cache = launch.in<4>("k_cache", k_cache);
    p.v_cache = launch.in<4>("v_cache", v_cache);
    p.block_table = launch.in<2>("block_table", block_table).as<const int32_t>();
    p.cu_rows = static_cast<const int32_t*>(launch.in_data("cu_rows", cu_rows));
    p.seq_lens = static_cast<const int32_t*>(launch.in_data("seq_lens", seq_lens));
    p.dtype = q_arg.type();
    p.cache_dtype = k_arg.type();
    p.k_scale = head_scale(launch, "k_scale", k_scale);
    p.v_scale = head_scale(launch, "v_scale", v_scale);
    p.batch = batch;
    p.max_rows = max_rows;
    p.scale = uncapped;
    p.softcap = cap;
    if (sinks) p.sinks = static_cast<const float*>(launch.in_data("sinks", *sinks));
    p.mask = mask == "causal" ? AttentionMask::kCausal
             : mask == "full" ? AttentionMask::kFull
                              : AttentionMask::kTree;
    if (tree_mask) p.tree_mask = launch.in<2>("tree_mask", *tree_mask).as<const int32_t>();
    if (positions && window > 0) p.positions = launch.index("positions", *positions);
    p.window = window > 0 ? window : 0;
    p.out = launch.out<3>("out", out);
    p.lse = static_cast<float*>(launch.out_data("lse", lse));
#if !defined(SPECDEC_BACKEND_CPU)
    p.scratch_bytes = cuda::verify_attention_scratch_bytes(p);
    Tensor scratch = empty_on(q, {(p.scratch_bytes + 3) / 4}, DType::kI32);
    if (p.scratch_bytes > 0) p.scratch = launch.out_data("scratch", scratch);
#endif

    // 4. Run.
    SPECDEC_RUN(verify_attention, launch, p);
    return {out, lse};
}

}  // namespace

SPECDEC_REGISTER(verify_attention, verify_attention)

}  // namespace specdec::ops
