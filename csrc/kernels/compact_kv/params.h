// compact_kv: the KV of the accepted path of a draft tree moves to the first rows of its request.
//   For every request b and i = 0 .. n-1, n = min(num_accepted[b], W - 1, rows_b - 1) + 1, in every cache:
//       cache[slots[first row of b + i]] = old cache[slots[first row of b + path[b, i]]]
//   Nothing moves where path[b, i] is no row of the request, or one of the two slots no place of the cache.
#pragma once

#include "isa.h"
#include "paged.h"
#include "rows.h"

namespace specdec {

// A cache in bytes: [num_pages, page_size, heads, bytes of a head], the bytes of a head dense. Bytes are
// copied as they are, so one call takes caches of any types and sizes.
using CacheBytes = View<uint8_t, 4>;

// Heads that follow each other without a gap are one long head.
inline CacheBytes cache_bytes(const View<void, 4>& cache, int64_t element_size) {
    CacheBytes bytes = cache.as<uint8_t>();
    for (int d = 0; d < 3; ++d) bytes.stride[d] *= element_size;
    bytes.size[3] *= element_size;
    bytes.stride[3] = 1;
    if (bytes.size[2] == 1 || bytes.stride[2] == bytes.size[3]) {
        bytes.size[3] *= bytes.size[2];
        bytes.size[2] = 1;
        bytes.stride[2] = bytes.size[3];
    }
    return bytes;
}

// Which rows move where, the same for all caches.
struct AcceptedPaths {
    IndexView slots;              // [R], page * page_size + offset
    const int32_t* cu_rows;       // [B+1]
    View<const int32_t, 2> path;  // [B, W] rows of the request
    const int32_t* num_accepted;  // [B]
    int64_t batch;
    int64_t num_rows;  // R
};

struct CompactKvParams {
    const CacheBytes* caches;  // [num_caches], K and V of all layers; on the host
    int64_t num_caches;
    AcceptedPaths accepted;
};

// Number of path entries that count, 0 for a request without rows.
SPECDEC_HD int64_t path_length(const AcceptedPaths& a, int64_t b, const RowSpan& rows) {
    int64_t last = a.num_accepted[b];
    if (last > a.path.size[1] - 1) last = a.path.size[1] - 1;
    if (last > rows.count - 1) last = rows.count - 1;
    return last < 0 ? 0 : last + 1;
}

// Where a place of the cache begins and where it goes, in bytes; source -1: nothing moves.
struct Move {
    int64_t source;
    int64_t target;
};

SPECDEC_HD Move move_of(const AcceptedPaths& a, int64_t b, const RowSpan& rows, int64_t i,
                        const CacheBytes& cache) {
    const Move none{-1, -1};
    const int64_t row = *a.path.at(b, i);
    if (row < 0 || row >= rows.count || row == i) return none;
    const int64_t source = slot_offset(cache, a.slots[rows.first + row]);
    const int64_t target = slot_offset(cache, a.slots[rows.first + i]);
    return source < 0 || target < 0 ? none : Move{source, target};
}

namespace cuda {
Status compact_kv(const CompactKvParams& p, Stream stream);
}

}  // namespace specdec

SPECDEC_DECLARE_CPU(compact_kv, ::specdec::CompactKvParams)
