// The requests as the device reads them, and how their work is cut.
//
// A work item is one 512-token segment for one (request, KV head, block of packed rows). Items form one
// list in that order, segments innermost, and block c of a grid of G takes items [c T / G, (c+1) T / G)
// of the T there are. Every block derives this from cu_rows and seq_lens by itself, so there is no plan
// to keep, nothing to clear, and nothing of it enters a result.
#pragma once

#include "block.cuh"
#include "mask.h"

namespace specdec::cuda {

struct Request {
    int first_row;  // row of q
    int rows;       // rows to compute, at most max_rows
    int prefix;     // places before the first row; negative if seq_lens < rows
    int kv_len;     // places that exist, cut to the block table
};

__device__ __forceinline__ int request_begin(const VerifyAttentionParams& p, int b) {
    const int num_rows = static_cast<int>(p.q.size[0]);
    return min(max(p.cu_rows[b], 0), num_rows);
}

__device__ __forceinline__ Request read_request(const VerifyAttentionParams& p, int b) {
    const int begin = request_begin(p, b);
    const int rows = max(request_begin(p, b + 1) - begin, 0);
    const int seq_len = max(p.seq_lens[b], 0);
    const int64_t table_len = p.block_table.size[1] * p.k_cache.size[1];
    Request request;
    request.first_row = begin;
    request.rows = p.max_rows < rows ? static_cast<int>(p.max_rows) : rows;
    request.prefix = seq_len - rows;
    request.kv_len = table_len < seq_len ? static_cast<int>(table_len) : seq_len;
    return request;
}

// Row j of a request sees places below this only (at or below 0: none): all that exist, but for
// has_holes().
__device__ __forceinline__ int visible_places(const VerifyAttentionParams& p, const Request& r,
                                              int j) {
    return p.mask == AttentionMask::kCausal ? min(r.prefix + j + 1, r.kv_len) : r.kv_len;
}

__device__ __forceinline__ PassRows pass_rows(const Request& r) {
    return PassRows{r.first_row, r.prefix};
}

// Whether row j sees a place that exists.
__device__ __forceinline__ bool sees(const VerifyAttentionParams& p, const Request& r, int j,
                                     int place) {
    if (place >= visible_places(p, r, j)) return false;
    return !has_holes(p) || sees_place(p, pass_rows(r), j, place);
}

__device__ __forceinline__ int group_size(const VerifyAttentionParams& p) {
    return static_cast<int>(p.q.size[1] / p.k_cache.size[2]);
}

__device__ __forceinline__ int row_blocks(const Request& r, int group, int tile_rows) {
    return (r.rows * group + tile_rows - 1) / tile_rows;
}

// At least one, so that rows without a visible key get their result like all others.
__device__ __forceinline__ int num_segments(const Request& r) {
    return max((r.kv_len - 1) / kSegmentTokens + 1, 1);
}

__device__ __forceinline__ int64_t num_items(const VerifyAttentionParams& p, const Request& r,
                                             int tile_rows) {
    return p.k_cache.size[2] * row_blocks(r, group_size(p), tile_rows) * num_segments(r);
}

// First item of block c.
__device__ __forceinline__ int64_t range_begin(int64_t total, int c, int grid) {
    return total * c / grid;
}

// An item in terms of the problem.
struct Item {
    int b;
    Request request;
    int64_t request_item;  // first item of the request
    int64_t first;         // first item of (request, head, row block)
    int head;
    int row_block;
    int num_segments;
};

__device__ __forceinline__ Item decode_item(const VerifyAttentionParams& p, int b,
                                            const Request& request, int64_t request_item,
                                            int64_t index, int tile_rows) {
    Item item;
    item.b = b;
    item.request = request;
    item.request_item = request_item;
    item.num_segments = num_segments(request);
    const int blocks = row_blocks(request, group_size(p), tile_rows);
    const int tile = static_cast<int>((index - request_item) / item.num_segments);
    item.first = request_item + static_cast<int64_t>(tile) * item.num_segments;
    item.head = tile / blocks;
    item.row_block = tile - item.head * blocks;
    return item;
}

// The item after the last one of `item`, which must exist.
__device__ __forceinline__ Item next_item(const VerifyAttentionParams& p, const Item& item,
                                          int64_t index, int tile_rows) {
    int b = item.b;
    Request request = item.request;
    int64_t first = item.request_item;
    for (;;) {
        const int64_t next = first + num_items(p, request, tile_rows);
        if (index < next) return decode_item(p, b, request, first, index, tile_rows);
        first = next;
        request = read_request(p, ++b);
    }
}

struct FoundRequest {
    int64_t b;
    int64_t first_item;
};

template <int kThreads>
struct ScheduleScratch {
    BlockScratch<int64_t, kThreads> scan;
    FoundRequest found;
};

// The item list, seen by all threads of a block together: thread t knows requests [begin, end).
template <int kThreads>
struct ItemList {
    int begin, end;
    int64_t before;  // items of all earlier requests
    int64_t total;

