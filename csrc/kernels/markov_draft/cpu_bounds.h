// Bounds of bounds.h on the CPU: a vector turned and rounded, dots of its codes with those of a tile of 16 columns, and
// the bounds of the tile's logits. Dots are whole numbers: the same on every instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "dispatch.h"
#include "params.h"
#include "simd.h"
#include "vocab_tile.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kVectors = 4;  // that share a load of codes

// --- 1. Vectors ---------------------------------------------------------------------------------------
// x[0..size) to its Walsh-Hadamard transform, unscaled; size a power of two.
inline void transform(float* x, int64_t size) {
    for (int64_t half = 1; half < size; half *= 2) {
        for (int64_t i = 0; i < size; i += 2 * half) {
            for (int64_t j = i; j < i + half; ++j) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
        }
    }
}

// y[0..rank), and its codes [width].
template <class At>
TurnedVector turn_vector(const MarkovTable& table, int64_t rank, At y, int8_t* codes) {
    float x[kMarkovTableWidth] = {};
    float squares = 0.0f, peak = 0.0f, lost = 0.0f;
    for (int64_t i = 0; i < rank; ++i) {
        squares = squares + y(i) * y(i);
        x[i] = y(i) * table.turn[i];
    }
    TurnedVector v{0.0f, norm_above(squares), 0.0f};
    std::fill(codes, codes + table.width, int8_t{0});
    if (!is_prunable(v)) return TurnedVector{0.0f, INFINITY, INFINITY};
    for (int64_t at = 0; at < table.width;) {
        const int64_t size = transform_size(table.width - at);
        transform(x + at, size);
        at += size;
    }
    for (int64_t i = 0; i < table.width; ++i) peak = std::max(peak, std::fabs(x[i]));
    v.scale = code_scale(peak);
    const float per_unit = codes_per_unit(peak);
    for (int64_t i = 0; i < table.width; ++i) {
        const int code = code_of(x[i], per_unit);
        codes[i] = static_cast<int8_t>(code);
        const float f = fused(-v.scale, static_cast<float>(code), x[i]);
        lost = lost + f * f;
    }
    v.lost = lost_above(lost, v.norm);
    return v;
}

// --- 2. Dots ------------------------------------------------------------------------------------------
// A vector as the dots read it: four codes in a word.
struct CodedVector {
    const int32_t* words;
    int32_t sum;  // of the codes
};

#if defined(__AVX512F__)
// Unsigned by signed bytes: 128 more than each code of the table, which 128 times the sum of the others undoes.
template <int kCount>
__attribute__((target("avx512vnni"))) void dot_codes_vnni(const int8_t* codes, int64_t words,
                                                          const CodedVector* vectors, I16* dots) {
    __m512i sum[kCount][2];
    for (int i = 0; i < kCount; ++i) {
        sum[i][0] = _mm512_set1_epi32(-128 * vectors[i].sum);
        sum[i][1] = _mm512_setzero_si512();
    }
    const __m512i more = _mm512_set1_epi8(static_cast<char>(0x80));
    const auto add = [&](int64_t w, int part) __attribute__((target("avx512vnni"))) {
        const __m512i word = _mm512_xor_si512(_mm512_loadu_si512(codes + w * 64), more);
        _Pragma("GCC unroll 4") for (int i = 0; i < kCount; ++i) {
            sum[i][part] =
                _mm512_dpbusd_epi32(sum[i][part], word, _mm512_set1_epi32(vectors[i].words[w]));
        }
    };
    int64_t w = 0;
    for (; w + 2 <= words; w += 2) {
        add(w, 0);
        add(w + 1, 1);
    }
    if (w < words) add(w, 0);
    for (int i = 0; i < kCount; ++i) {
        dots[i].part[0] = reinterpret_cast<NativeInt>(_mm512_add_epi32(sum[i][0], sum[i][1]));
    }
}
#endif

