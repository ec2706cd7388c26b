// k_scale and v_scale of ops on fp8 KV caches: checked, and as a kernel reads them.
#pragma once

#include "paged.h"
#include "stable/check.h"

namespace specdec::ops {

// `peer` is the tensor whose device it must be on.
inline void check_scale(const char* op, const char* name, const OptionalTensor& scale,
                        DType cache_dtype, int64_t num_kv_heads, const Tensor& peer,
                        const char* peer_name) {
    if (!scale) return;
    check_option(cache_dtype == DType::kF8E4M3, op, name, "None unless the cache is float8_e4m3fn",
                 "a tensor");
    const Arg arg(op, name, *scale);
    arg.dims(1, "[1] or [Hkv]").dtype({DType::kF32}).dense().same_device(peer, peer_name);
    if (scale->size(0) != 1) arg.size(0, num_kv_heads, "1, or Hkv of the cache");
}

inline HeadScale head_scale(Launch& launch, const char* name, const OptionalTensor& scale) {
    if (!scale) return {nullptr, 0};
    return {static_cast<const float*>(launch.in_data(name, *scale)), scale->size(0) > 1 ? 1 : 0};
}

}  // namespace specdec::ops
