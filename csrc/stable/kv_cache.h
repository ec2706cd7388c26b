// Paged KV caches and the scales of fp8 caches as arguments of ops: checked, and as a kernel reads them.
#pragma once

#include "kv_store.h"
#include "stable/check.h"

namespace specdec::ops {

// A cache that rows of K or V are written to: of the dtype of `source`, or fp8.
inline void check_cache(const char* op, const char* name, const Tensor& cache, const Tensor& source,
                        const char* source_name, int64_t num_kv_heads, int64_t head_dim) {
    Arg(op, name, cache)
        .dims(4, "[num_pages, page_size, Hkv, head_dim]")
        .dtype({*dtype_of(source), DType::kF8E4M3})
        .size(2, num_kv_heads, ("Hkv of " + std::string(source_name)).c_str())
        .size(3, head_dim, "head_dim of its rows")
        .dense_last()
        .same_device(source, source_name);
}

// That a cache has the dtype and the places of another one, so that slots mean the same in both.
inline void check_same_places(const char* op, const char* name, const Tensor& cache,
                              const char* other_name, const Tensor& other) {
    Arg(op, name, cache)
        .dtype({*dtype_of(other)})
        .size(0, other.size(0), ("num_pages of " + std::string(other_name)).c_str())
        .size(1, other.size(1), ("page_size of " + std::string(other_name)).c_str());
}

// What every scale must be: float32, and of an fp8 cache.
inline Arg scale_arg(const char* op, const char* name, const Tensor& scale, DType cache_dtype,
                     const Tensor& peer, const char* peer_name) {
    check_option(cache_dtype == DType::kF8E4M3, op, name, "None unless the cache is float8_e4m3fn",
                 "a tensor");
    const Arg arg(op, name, scale);
    arg.dtype({DType::kF32}).dense().same_device(peer, peer_name);
    return arg;
}

// `peer` is the tensor whose device it must be on.
inline void check_scale(const char* op, const char* name, const OptionalTensor& scale,
                        DType cache_dtype, int64_t num_kv_heads, const Tensor& peer,
                        const char* peer_name) {
    if (!scale) return;
    const Arg arg = scale_arg(op, name, *scale, cache_dtype, peer, peer_name);
    arg.dims(1, "[1] or [Hkv]");
    if (scale->size(0) != 1) arg.size(0, num_kv_heads, "1, or Hkv of the cache");
}

inline HeadScale head_scale(Launch& launch, const char* name, const OptionalTensor& scale) {
    if (!scale) return {nullptr, 0};
    return {static_cast<const float*>(launch.in_data(name, *scale)), scale->size(0) > 1 ? 1 : 0};
}

// The same for the caches of all layers.
inline void check_layer_scale(const char* op, const char* name, const OptionalTensor& scale,
                              DType cache_dtype, int64_t layers, int64_t num_kv_heads,
                              const Tensor& peer, const char* peer_name) {
    if (!scale) return;
    const Arg arg = scale_arg(op, name, *scale, cache_dtype, peer, peer_name);
    if (scale->dim() == 2) {
        arg.size(0, layers, "L").size(1, num_kv_heads, "Hkv of the caches");
        return;
    }
    arg.dims(1, "[1], [L] or [L, Hkv]");
    if (scale->size(0) != 1) arg.size(0, layers, "1, or L");
}

inline LayerScale layer_scale(Launch& launch, const char* name, const OptionalTensor& scale) {
    if (!scale) return {};
    const bool by_head = scale->dim() == 2;
    return {static_cast<const float*>(launch.in_data(name, *scale)),
            by_head ? scale->size(1) : (scale->size(0) > 1 ? 1 : 0), by_head ? 1 : 0};
}

}  // namespace specdec::ops
