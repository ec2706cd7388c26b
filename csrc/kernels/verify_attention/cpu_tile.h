// Tiles of verify_attention on the CPU: gathering K and V of 64 places as float32, and the two
// products with them. Included by cpu.cpp only.
//
// Layouts, all float32, in strips of 16 lanes:
//   K tile   [4 strips of keys][D][16 keys]
//   V tile   [Dv / 16 strips of channels][64 keys][16 channels]
//   queries  [blocks of up to 6 rows][D][rows of the block]
//   scores   [rows][64 keys], overwritten by the weights
// Every score is one chain of fused steps over d = 0 .. D-1, every output one chain over the
// visible keys of the tile in ascending order: how many rows or strips share a register block is
// invisible.
#pragma once

#include "dispatch.h"
#include "params.h"
#include "softmax.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kTile = kTileTokens;
constexpr int kSegmentTiles = kSegmentTokens / kTile;
constexpr int kKeyStrips = kTile / kLanes;
constexpr int kBlockRows = 6;  // 6 rows x 2 vectors of accumulators fill the 16 AVX registers
constexpr uint64_t kAllKeys = ~uint64_t{0};
static_assert(kTile == 64, "visibility of a tile is one 64-bit word");

// The first `count` keys of a tile.
SPECDEC_SIMD uint64_t first_keys(int64_t count) {
    return count <= 0 ? 0 : count >= kTile ? kAllKeys : (uint64_t{1} << count) - 1;
}

// --- Gathering -----------------------------------------------------------------------------------

// Where the places of one tile lie. Pages outside the cache and places from `limit` on are absent.
struct Places {
    uint64_t present = 0;
    int64_t page[kTile];
    int64_t offset[kTile];
};

inline void find_places(const VerifyAttentionParams& p, int64_t request, int64_t first,
                        int64_t limit, Places& places) {
    const int64_t page_size = p.k_cache.size[1], num_pages = p.k_cache.size[0];
    int64_t column = first / page_size, offset = first - column * page_size;
    const int64_t count = limit - first < kTile ? limit - first : kTile;
    places.present = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t page = *p.block_table.at(request, column);
        if (page >= 0 && page < num_pages) places.present |= uint64_t{1} << i;
        places.page[i] = page;
        places.offset[i] = offset;
        if (++offset == page_size) {
            offset = 0;
            ++column;
        }
    }
}

template <class T>
SPECDEC_SIMD const T* place_row(const View<const T, 4>& cache, int64_t head, const Places& places,
                                int key) {
    return cache.data + places.page[key] * cache.stride[0] + places.offset[key] * cache.stride[1] +
           head * cache.stride[2];
}

typedef float Float8 __attribute__((vector_size(32)));
typedef int32_t Int8 __attribute__((vector_size(32)));
typedef Float8 Float8At __attribute__((aligned(4), may_alias));
typedef uint16_t Half8At __attribute__((vector_size(16), aligned(2), may_alias));

SPECDEC_SIMD Float8 load8(const float* at) {
    return *reinterpret_cast<const Float8At*>(at);
}
SPECDEC_SIMD Float8 load8(const bf16* at) {
#if defined(__AVX2__)
    return reinterpret_cast<Float8>(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))), 16));
#else
    return reinterpret_cast<Float8>(
        __builtin_convertvector(*reinterpret_cast<const Half8At*>(at), Int8) << 16);