template <int kCount>
void dot_codes_plain(const int8_t* codes, int64_t words, const CodedVector* vectors, I16* dots) {
    alignas(64) int32_t out[kCount][kLanes];
#if defined(__AVX2__)
    // |a| times b with a's sign: pairs stay below 2^15, as no code is below -127.
    __m256i sum[kCount][2] = {};
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t w = 0; w < words; ++w) {
        _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half) {
            const __m256i word =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + w * 64 + half * 32));
            const __m256i size = _mm256_abs_epi8(word);
            _Pragma("GCC unroll 4") for (int i = 0; i < kCount; ++i) {
                const __m256i other =
                    _mm256_sign_epi8(_mm256_set1_epi32(vectors[i].words[w]), word);
                const __m256i pairs = _mm256_maddubs_epi16(size, other);
                sum[i][half] = _mm256_add_epi32(sum[i][half], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    for (int i = 0; i < kCount; ++i) {
        for (int half = 0; half < 2; ++half) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(out[i] + half * 8), sum[i][half]);
        }
    }
#else
    for (int i = 0; i < kCount; ++i) {
        const int8_t* other = reinterpret_cast<const int8_t*>(vectors[i].words);
        for (int l = 0; l < kLanes; ++l) out[i][l] = 0;
        for (int64_t w = 0; w < words; ++w) {
            for (int l = 0; l < kLanes; ++l) {
                const int8_t* word = codes + w * 64 + l * 4;
                for (int n = 0; n < 4; ++n) out[i][l] += word[n] * other[w * 4 + n];
            }
        }
    }
#endif
    for (int i = 0; i < kCount; ++i) dots[i] = load(static_cast<const int32_t*>(out[i]));
}

template <int kCount>
void dot_codes(const int8_t* codes, int64_t words, const CodedVector* vectors, I16* dots) {
#if defined(__AVX512F__)
    static const bool has_vnni = __builtin_cpu_supports("avx512vnni");
    if (has_vnni) return dot_codes_vnni<kCount>(codes, words, vectors, dots);
#endif
    dot_codes_plain<kCount>(codes, words, vectors, dots);
}

// --- 3. Bounds of a tile --------------------------------------------------------------------------------
struct TileBounds {
    V16 low, high;
};
// rows: s, |e| and |s q| of the tile; base: U of its columns.
SPECDEC_SIMD TileBounds tile_bounds(const float* rows, I16 dots, const TurnedVector& v, V16 base) {
    const V16 near = load(rows) * set1(v.scale) * to_floats(dots);
    const V16 error =
        fma(load(rows + kLanes), set1(v.norm), load(rows + 2 * kLanes) * set1(v.lost)) +
        set1(kMarkovUnderflow);
    return TileBounds{base + (near - error), base + (near + error)};
}

// Largest upper bound; +inf where one is +inf or NaN: that column must be looked at.
SPECDEC_SIMD float highest(V16 high) {
    return lane_bits(high < set1(INFINITY)) == 0xffffu ? max_lanes(high) : INFINITY;
}

// --- 4. Tiles that can win --------------------------------------------------------------------------------
class Pruning {
  public:
    // outside: some column has no target id.
    Pruning(const MarkovDraftParams& p, bool outside)
        : p_(p),
          outside_(outside),
          chunks_(markov_chunks(p)),
          tiles_(markov_tiles(p)),
          words_(p.table.width / 4),
          codes_(p.batch * words_),
          turned_(p.batch),
          low_(p.batch * chunks_, kMinusInfinity),
          high_(p.batch * tiles_),
          limit_(p.batch) {}

    // y(i) is the vector of a step of request b.
    template <class At>
    void turn(int64_t b, At y) {
        int8_t* codes = reinterpret_cast<int8_t*>(codes_.data() + b * words_);
        turned_[b] = turn_vector(p_.table, p_.rank, y, codes);
    }

