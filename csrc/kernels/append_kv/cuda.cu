// append_kv on CUDA: for every row r with a valid slot s, cache[s] = row.
//   Grid: x = row, y = 0 for K and 1 for V; the threads of a block share the chunks of that row,
//   all heads. A chunk is 16 bytes where pointers and strides allow it, else one element.
//   Bytes moved: 2 R Hkv (D + Dv) elements, each once, plus slots. One launch.
//   Determinism: a copy; two rows with the same slot are the caller's error.
#include "kernel.h"

#include <algorithm>

#include "dispatch.h"
#include "params.h"

namespace specdec::cuda {
namespace {

// --- Traits: what one thread moves ---------------------------------------------------------------
template <class T>
struct CopyTraits {  // T = Chunk16 for aligned rows of any type, else the element type
    using Source = T;
    using Target = T;
    static __device__ __forceinline__ T convert(T x, float) { return x; }
};
template <class T>
struct QuantiseTraits {
    using Source = T;
    using Target = f8e4m3;
    static __device__ __forceinline__ f8e4m3 convert(T x, float scale) {
        return stored<f8e4m3>(x, scale);
    }
};

// One of K and V, in units of the trait's Source and Target.
template <class Traits>
struct Side {
    View<const typename Traits::Source, 3> rows;  // [R, Hkv, chunks]
    View<typename Traits::Target, 4> cache;
    HeadScale scale;
};

// --- Kernel --------------------------------------------------------------------------------------
template <class Traits>
__global__ void append_kv_kernel(Side<Traits> k, Side<Traits> v, IndexView slots) {
    const Side<Traits>& side = blockIdx.y == 0 ? k : v;
    const int64_t row = blockIdx.x;
    const int64_t place = slot_offset(side.cache, slots[row]);
    if (place < 0) return;
    const int chunks = static_cast<int>(side.rows.size[2]);
    const int row_chunks = static_cast<int>(side.rows.size[1]) * chunks;
    for (int i = threadIdx.x; i < row_chunks; i += blockDim.x) {
        const int head = i / chunks, chunk = i - head * chunks;
        side.cache.data[place + head * side.cache.stride[2] + chunk] =
            Traits::convert(side.rows.at(row, head)[chunk], side.scale[head]);
    }
}

// --- Launch --------------------------------------------------------------------------------------
template <class Traits>
Status launch(const Side<Traits>& k, const Side<Traits>& v, const IndexView& slots, Stream stream) {
    constexpr int64_t kMaxThreads = 256;
    const int64_t chunks = k.rows.size[1] * std::max(k.rows.size[2], v.rows.size[2]);
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(k.rows.size[0]), 2);
    cfg.block = dim3(static_cast<unsigned>(std::min(kMaxThreads, (chunks + 31) / 32 * 32)));
    cfg.stream = stream;
    return cu::launch(cfg, append_kv_kernel<Traits>, k, v, slots);
}

// Views in units of 16 bytes, or false when a pointer, a stride or the row length is no multiple.
template <class T, int N>
bool in_chunks(const View<T, N>& view, int element_size, int64_t (&size)[N], int64_t (&stride)[N]) {
    bool ok = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
    for (int d = 0; d < N; ++d) {
        const int64_t bytes = view.stride[d] * element_size;
        ok = ok && (d == N - 1 || bytes % 16 == 0);
        size[d] = view.size[d];
        stride[d] = d == N - 1 ? 1 : bytes / 16;
    }
    size[N - 1] = view.size[N - 1] * element_size / 16;
    return ok && view.size[N - 1] * element_size % 16 == 0;
}

template <class Traits>
void make_side(const View<const void, 3>& rows, const View<void, 4>& cache, HeadScale scale,
               Side<Traits>& side) {
    side.rows = rows.template as<const typename Traits::Source>();
    side.cache = cache.template as<typename Traits::Target>();
    side.scale = scale;
}

bool make_chunked_side(const View<const void, 3>& rows, const View<void, 4>& cache,
                       int element_size, Side<CopyTraits<Chunk16>>& side) {
    make_side(rows, cache, HeadScale{}, side);
    return in_chunks(rows, element_size, side.rows.size, side.rows.stride) &&
           in_chunks(cache, element_size, side.cache.size, side.cache.stride);
}

template <class Traits>
Status launch_elements(const AppendKvParams& p, Stream stream) {
    Side<Traits> k, v;
    make_side(p.k, p.k_cache, p.k_scale, k);
    make_side(p.v, p.v_cache, p.v_scale, v);
    return launch(k, v, p.slots, stream);
}

}  // namespace

Status append_kv(const AppendKvParams& p, Stream stream) {
    Status status;
    dispatch_float(p.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        if (p.cache_dtype == DType::kF8E4M3) {
            status = launch_elements<QuantiseTraits<T>>(p, stream);
            return;
        }
        Side<CopyTraits<Chunk16>> k, v;
        if (make_chunked_side(p.k, p.k_cache, sizeof(T), k) &&
            make_chunked_side(p.v, p.v_cache, sizeof(T), v)) {
            status = launch(k, v, p.slots, stream);
        } else {
            status = launch_elements<CopyTraits<T>>(p, stream);
        }
    });
    return status;
}

}  // namespace specdec::cuda
