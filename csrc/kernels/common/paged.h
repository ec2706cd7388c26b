// Paged KV caches: [num_pages, page_size, num_kv_heads, head_dim] by shape, with any strides.
// A slot is a place of the cache, page * page_size + offset.
#pragma once

#include "view.h"

namespace specdec {

// Element offset of `slot` in a cache, or -1 when the slot names no place of it.
template <class T>
SPECDEC_HD int64_t slot_offset(const View<T, 4>& cache, int64_t slot) {
    const int64_t page_size = cache.size[1];
    if (slot < 0 || slot >= cache.size[0] * page_size) return -1;
    const int64_t page = slot / page_size;
    return page * cache.stride[0] + (slot - page * page_size) * cache.stride[1];
}

// Of an fp8 cache: what is stored in it stands for scale times as much.
struct HeadScale {
    const float* data;  // [1] or [Hkv], or null: 1
    int64_t stride;     // 0 for one scale per tensor, 1 for one per head

    SPECDEC_HD float operator[](int64_t kv_head) const {
        return data == nullptr ? 1.0f : data[kv_head * stride];
    }
};

// What one thread moves at a time where addresses and lengths are multiples of 16 bytes.
struct alignas(16) Chunk16 {
    uint32_t word[4];
};

}  // namespace specdec
