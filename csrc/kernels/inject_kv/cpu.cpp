// inject_kv on the CPU: a head at a time is widened to float32, normalised, turned, rounded and stored.
// Work: rows are spread over threads; all layers and heads of a row are written by one thread.
// Bytes moved: kv and what is stored of it, each once; the norm weights once per thread, the angles of a
// row once.
// Determinism: the sum of squares has 32 lanes, of channels c = l, l + 32, .. (squares.h); the rest are rounded products and sums, channel by channel. CUDA has the same steps and gives the same bits.
#include <cmath>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "parallel.h"
#include "params.h"
#include "squares.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// --- Steps ----------------------------------------------------------------------------------------

void widen_row(const FloatsView& from, int64_t i, float* to, int64_t count) {
    const void* row = row_of(from, i);
    for (int64_t j = 0; j < count; ++j) to[j] = float_at(row, from.dtype, j);
}

template <class T>
void widen(const T* from, float* to, int64_t count) {
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) store(to + c, load(from + c));
    for (; c < count; ++c) to[c] = to_float(from[c]);
}

SPECDEC_SIMD void scale_channels(float* x, float factor, const float* weight, int64_t count) {
    for (int64_t c = 0; c < count; ++c) x[c] = x[c] * factor * weight[c];
}

SPECDEC_SIMD void turn_pairs(float* x, const float* cos, const float* sin, int64_t pairs,
                             bool interleaved) {
    if (interleaved) {
        for (int64_t j = 0; j < pairs; ++j) turn(x[2 * j], x[2 * j + 1], cos[j], sin[j]);
    } else {
        float* __restrict first = x;
        float* __restrict second = x + pairs;
        for (int64_t j = 0; j < pairs; ++j) turn(first[j], second[j], cos[j], sin[j]);
    }
}

template <class C, class T>
void store_head(const T* from, C* to, int64_t count, float scale) {
    if constexpr (std::is_same_v<C, T>) {
        std::memcpy(to, from, count * sizeof(C));
    } else {
        for (int64_t c = 0; c < count; ++c) to[c] = stored<C>(from[c], scale);
    }
}

// --- A row ----------------------------------------------------------------------------------------

// What a thread keeps: the weights of all layers, and the row and head that it is at.
struct Work {
    std::vector<float> weights;  // [L, D]
    std::vector<float> cos, sin;
    alignas(64) float x[kMaxHeadDim];

    explicit Work(const InjectKvParams& p) : cos(p.rotary_pairs), sin(p.rotary_pairs), x{} {
        if (p.k_norm_weight.data == nullptr) return;
        const int64_t size = p.kv.size[4];
        weights.resize(p.kv.size[1] * size);
        for (int64_t l = 0; l < p.kv.size[1]; ++l) {
            widen_row(p.k_norm_weight, l, weights.data() + l * size, size);
        }
    }
};

bool is_written(const InjectKvParams& p, int64_t row) {
    if (p.slots[row] < 0 || p.positions[row] < 0 || p.positions[row] >= p.max_position) {
        return false;
    }
    if (p.committed.cu_rows == nullptr) return true;
    int64_t offsets = 0;
    for (int64_t b = 0; b <= p.committed.batch; ++b) offsets += p.committed.cu_rows[b] <= row;
    return p.committed.has(row, offsets);
}

template <class T, class C>
void write_k(const InjectKvParams& p, int64_t row, int64_t l, C* place, Work& work) {
    const int64_t size = p.kv.size[4];
    const HeadScale scale = p.k_scale.layer(l);
    for (int64_t h = 0; h < p.kv.size[3]; ++h) {
        widen(p.head<T>(row, l, 0, h), work.x, size);
        if (p.k_norm_weight.data != nullptr) {
            const float mean = sum_of_squares(work.x, size) / static_cast<float>(size);
            scale_channels(work.x, 1.0f / std::sqrt(mean + p.eps), work.weights.data() + l * size,
                           size);
        }
        turn_pairs(work.x, work.cos.data(), work.sin.data(), p.rotary_pairs, p.interleaved);
        store_head(work.x, place + h * p.layers[l].k.stride[2], size, scale[h]);
    }
}

template <class T, class C>
void write_v(const InjectKvParams& p, int64_t row, int64_t l, C* place) {
    const HeadScale scale = p.v_scale.layer(l);
    for (int64_t h = 0; h < p.kv.size[3]; ++h) {
        store_head(p.head<T>(row, l, 1, h), place + h * p.layers[l].v.stride[2], p.kv.size[4],
                   scale[h]);
    }
}

template <class T, class C>
void write_row(const InjectKvParams& p, int64_t row, Work& work) {
    widen_row(p.cos, p.positions[row], work.cos.data(), p.rotary_pairs);
    widen_row(p.sin, p.positions[row], work.sin.data(), p.rotary_pairs);
    for (int64_t l = 0; l < p.kv.size[1]; ++l) {
        const View<C, 4> k = p.layers[l].k.as<C>(), v = p.layers[l].v.as<C>();
        const int64_t place = slot_offset(k, p.slots[row]);
        if (place < 0) continue;
        write_k<T>(p, row, l, k.data + place, work);
        write_v<T>(p, row, l, v.data + slot_offset(v, p.slots[row]));
    }
}

template <class T, class C>
void run(const InjectKvParams& p) {
    // A row of five layers takes some microseconds: below some rows per thread, waking threads costs more.
    constexpr int64_t kGrain = 4;
    parallel_for(0, p.kv.size[0], kGrain, [&](int64_t begin, int64_t end) {
        Work work(p);
        for (int64_t row = begin; row < end; ++row) {
            if (is_written(p, row)) write_row<T, C>(p, row, work);
        }
    });
}

}  // namespace

void inject_kv(const InjectKvParams& p) {
    dispatch_float(p.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if (p.cache_dtype == DType::kF8E4M3) {
            run<T, f8e4m3>(p);
        } else {
            run<T, T>(p);
        }
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