    __device__ __forceinline__ ItemList(const VerifyAttentionParams& p, int tile_rows,
                                        ScheduleScratch<kThreads>& scratch) {
        const int batch = static_cast<int>(p.batch);
        const int share = (batch + kThreads - 1) / kThreads;
        begin = min(static_cast<int>(threadIdx.x) * share, batch);
        end = min(begin + share, batch);
        int64_t own = 0;
        for (int b = begin; b < end; ++b) own += num_items(p, read_request(p, b), tile_rows);
        const Scan<int64_t> scan = block_inclusive_sum<kThreads>(own, scratch.scan);
        before = scan.inclusive - own;
        total = scan.total;
    }

    // The item with this index, 0 <= index < total. All threads call.
    __device__ __forceinline__ Item find(const VerifyAttentionParams& p, int64_t index,
                                         int tile_rows, ScheduleScratch<kThreads>& scratch) const {
        int64_t first = before;
        for (int b = begin; b < end; ++b) {
            const int64_t next = first + num_items(p, read_request(p, b), tile_rows);
            if (first <= index && index < next) scratch.found = FoundRequest{b, first};
            first = next;
        }
        __syncthreads();
        const int b = static_cast<int>(scratch.found.b);
        return decode_item(p, b, read_request(p, b), scratch.found.first_item, index, tile_rows);
    }
};

// --- Partials in scratch -----------------------------------------------------------------------------

// A block that enters a (request, head, row block) after its first segment writes one partial per
// segment; one that leaves before the last writes the fold so far. Both go to the block's own slots.
struct PartialStore {
    float* values;     // [grid, slots, tile_rows, Dv]
    SoftmaxSum* sums;  // [grid, slots, tile_rows]
    int slots;         // the last one is for the fold so far

    __device__ __forceinline__ int64_t segment_slot(int block, int64_t n) const {
        return static_cast<int64_t>(block) * slots + n;
    }
    __device__ __forceinline__ int64_t fold_slot(int block) const {
        return segment_slot(block, slots - 1);
    }
};

// --- Rows of no request ------------------------------------------------------------------------------

// Zeroes rows that no item covers: those after the last request, and any that cu_rows or max_rows leave
// out. Needs no order against the other steps, which write other rows.
template <class T>
__device__ __forceinline__ void zero_row(const VerifyAttentionParams& p, int64_t row) {
    const View<T, 3> out = p.out.as<T>();
    const int heads = static_cast<int>(out.size[1]), dim = static_cast<int>(out.size[2]);
    for (int i = static_cast<int>(threadIdx.x); i < heads * dim;
         i += static_cast<int>(blockDim.x)) {
        out.at(row, i / dim)[i % dim] = from_float<T>(0.0f);
    }
    for (int h = static_cast<int>(threadIdx.x); h < heads; h += static_cast<int>(blockDim.x)) {
        p.lse[row * heads + h] = bits_float(0xff800000u);
    }
}

template <class T>
__device__ __forceinline__ void zero_uncovered_rows(const VerifyAttentionParams& p) {
    const int batch = static_cast<int>(p.batch), grid = static_cast<int>(gridDim.x);
    const auto covered_until = [&](int b) {  // rows of requests before b end here
        if (b == 0) return 0;
        const Request before = read_request(p, b - 1);
        return before.first_row + before.rows;
    };
    for (int b = static_cast<int>(blockIdx.x); b < batch; b += grid) {
        const int end = request_begin(p, b);
        for (int row = covered_until(b); row < end; ++row) zero_row<T>(p, row);
    }
    for (int64_t row = covered_until(batch) + static_cast<int>(blockIdx.x); row < p.q.size[0];
         row += grid) {
        zero_row<T>(p, row);
    }
}

}  // namespace specdec::cuda
