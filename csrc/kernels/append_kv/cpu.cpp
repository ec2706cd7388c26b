// append_kv on the CPU: for every row r with a valid slot s, cache[s] = row, one head at a time.
//   fp8 caches store x / scale, rounded to nearest even, saturated to +-448, NaN kept.
// Work: rows are spread over threads; a row is copied by one thread. Bytes moved: 2 R Hkv (D + Dv).
// Determinism: a copy; two rows with the same slot are the caller's error.
#include <cstring>

#include "dispatch.h"
#include "parallel.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

// Copies between equal types.
struct SameType {
    template <class T>
    static void row(const T* source, T* target, int64_t n, float) {
        std::memcpy(target, source, n * sizeof(T));
    }
};

// Quantises to fp8.
struct ToFp8 {
    template <class T>
    static void row(const T* source, f8e4m3* target, int64_t n, float scale) {
        for (int64_t i = 0; i < n; ++i) target[i] = stored<f8e4m3>(source[i], scale);
    }
};

template <class Store, class T, class C>
void scatter(const View<const T, 3>& rows, const View<C, 4>& cache, const IndexView& slots,
             HeadScale scale, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
        const int64_t place = slot_offset(cache, slots[r]);
        if (place < 0) continue;
        for (int64_t h = 0; h < rows.size[1]; ++h) {
            Store::row(rows.at(r, h), cache.data + place + h * cache.stride[2], rows.size[2],
                       scale[h]);
        }
    }
}

template <class Store, class T, class C>
void run(const AppendKvParams& p) {
    // A row is a few kB: below some rows per thread, waking threads costs more than the copy.
    constexpr int64_t kGrain = 16;
    parallel_for(0, p.slots.size, kGrain, [&](int64_t begin, int64_t end) {
        scatter<Store>(p.k.as<const T>(), p.k_cache.as<C>(), p.slots, p.k_scale, begin, end);
        scatter<Store>(p.v.as<const T>(), p.v_cache.as<C>(), p.slots, p.v_scale, begin, end);
    });
}

}  // namespace

void append_kv(const AppendKvParams& p) {
    dispatch_float(p.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if (p.cache_dtype == DType::kF8E4M3) {
            run<ToFp8, T, f8e4m3>(p);
        } else {
            run<SameType, T, T>(p);
        }
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
