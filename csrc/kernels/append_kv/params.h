// append_kv: scatter of the K and V rows of one pass into a paged KV cache.
#pragma once

#include "isa.h"
#include "view.h"

namespace specdec {

struct AppendKvParams {
    View<const void, 3> k;  // [R, Hkv, D]
    View<const void, 3> v;  // [R, Hkv, Dv]
    View<void, 4> k_cache;  // [num_pages, page_size, Hkv, D], any strides
    View<void, 4> v_cache;  // [num_pages, page_size, Hkv, Dv], any strides
    IndexView slots;        // [R], page * page_size + offset; outside the cache: not written
    DType dtype;            // of k and v
    DType cache_dtype;      // the same, or kF8E4M3
    const float* k_scale;   // [1] or [Hkv] or nullptr (= 1): stored = x / scale
    const float* v_scale;
    int64_t k_scale_stride;  // 0 for one scale per tensor, 1 for one per head
    int64_t v_scale_stride;
};

namespace cuda {
Status append_kv(const AppendKvParams& p, Stream stream);
}

// Element offset of `slot` in a cache, or -1 when the slot names no place of it.
template <class T>
SPECDEC_HD int64_t slot_offset(const View<T, 4>& cache, int64_t slot) {
    const int64_t page_size = cache.size[1];
    if (slot < 0 || slot >= cache.size[0] * page_size) return -1;
    const int64_t page = slot / page_size;
    return page * cache.stride[0] + (slot - page * page_size) * cache.stride[1];
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(append_kv, ::specdec::AppendKvParams)
