// verify_attention: attention of the rows of a verification pass over a paged KV cache.
#pragma once

#include "isa.h"
#include "paged.h"
#include "token_law.h"
#include "view.h"

namespace specdec {

// Absolute KV places are cut into fixed segments of fixed tiles: the canonical order of summation.
constexpr int kSegmentTokens = 512;
constexpr int kTileTokens = 64;
constexpr int kMaxHeadDim = 256;

enum class AttentionMask : int32_t { kCausal, kFull, kTree };

struct VerifyAttentionParams {
    View<const void, 3> q;        // [R, Hq, D]
    View<const void, 4> k_cache;  // [num_pages, page_size, Hkv, D], any strides
    View<const void, 4> v_cache;  // [num_pages, page_size, Hkv, Dv], any strides
    View<const int32_t, 2>
        block_table;          // [B, P] page of every page_size places; bad pages are masked
    const int32_t* cu_rows;   // [B+1], trusted non-decreasing, clamped to 0..R before use
    const int32_t* seq_lens;  // [B] all KV including this pass's rows (the last places)
    DType dtype;              // of q and out
    DType cache_dtype;        // the same, or kF8E4M3
    HeadScale k_scale, v_scale;
    int64_t batch, max_rows;
    float scale;         // of the scores
    float softcap;       // logits become softcap * tanh(logit / softcap); 0: they do not
    const float* sinks;  // [Hq] a logit that takes part in the sum only, or null
    AttentionMask mask;
    View<const int32_t, 2> tree_mask;  // kTree: [R, W] bit j: the row sees row j of its request
    IndexView positions;               // [R] of the rows, for the window; no data: their places
    int64_t window;                    // positions nearer than this are seen; 0: all
    View<void, 3> out;                 // [R, Hq, Dv]
    float* lse;                        // [R, Hq] natural log
    void* scratch;                     // CUDA: verify_attention_scratch_bytes(p), uninitialised
    int64_t scratch_bytes;
    int num_sms;  // CUDA: sets the grid, never the result
};

// From a score q . k to its logit in powers of two: factor * score, or cap * tanh(factor * score).
struct LogitScale {
    float factor;
    float cap;  // 0: none
};

inline LogitScale logit_scale(const VerifyAttentionParams& p) {
    if (p.softcap == 0.0f) return {p.scale * kLog2E, 0.0f};
    return {p.scale / p.softcap, p.softcap * kLog2E};
}

// With the scale of a KV head's keys.
inline LogitScale logit_scale(const VerifyAttentionParams& p, int64_t kv_head) {
    LogitScale scale = logit_scale(p);
    scale.factor *= p.k_scale[kv_head];
    return scale;
}

namespace cuda {
bool verify_attention_has_kernel(int64_t head_dim, int64_t value_dim);
int64_t verify_attention_scratch_bytes(const VerifyAttentionParams& p);
Status verify_attention(const VerifyAttentionParams& p, Stream stream);
}  // namespace cuda

}  // namespace specdec

SPECDEC_DECLARE_CPU_BF16(verify_attention, ::specdec::VerifyAttentionParams)