#endif
}
SPECDEC_SIMD Float8 load8(const f16* at) {
#if defined(__F16C__)
    return reinterpret_cast<Float8>(
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
    Float8 r;
    for (int i = 0; i < 8; ++i) r[i] = to_float(at[i]);
    return r;
#endif
}

// Row i, column j -> row j, column i.
SPECDEC_SIMD void transpose8(Float8 (&r)[8]) {
    constexpr Int8 kLow = {0, 8, 1, 9, 4, 12, 5, 13}, kHigh = {2, 10, 3, 11, 6, 14, 7, 15};
    constexpr Int8 kLowPair = {0, 1, 8, 9, 4, 5, 12, 13}, kHighPair = {2, 3, 10, 11, 6, 7, 14, 15};
    constexpr Int8 kLowHalf = {0, 1, 2, 3, 8, 9, 10, 11}, kHighHalf = {4, 5, 6, 7, 12, 13, 14, 15};
    Float8 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = __builtin_shuffle(r[2 * i], r[2 * i + 1], kLow);
        a[2 * i + 1] = __builtin_shuffle(r[2 * i], r[2 * i + 1], kHigh);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = __builtin_shuffle(a[i], a[i + 2], kLowPair);
        b[i + 1] = __builtin_shuffle(a[i], a[i + 2], kHighPair);
        b[i + 2] = __builtin_shuffle(a[i + 1], a[i + 3], kLowPair);
        b[i + 3] = __builtin_shuffle(a[i + 1], a[i + 3], kHighPair);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[i] = __builtin_shuffle(b[i], b[i + 4], kLowHalf);
        r[i + 4] = __builtin_shuffle(b[i], b[i + 4], kHighHalf);
    }
}

// Asks for the K and V rows of the tile that comes next, a few with every block of rows that is
// multiplied: they lie a page or a row of heads apart, which no hardware prefetcher follows.
template <class T>
struct Ahead {
    const View<const T, 4>& k_cache;
    const View<const T, 4>& v_cache;
    int64_t head;
    const Places& places;
    int rows_at_once;
    int next = 0;

    SPECDEC_SIMD void step() {
        const int end = next + rows_at_once < 2 * kTile ? next + rows_at_once : 2 * kTile;
        for (; next < end; ++next) {
            const int key = next % kTile;
            if ((places.present >> key & 1) == 0) continue;
            const View<const T, 4>& cache = next < kTile ? k_cache : v_cache;
            const char* row = reinterpret_cast<const char*>(place_row(cache, head, places, key));
            const int64_t bytes = cache.size[3] * sizeof(T);
            for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
        }
    }
};

// K of the present places, turned so that 16 keys are lanes; absent keys are 0.
template <class T>
void pack_k(const View<const T, 4>& k_cache, int64_t head, const Places& places, int strips,
            float* out) {
    static const T kAbsent[kMaxHeadDim] = {};
    const int64_t head_dim = k_cache.size[3];
    for (int group = 0; group < 2 * strips; ++group) {  // of 8 keys
        const T* row[8];
        for (int i = 0; i < 8; ++i) {
            const int key = 8 * group + i;
            row[i] = kAbsent;
            if (places.present >> key & 1) row[i] = place_row(k_cache, head, places, key);
        }
        float* target = out + (group / 2) * head_dim * kLanes + (group % 2) * 8;
        for (int64_t d = 0; d < head_dim; d += 8) {
            Float8 block[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) block[i] = load8(row[i] + d);
            transpose8(block);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                *reinterpret_cast<Float8At*>(target + (d + i) * kLanes) = block[i];
            }
        }
    }
}

// V of the present places; absent keys stay unwritten and are never read.
template <class T>
void pack_v(const View<const T, 4>& v_cache, int64_t head, const Places& places, float* out) {
    const int64_t head_dim = v_cache.size[3];
    for (uint64_t left = places.present; left != 0; left &= left - 1) {
        const int key = __builtin_ctzll(left);
        const T* row = place_row(v_cache, head, places, key);
        for (int64_t d = 0; d < head_dim; d += kLanes) {
            store(out + (d / kLanes * kTile + key) * kLanes, load(row + d));
        }
    }
}

// --- Products ------------------------------------------------------------------------------------

// Strips that share one pass over the rows' factors: enough chains to hide the latency of fma.
constexpr int strips_at_once(int rows) {
    return kNativeLanes == 16 ? 4 : rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

// acc[r][n] += sum over k of a(r, k) * b[n][k], one chain per lane; a(r, k) = a[r * RowStep + k *
// Step], strips of b lie `strip` floats apart.
template <int Rows, int Strips, int RowStep, int Step>
SPECDEC_SIMD void multiply(const float* a, const float* b, int64_t strip, int64_t count,
                           V16 (&acc)[Rows][Strips]) {
    for (int64_t k = 0; k < count; ++k) {
        V16 column[Strips];
#pragma GCC unroll 4
        for (int n = 0; n < Strips; ++n) column[n] = load(b + n * strip + k * kLanes);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            const V16 x = set1(a[r * RowStep + k * Step]);
#pragma GCC unroll 4
            for (int n = 0; n < Strips; ++n) acc[r][n] = fma(x, column[n], acc[r][n]);
        }
    }
}

