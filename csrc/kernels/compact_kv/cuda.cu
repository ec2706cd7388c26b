// compact_kv on CUDA: each thread reads its pieces of all sources into registers, then the block stores.
//   Grid: one block per cache and request. A unit is 16 bytes where pointer and strides of a cache allow
//   it, else 4 or 1; the units of a place are spread over the threads, so many places as fit at a time.
//   A block whose path is in place already ends without touching the cache.
//   Bytes moved: each place that moves is read and written once; path and slots once per cache. One
//   launch for up to kMaxCaches caches: their addresses are kernel arguments, so nothing is copied to
//   the device and a graph may be replayed.
//   Determinism: a copy, and a barrier lies between all reads of a unit and all writes of it. A path of
//   more than kMaxMoves nodes moves in several steps, for which it must ascend, as paths of trees do.
#include "kernel.h"

#include <algorithm>

#include "params.h"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 8;
constexpr int kMaxMoves = kThreads * kUnitsPerThread;
// Kernel arguments end at 32764 bytes. Fewer caches travel in a smaller table.
constexpr int kMaxCaches = 384;
constexpr int kFewCaches = 80;

template <int kCapacity>
struct CacheTable {
    CacheBytes cache[kCapacity];
};

// --- Shared memory: the request; the moves of a step are all of its dynamic part ------------------
struct Request {
    RowSpan rows;
    int64_t path_length;
};

// --- Steps ----------------------------------------------------------------------------------------
// The largest power of two that divides all addresses and lengths of a cache, as far as 16, 4 or 1.
__device__ __forceinline__ int unit_bytes(const CacheBytes& cache) {
    const uint64_t all =
        reinterpret_cast<uintptr_t>(cache.data) |
        static_cast<uint64_t>(cache.stride[0] | cache.stride[1] | cache.stride[2] | cache.size[3]);
    return all % 16 == 0 ? 16 : (all % 4 == 0 ? 4 : 1);
}

// Moves i = begin .. begin + count - 1 of the path; returns whether there is any. When another step comes
// before it, that one had kMaxMoves moves, so each thread moved what it had listed and may list anew.
__device__ __forceinline__ bool list_moves(const AcceptedPaths& accepted, int64_t b,
                                           const RowSpan& rows, const CacheBytes& cache,
                                           int64_t begin, int count, Move* moves) {
    bool any = false;
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const Move move = move_of(accepted, b, rows, begin + i, cache);
        moves[i] = move;
        any = any || move.source >= 0;
    }
    return __syncthreads_or(any) != 0;
}

// Byte offset of a unit within a place.
template <class Unit>
__device__ __forceinline__ int64_t unit_offset(const CacheBytes& cache, int unit) {
    const int units_per_head = static_cast<int>(cache.size[3] / sizeof(Unit));
    const int head = unit / units_per_head;
    return head * cache.stride[2] + (unit - head * units_per_head) * int64_t{sizeof(Unit)};
}

template <class Unit>
__device__ __forceinline__ void move_places(const CacheBytes& cache, const Move* moves, int count) {
    const int units = static_cast<int>(cache.size[2] * cache.size[3] / sizeof(Unit));
    const int units_at_once = min(kMaxMoves / count, units);
    for (int first = 0; first < units; first += units_at_once) {
        const int width = min(units_at_once, units - first);
        const int pieces = count * width;
        // Calls fn(k, its move, offset in a place) for this thread's pieces k.
        const auto for_pieces = [&](const auto& fn) {
#pragma unroll
            for (int k = 0; k < kUnitsPerThread; ++k) {
                const int piece = k * kThreads + static_cast<int>(threadIdx.x);
                const int move = piece / width;
                if (piece < pieces && moves[move].source >= 0) {
                    fn(k, moves[move], unit_offset<Unit>(cache, first + piece - move * width));
                }
            }
        };
        Unit held[kUnitsPerThread];
        for_pieces([&](int k, const Move& move, int64_t offset) {
            held[k] = *reinterpret_cast<const Unit*>(cache.data + move.source + offset);
        });
        __syncthreads();  // all sources are read; the next round reads other units
        for_pieces([&](int k, const Move& move, int64_t offset) {
            *reinterpret_cast<Unit*>(cache.data + move.target + offset) = held[k];
        });
    }
}

// --- Kernel ---------------------------------------------------------------------------------------
template <int kCapacity>
__global__ void compact_kv_kernel(const __grid_constant__ CacheTable<kCapacity> table,
                                  const __grid_constant__ AcceptedPaths accepted, int max_moves) {
    CU_DYN_SHARED(smem);
    Move* moves = cu::smem_at<Move>(smem, 0, max_moves);
    const CacheBytes& cache = table.cache[blockIdx.x / accepted.batch];
    const int64_t b = blockIdx.x % accepted.batch;
    CU_SHARED(request, Request);
    if (threadIdx.x == 0) {
        request.rows = rows_of_request(accepted.cu_rows, b, accepted.num_rows);
        request.path_length = path_length(accepted, b, request.rows);
    }
    __syncthreads();
    const int unit = unit_bytes(cache);
    for (int64_t begin = 0; begin < request.path_length; begin += max_moves) {
        const int count = static_cast<int>(min(request.path_length - begin, int64_t{max_moves}));
        if (list_moves(accepted, b, request.rows, cache, begin, count, moves)) {
            if (unit == 16) {
                move_places<Chunk16>(cache, moves, count);
            } else if (unit == 4) {
                move_places<uint32_t>(cache, moves, count);
            } else {
                move_places<uint8_t>(cache, moves, count);
            }
        }
    }
}

// --- Launch ---------------------------------------------------------------------------------------
template <int kCapacity>
Status launch(const CompactKvParams& p, int64_t first, int64_t num_caches, Stream stream) {
    CacheTable<kCapacity> table;
    std::copy_n(p.caches + first, num_caches, table.cache);
    const AcceptedPaths& accepted = p.accepted;
    const int64_t longest = std::min(accepted.path.size[1], accepted.num_rows);
    const int max_moves = static_cast<int>(std::min<int64_t>(longest, kMaxMoves));
    cu::SmemLayout layout;
    layout.add<Move>(max_moves);
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(num_caches * accepted.batch));
    cfg.block = dim3(kThreads);
    cfg.smem = layout.bytes();
    cfg.stream = stream;
    return cu::launch(cfg, compact_kv_kernel<kCapacity>, table, accepted, max_moves);
}

}  // namespace

Status compact_kv(const CompactKvParams& p, Stream stream) {
    constexpr int64_t kMaxBlocks = 0x7fffffff;
    if (p.accepted.batch > kMaxBlocks / kMaxCaches) {
        return Status{1, "more requests than a CUDA grid holds"};
    }
    for (int64_t first = 0; first < p.num_caches; first += kMaxCaches) {
        const int64_t count = std::min<int64_t>(p.num_caches - first, kMaxCaches);
        const Status status = count <= kFewCaches ? launch<kFewCaches>(p, first, count, stream)
                                                  : launch<kMaxCaches>(p, first, count, stream);
        if (!status.ok()) return status;
    }
    return Status{};
}

}  // namespace specdec::cuda
