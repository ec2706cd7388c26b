// verify_attention on the CPU for few packed rows, as in plain decoding: keys are the lanes of the
// scores, channels those of the outputs, and memory sets the pace. Included by cpu.cpp only.
//
// Layouts, all float32: queries [rows][D], scores [heads][rows][64 keys], out [rows][Dv]. K and V are
// widened in registers, K turned in blocks of 8 keys x 8 elements.
// A tile is taken for all heads, K first, then V: neighbouring heads lie side by side, so that memory
// is read in the order of addresses, a tile of K or V ahead.
// The chains of fused steps are those of cpu_wide.h, and so are the trees: the same bits.
#pragma once

#include "cpu_tile.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int kKeyStrips = kTile / kLanes;
constexpr int kTurned = 8;     // keys, elements of a block
constexpr int kValueKeys = 8;  // whose V stays in the nearest cache while all channels pass

SPECDEC_SIMD Float8 fma8(Float8 a, Float8 b, Float8 c) {
#if defined(__AVX2__)
    return reinterpret_cast<Float8>(_mm256_fmadd_ps(
        reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
    const float* from[2] = {reinterpret_cast<const float*>(&a), reinterpret_cast<const float*>(&b)};
    float* to = reinterpret_cast<float*>(&c);
    for (int l = 0; l < 8; l += kNativeLanes) fma_lanes(from[0] + l, from[1] + l, to + l);
    return c;
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

// Asks for the rows of a tile of K or V, `heads` heads of each key, a few cache lines at a time.
class Prefetch {
  public:
    // Nothing is asked for where `places` has no keys.
    template <class T>
    Prefetch(const View<const T, 4>& cache, int64_t head, int64_t heads, const Places& places)
        : places_(places),
          data_(reinterpret_cast<const char*>(cache.data + head * cache.stride[2])),
          heads_(heads),
          page_bytes_(cache.stride[0] * sizeof(T)),
          offset_bytes_(cache.stride[1] * sizeof(T)),
          head_bytes_(cache.stride[2] * sizeof(T)),
          row_bytes_(cache.size[3] * sizeof(T)),
          left_(places.present) {
        if (head_bytes_ == row_bytes_) {  // one long row
            row_bytes_ *= heads_;
            heads_ = 1;
        }
        head_ = heads_;
        next_row();
    }
    template <int Lines>
    SPECDEC_SIMD void step() {
        if (at_ >= end_ && !next_row()) return;
#pragma GCC unroll 8
        for (int i = 0; i < Lines; ++i) __builtin_prefetch(at_ + 64 * i, 0, 2);
        at_ += 64 * Lines;
    }
    bool done() const {
        return at_ >= end_ && head_ == heads_ && left_ == 0;
    }

  private:
    bool next_row() {
        if (head_ == heads_) {
            if (left_ == 0) return false;
            const int key = __builtin_ctzll(left_);
            left_ &= left_ - 1;
            key_ = data_ + places_.page[key] * page_bytes_ + places_.offset[key] * offset_bytes_;
            head_ = 0;
        }
        at_ = key_ + head_++ * head_bytes_;
        end_ = at_ + row_bytes_;
        return true;
    }

    const Places& places_;
    const char* data_;
    int64_t heads_, page_bytes_, offset_bytes_, head_bytes_, row_bytes_;
    uint64_t left_;
    int64_t head_;
    const char *key_ = nullptr, *at_ = nullptr, *end_ = nullptr;
};

// Scores (before the scale) of 16 keys.
template <int Rows, class T>
SPECDEC_SIMD void score_strip(const float* queries, const T* const* keys, int64_t head_dim,
                              float* scores, Prefetch& ahead) {
    constexpr int kBlocks = kLanes / kTurned;
    Float8 acc[kBlocks][Rows] = {};
    for (int64_t d = 0; d < head_dim; d += kTurned) {
        ahead.step<4>();
#pragma GCC unroll 2
        for (int block = 0; block < kBlocks; ++block) {
            Float8 k[kTurned];
#pragma GCC unroll 8
            for (int i = 0; i < kTurned; ++i) k[i] = load8(keys[block * kTurned + i] + d);
            transpose8(k);
#pragma GCC unroll 8
            for (int i = 0; i < kTurned; ++i) {
#pragma GCC unroll 4
                for (int r = 0; r < Rows; ++r) {
                    const Float8 x = queries[r * head_dim + d + i] - Float8{};
                    acc[block][r] = fma8(x, k[i], acc[block][r]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
        for (int block = 0; block < kBlocks; ++block) {
            *reinterpret_cast<Float8At*>(scores + r * kTile + block * kTurned) = acc[block][r];
        }
    }
}

// A strip of keys of a row as 16 lanes of truth.
SPECDEC_SIMD I16 visible_lanes(uint64_t visible, int strip) {
    alignas(64) static constexpr int32_t kBits[kLanes] = {
        1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
        1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    const I16 bit = load(kBits);
    return (set1(static_cast<int32_t>(visible >> (strip * kLanes) & 0xffff)) & bit) == bit;
}

// Scores to weights: online softmax of a row over this tile. Returns what earlier sums are scaled by.
SPECDEC_SIMD float soften_row(float* scores, uint64_t visible, LogitScale scale, float* max_so_far,
                              float* sum_so_far) {
    V16 t[kKeyStrips];
#pragma GCC unroll 4
    for (int n = 0; n < kKeyStrips; ++n) {
        t[n] = load(scores + n * kLanes) * set1(scale.factor);
        if (scale.cap != 0.0f) t[n] = soft_cap(t[n], scale.cap);
        if (visible != kAllKeys) {
            t[n] = select(visible_lanes(visible, n), t[n], set1(-__builtin_inff()));
        }
    }
    const float tile_max = max_lanes(max(max(t[0], t[1]), max(t[2], t[3])));
    const V16 before = set1(*max_so_far);
    const V16 after = max(set1(tile_max), before);
    const V16 base = finite_max(after);
#pragma GCC unroll 4
    for (int n = 0; n < kKeyStrips; ++n) {
        t[n] = exp2_nonpositive(t[n] - base);
        store(scores + n * kLanes, t[n]);
    }
    const V16 decay = exp2_nonpositive(before - base);
    const V16 sum = set1(sum_lanes((t[0] + t[1]) + (t[2] + t[3])));
    *max_so_far = first_lane(after);
    *sum_so_far = first_lane(fma(set1(*sum_so_far), decay, sum));
    return first_lane(decay);
}

// Weights of a tile of one head.
template <int Rows, class T>
void score_narrow_tile(const float* queries, const T* const* keys, int64_t head_dim, int count,
                       const uint64_t* visible, LogitScale scale, const State& state, float* scores,
                       float* decay, Prefetch& ahead) {
    for (int key = 0; key < count; key += kLanes) {
        score_strip<Rows>(queries, keys + key, head_dim, scores + key, ahead);
    }
    for (int r = 0; r < Rows; ++r) {
        decay[r] = soften_row(scores + r * kTile, visible[r], scale, state.max + r, state.sum + r);
    }
}

// out = out * decay + weights . V of a tile of one head. A row takes from a key that it sees only: see
// value_block of cpu_wide.h.
template <int Rows, class T>
void add_narrow_values(const T* const* values, int64_t v_dim, int count, const uint64_t* visible,
                       const float* scores, const float* decay, const State& state,
                       Prefetch& ahead) {
    uint64_t all = kAllKeys;
    for (int r = 0; r < Rows; ++r) all &= visible[r];
    for (int first = 0; first < count; first += kValueKeys) {
        const int keys = count - first < kValueKeys ? count - first : kValueKeys;
        const bool same = keys == kValueKeys && (all >> first & 0xff) == 0xff;
        for (int64_t d = 0; d < v_dim; d += kLanes) {
            ahead.step<4>();
            V16 acc[Rows];
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                acc[r] = load(state.out + r * v_dim + d);
                if (first == 0) acc[r] = acc[r] * set1(decay[r]);
            }
            if (same) {
#pragma GCC unroll 8
                for (int i = 0; i < kValueKeys; ++i) {
                    const V16 v = load(values[first + i] + d);
#pragma GCC unroll 4
                    for (int r = 0; r < Rows; ++r) {
                        acc[r] = fma(set1(scores[r * kTile + first + i]), v, acc[r]);
                    }
                }
            } else {
                for (int i = first; i < first + keys; ++i) {
                    const V16 v = load(values[i] + d);
                    for (int r = 0; r < Rows; ++r) {
                        if ((visible[r] >> i & 1) == 0) continue;
                        acc[r] = fma(set1(scores[r * kTile + i]), v, acc[r]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) store(state.out + r * v_dim + d, acc[r]);
        }
    }
}

// target = target followed by next, where next has seen anything.
inline void fold_narrow(const State& target, const State& next, int rows, int64_t v_dim) {
    for (int r = 0; r < rows; ++r) {
        if (next.sum[r] == 0.0f) continue;
        const V16 left = set1(target.max[r]), right = set1(next.max[r]);
        const V16 top = max(right, left);
        const V16 keep = exp2_nonpositive(left - finite_max(top));
        const V16 add = exp2_nonpositive(right - finite_max(top));
        target.max[r] = first_lane(top);
        target.sum[r] = first_lane(fma(set1(next.sum[r]), add, set1(target.sum[r]) * keep));
        float* out = target.out + r * v_dim;
        const float* more = next.out + r * v_dim;
        for (int64_t d = 0; d < v_dim; d += kLanes) {
            store(out + d, fma(load(more + d), add, load(out + d) * keep));
        }
    }
}

}  // namespace
}  // namespace specdec::cpu::SPECDEC_ISA
