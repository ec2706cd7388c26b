// Tiles of verify_attention on the CPU: which keys of a tile exist, where their K and V lie, and how an
// element becomes float32. Included by cpu.cpp only.
#pragma once

#include "dispatch.h"
#include "params.h"
#include "softmax.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kTile = kTileTokens;
constexpr int kSegmentTiles = kSegmentTokens / kTile;
// Up to kNarrowRows packed rows go through cpu_narrow.h, more through cpu_wide.h, kWideRows at a time.
#if defined(__AVX512BF16__)
constexpr int kNarrowRows = 0;  // cpu_pairs.h takes all
#else
constexpr int kNarrowRows = 4;
#endif
constexpr int kWideVectors = 4;
constexpr int kWideRows = kWideVectors * kNativeLanes;

constexpr uint64_t kAllKeys = ~uint64_t{0};
static_assert(kTile == 64, "visibility of a tile is one 64-bit word");

// The first `count` keys of a tile.
SPECDEC_SIMD uint64_t first_keys(int64_t count) {
    return count <= 0 ? 0 : count >= kTile ? kAllKeys : (uint64_t{1} << count) - 1;
}

// Of LogitScale: `scaled` is factor * score.
template <class V>
SPECDEC_SIMD V soft_cap(V scaled, float cap) {
    return spread<V>(cap) * tanh(scaled);
}

// What a finite maximum is subtracted as: with none yet, 2^(-inf - 0) = 0 is what is wanted.
template <class V>
SPECDEC_SIMD V finite_max(V max) {
    return select(max == spread<V>(-__builtin_inff()), spread<V>(0.0f), max);
}

// Softmax over some places: out = sum of 2^(t - max) v, sum = sum of 2^(t - max), t in powers of
// two. `rows` counts the rows that there is memory for; the layout of out is the kernel's own.
struct State {
    float* max;
    float* sum;
    float* out;

    static int64_t floats(int64_t rows, int64_t v_dim) { return rows * (v_dim + 2); }
    static State at(float* data, int64_t rows, int64_t v_dim) {
        return {data + rows * v_dim, data + rows * (v_dim + 1), data};
    }
    void clear(int64_t rows, int64_t v_dim) const {
        for (int64_t i = 0; i < rows; ++i) max[i] = -__builtin_inff();
        for (int64_t i = 0; i < rows; ++i) sum[i] = 0.0f;
        for (int64_t i = 0; i < rows * v_dim; ++i) out[i] = 0.0f;
    }
};

// --- Where the places of one tile lie ------------------------------------------------------------

// Pages outside the cache and places from `limit` on are absent.
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

// Rows of K or V of one head of a tile; an absent key is a row of zeros, so that nothing asks again.
template <class T>
struct Rows {
    static constexpr int kAhead = 32;  // keys that a kernel may name behind the tile
    const T* at[kTile + kAhead];

    Rows() {
        for (const T*& row : at) row = absent();
    }
    void find(const View<const T, 4>& cache, int64_t head, const Places& places) {
        const T* start = cache.data + head * cache.stride[2];
        if (places.present == kAllKeys) {
            for (int key = 0; key < kTile; ++key) at[key] = row(cache, start, places, key);
            return;
        }
        for (int key = 0; key < kTile; ++key) {
            at[key] = places.present >> key & 1 ? row(cache, start, places, key) : absent();
        }
    }

    static const T* absent() {
        alignas(64) static constexpr T kZeros[kMaxHeadDim] = {};
        return kZeros;
    }

  private:
    static const T* row(const View<const T, 4>& cache, const T* start, const Places& places,
                        int key) {
        return start + places.page[key] * cache.stride[0] + places.offset[key] * cache.stride[1];
    }
};

// --- Elements as float32 -------------------------------------------------------------------------

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

SPECDEC_SIMD Float8 load8(const f8e4m3* at) {
#if defined(__F16C__) && defined(__AVX2__)
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    const __m256i halves = e4m3_halves(_mm256_cvtepi8_epi16(codes));
    return reinterpret_cast<Float8>(_mm256_cvtph_ps(_mm256_castsi256_si128(halves))) * 256.0f;
#else
    Float8 r;
    for (int i = 0; i < 8; ++i) r[i] = to_float(at[i]);
    return r;
#endif
}

// Sixteen elements of a row of K or V; V16 by load(), in whatever type the cache has.
template <class T>
SPECDEC_SIMD void widen(const T* from, float* to) {
    store(to, load(from));
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
