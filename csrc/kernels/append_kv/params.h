// append_kv: scatter of the K and V rows of one pass into a paged KV cache.
#pragma once

#include "isa.h"
#include "kv_store.h"

namespace specdec {

struct AppendKvParams {
    View<const void, 3> k;  // [R, Hkv, D]
    View<const void, 3> v;  // [R, Hkv, Dv]
    View<void, 4> k_cache;  // [num_pages, page_size, Hkv, D], any strides
    View<void, 4> v_cache;  // [num_pages, page_size, Hkv, Dv], any strides
    IndexView slots;        // [R], page * page_size + offset; outside the cache: not written
    DType dtype;            // of k and v
    DType cache_dtype;      // the same, or kF8E4M3
    HeadScale k_scale;      // stored = x / scale
    HeadScale v_scale;
};

namespace cuda {
Status append_kv(const AppendKvParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(append_kv, ::specdec::AppendKvParams)