    // Upper bounds of the tiles of a chunk and its largest lower bound, for all requests that are alive.
    template <class Alive>
    void bound(int64_t k, int64_t chunk, Alive alive) {
        int64_t requests[kVectors];
        int count = 0;
        for (int64_t b = 0; b < p_.batch; ++b) {
            if (alive(b)) requests[count++] = b;
            if (count == kVectors) {
                bound_some<kVectors>(k, chunk, requests);
                count = 0;
            }
        }
        for (int i = 0; i < count; ++i) bound_some<1>(k, chunk, requests + i);
    }

    // After all chunks of a step. Whether few tiles are left: else all of them at once are faster, a row of W2 for
    // several requests at a time.
    template <class Alive>
    bool set_limits(Alive alive) {
        int64_t left = 0, all = 0;
        for (int64_t b = 0; b < p_.batch; ++b) {
            if (!alive(b)) continue;
            limit_[b] =
                *std::max_element(low_.begin() + b * chunks_, low_.begin() + (b + 1) * chunks_);
            for (int64_t tile = 0; tile < tiles_; ++tile) left += can_win(b, tile) ? 1 : 0;
            all += tiles_;
        }
        return 4 * left <= all;
    }
    bool can_win(int64_t b, int64_t tile) const {
        const float high = high_[b * tiles_ + tile];
        return high >= limit_[b] && high > kMinusInfinity;
    }

  private:
    CodedVector coded(int64_t b) const {
        const int32_t* words = codes_.data() + b * words_;
        const int8_t* codes = reinterpret_cast<const int8_t*>(words);
        int32_t sum = 0;
        for (int64_t i = 0; i < p_.table.width; ++i) sum += codes[i];
        return CodedVector{words, sum};
    }

    // Of a tile; -inf for columns outside of the law.
    V16 base_of(int64_t b, int64_t k, int64_t begin, int64_t n) const {
        V16 base;
        dispatch_float(p_.logits_dtype, [&](auto tag) {
            const auto* row = static_cast<const typename decltype(tag)::type*>(base_row(p_, b, k));
            if (n == kMarkovTile && !outside_) {
                base = load(row + begin);
                return;
            }
            alignas(64) float some[kMarkovTile];
            std::fill(some, some + kMarkovTile, kMinusInfinity);
            for (int64_t i = 0; i < n; ++i) {
                if (markov_token(p_, begin + i) >= 0) some[i] = to_float(row[begin + i]);
            }
            base = load(static_cast<const float*>(some));
        });
        return base;
    }

    template <int kCount>
    void bound_some(int64_t k, int64_t chunk, const int64_t* requests) {
        const MarkovTable& table = p_.table;
        const int64_t end = std::min((chunk + 1) * kMarkovChunk, p_.columns);
        CodedVector vectors[kCount];
        V16 low[kCount];
        for (int i = 0; i < kCount; ++i) {
            vectors[i] = coded(requests[i]);
            low[i] = set1(kMinusInfinity);
        }
        for (int64_t begin = chunk * kMarkovChunk; begin < end; begin += kMarkovTile) {
            const int64_t tile = begin / kMarkovTile;
            I16 dots[kCount];
            dot_codes<kCount>(table.codes + begin * table.width, words_, vectors, dots);
            for (int i = 0; i < kCount; ++i) {
                const int64_t b = requests[i];
                const V16 base = base_of(b, k, begin, std::min(kMarkovTile, end - begin));
                const TileBounds bounds =
                    tile_bounds(table.rows + tile * 3 * kMarkovTile, dots[i], turned_[b], base);
                low[i] = max(bounds.low, low[i]);
                high_[b * tiles_ + tile] = highest(bounds.high);
            }
        }
        for (int i = 0; i < kCount; ++i) low_[requests[i] * chunks_ + chunk] = max_lanes(low[i]);
    }

    const MarkovDraftParams& p_;
    const bool outside_;
    const int64_t chunks_, tiles_, words_;
    std::vector<int32_t> codes_;  // [B, words_]
    std::vector<TurnedVector> turned_;
    std::vector<float> low_;    // [B, chunks_] largest lower bounds
    std::vector<float> high_;   // [B, tiles_] upper bounds
    std::vector<float> limit_;  // [B] the largest lower bound of all
};

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