// Scores of a block of rows with the keys of `strips` strips.
template <int Rows, int Strips>
SPECDEC_SIMD void score_strips(const float* queries, const float* keys, int64_t head_dim, int strip,
                               float* scores) {
    V16 acc[Rows][Strips] = {};
    multiply<Rows, Strips, 1, Rows>(queries, keys + strip * head_dim * kLanes, head_dim * kLanes,
                                    head_dim, acc);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < Strips; ++n)
            store(scores + r * kTile + (strip + n) * kLanes, acc[r][n]);
    }
}

template <int Rows>
void score_block(const float* queries, const float* keys, int64_t head_dim, int strips,
                 float* scores) {
    constexpr int kAtOnce = strips_at_once(Rows);
    int strip = 0;
    for (; strip + kAtOnce <= strips; strip += kAtOnce) {
        score_strips<Rows, kAtOnce>(queries, keys, head_dim, strip, scores);
    }
    for (; strip < strips; ++strip) score_strips<Rows, 1>(queries, keys, head_dim, strip, scores);
}

// out = out * decay + weights . V for a block of rows that all see the first `count` keys.
template <int Rows, int Strips>
SPECDEC_SIMD void value_strips(const float* weights, const float* values, const float* decay,
                               int64_t count, int64_t v_dim, int64_t strip, float* out) {
    V16 acc[Rows][Strips];
    float* target = out + strip * kLanes;
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < Strips; ++n) {
            acc[r][n] = load(target + r * v_dim + n * kLanes) * set1(decay[r]);
        }
    }
    multiply<Rows, Strips, kTile, 1>(weights, values + strip * kTile * kLanes, kTile * kLanes,
                                     count, acc);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < Strips; ++n) store(target + r * v_dim + n * kLanes, acc[r][n]);
    }
}

template <int Rows>
void value_block(const float* weights, const float* values, const float* decay, int64_t count,
                 int64_t v_dim, float* out) {
    constexpr int kAtOnce = strips_at_once(Rows);
    const int64_t strips = v_dim / kLanes;
    int64_t strip = 0;
    for (; strip + kAtOnce <= strips; strip += kAtOnce) {
        value_strips<Rows, kAtOnce>(weights, values, decay, count, v_dim, strip, out);
    }
    for (; strip < strips; ++strip) {
        value_strips<Rows, 1>(weights, values, decay, count, v_dim, strip, out);
    }
}

// The same for one row that sees any set of keys: an unseen key takes no part at all, so its V may
// be NaN and the chain is that of a call where the key does not exist.
inline void value_row(const float* weights, const float* values, float decay, uint64_t visible,
                      int64_t v_dim, float* out) {
    for (int64_t d = 0; d < v_dim; d += 2 * kLanes) {
        const bool pair = d + kLanes < v_dim;
        const float* strip = values + d * kTile;
        V16 low = load(out + d) * set1(decay);
        V16 high = pair ? load(out + d + kLanes) * set1(decay) : V16{};
        for (uint64_t left = visible; left != 0; left &= left - 1) {
            const int key = __builtin_ctzll(left);
            const V16 x = set1(weights[key]);
            low = fma(x, load(strip + key * kLanes), low);
            if (pair) high = fma(x, load(strip + (kTile + key) * kLanes), high);
        }
        store(out + d, low);
        if (pair) store(out + d + kLanes, high);
    }
}

// Cuts `rows` rows into blocks of nearly equal size and calls fn(first row, IntTag<rows>) for each.
SPECDEC_SIMD int blocks_of(int rows) {
    return (rows + kBlockRows - 1) / kBlockRows;
}

template <class F>
void for_blocks(int rows, F&& fn) {
    const int blocks = blocks_of(rows);
    for (int i = 0; i < blocks; ++i) {
        const int first = rows * i / blocks, last = rows * (i + 1) / blocks;
        dispatch_int<6, 5, 4, 3, 2, 1>(last - first, [&](auto count) { fn(first, count); });
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
