// compact_kv on the CPU: gathers the sources of a request, one head at a time, then scatters them.
// Work: a thread takes whole pairs of a cache and a request. Bytes moved: each place that moves is read
// and written once; the gathered copy of a head stays in the processor's cache.
// Determinism: a copy, and all sources of a request are read before any of its places is written.
#include <cstring>
#include <vector>

#include "parallel.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

void list_moves(const AcceptedPaths& accepted, int64_t b, const CacheBytes& cache,
                std::vector<Move>& moves) {
    const RowSpan rows = rows_of_request(accepted.cu_rows, b, accepted.num_rows);
    const int64_t length = path_length(accepted, b, rows);
    moves.clear();
    for (int64_t i = 0; i < length; ++i) {
        const Move move = move_of(accepted, b, rows, i, cache);
        if (move.source >= 0) moves.push_back(move);
    }
}

void move_places(const CacheBytes& cache, const std::vector<Move>& moves,
                 std::vector<uint8_t>& gathered) {
    const int64_t bytes = cache.size[3];
    gathered.resize(moves.size() * bytes);
    for (int64_t h = 0; h < cache.size[2]; ++h) {
        uint8_t* head = cache.data + h * cache.stride[2];
        uint8_t* at = gathered.data();
        for (const Move& move : moves) {
            std::memcpy(at, head + move.source, bytes);
            at += bytes;
        }
        at = gathered.data();
        for (const Move& move : moves) {
            std::memcpy(head + move.target, at, bytes);
            at += bytes;
        }
    }
}

}  // namespace

void compact_kv(const CompactKvParams& p) {
    // A pair is a few kB, or nothing where a path is in place already: too little to wake a thread for.
    constexpr int64_t kGrain = 16;
    const AcceptedPaths& accepted = p.accepted;
    parallel_for(0, p.num_caches * accepted.batch, kGrain, [&](int64_t begin, int64_t end) {
        std::vector<Move> moves;
        std::vector<uint8_t> gathered;
        for (int64_t pair = begin; pair < end; ++pair) {
            const CacheBytes& cache = p.caches[pair / accepted.batch];
            list_moves(accepted, pair % accepted.batch, cache, moves);
            if (!moves.empty()) move_places(cache, moves, gathered);
        }
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
