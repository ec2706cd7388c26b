// inject_kv on CUDA: a warp takes a head at a time, K through shared memory, V straight through.
//   Grid: x = row, y = group of up to kMaxGroup layers. A block keeps the angles of its row and the norm
//   weights of its layers in shared memory; its warps share the heads of K and V. Four channels move at a
//   time where pointers and strides allow it, else one.
//   Bytes moved: kv and what is stored of it, each once; norm weights once per block, angles once per block,
//   cu_rows once per block. One launch for up to kMaxLayers layers: the addresses of their caches are kernel
//   arguments, so nothing is copied to the device and a graph may be replayed.
//   Determinism: the steps and the order of sums are those of the CPU (cpu.cpp), and give its bits.
#include "kernel.h"

#include <algorithm>

#include "block.cuh"
#include "dispatch.h"
#include "params.h"

namespace specdec::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxLayers = 40;
constexpr int kMaxGroup = 8;  // layers of a block
constexpr int kBlocksPerSm = 2;

// --- Shared memory --------------------------------------------------------------------------------
struct SmemPlan {
    size_t cos, sin, weights, scales, rows, bytes;
};

SmemPlan plan_smem(const InjectKvParams& p, int group) {
    const int64_t size = p.kv.size[4];
    cu::SmemLayout layout;
    SmemPlan plan;
    plan.cos = layout.add<float>(p.rotary_pairs);
    plan.sin = layout.add<float>(p.rotary_pairs);
    plan.weights = layout.add<float>(group * size);
    plan.scales = layout.add<float>(2 * group * p.kv.size[3]);
    plan.rows = layout.add<float>(kWarps * ((size + 3) / 4 * 4));
    plan.bytes = layout.bytes();
    return plan;
}

struct InjectArgs {
    InjectKvParams p;
    int64_t first_layer;  // of the table
    int num_layers;       // of the table
    int group;            // layers of a block
    bool in_quads;        // four channels move at a time
    SmemPlan smem;
};

struct Place {  // of a row
    int64_t slot, position;
};

struct LayerTable {
    LayerCache layer[kMaxLayers];
};

template <class T>
struct alignas(4 * sizeof(T)) Quad {
    T x[4];
};

// --- Steps ----------------------------------------------------------------------------------------

// By the whole block.
__device__ __forceinline__ bool is_committed(const CommittedRows& committed, int64_t row) {
    if (committed.cu_rows == nullptr) return true;
    int64_t offsets = 0;
    for (int64_t first = 0; first <= committed.batch; first += kThreads) {
        const int64_t b = first + threadIdx.x;
        offsets += __syncthreads_count(b <= committed.batch && committed.cu_rows[b] <= row);
    }
    CU_SHARED(has, bool);
    if (threadIdx.x == 0) has = committed.has(row, offsets);
    __syncthreads();
    return has;
}

// Calls fn(index, its matrix row, its matrix column) for a block of `rows` rows.
template <class Fn>
__device__ __forceinline__ void for_matrix(int rows, int columns, const Fn& fn) {
    for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
        const int row = i / columns;
        fn(i, row, i - row * columns);
    }
}

// One row of T in pieces of four or one: calls fn(its first channel, values) and says how many they are.
template <class T, class Fn>
__device__ __forceinline__ void for_pieces(const T* from, int size, bool in_quads, int lane,
                                           const Fn& fn) {
    if (in_quads) {
        for (int c = 4 * lane; c < size; c += 4 * kWarpSize) {
            const Quad<T> piece = *reinterpret_cast<const Quad<T>*>(from + c);  // one load
            fn(c, piece);
        }
    } else {
        for (int c = lane; c < size; c += kWarpSize) fn(c, from[c]);
    }
}

template <class C, class T>
__device__ __forceinline__ void store_piece(C* to, T x, float scale) {
    *to = stored<C>(x, scale);
}
template <class C, class T>
__device__ __forceinline__ void store_piece(C* to, const Quad<T>& x, float scale) {
    Quad<C> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[i] = stored<C>(x.x[i], scale);
    *reinterpret_cast<Quad<C>*>(to) = out;
}

template <class T>
__device__ __forceinline__ void widen_piece(float* to, T x) {
    *to = to_float(x);
}
template <class T>
__device__ __forceinline__ void widen_piece(float* to, const Quad<T>& x) {
    *reinterpret_cast<Quad<float>*>(to) =
        Quad<float>{to_float(x.x[0]), to_float(x.x[1]), to_float(x.x[2]), to_float(x.x[3])};
}

// Normalises and turns x in place, by a warp.
__device__ __forceinline__ void norm_and_turn(float* x, const InjectKvParams& p,
                                              const float* weight, const float* cos,
                                              const float* sin, int lane) {
    const int size = static_cast<int>(p.kv.size[4]), pairs = static_cast<int>(p.rotary_pairs);
    float factor = 1.0f;
    if (p.k_norm_weight.data != nullptr) {
        float sum = 0.0f;
        for (int c = lane; c < size; c += kWarpSize) sum += x[c] * x[c];
        factor = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(size) + p.eps);
    }
    __syncwarp();  // every lane has read what others now write
    const RotaryPairs at = rotary_pairs_of(p.interleaved, pairs);
    for (int j = lane; j < pairs; j += kWarpSize) {
        const int first = j * static_cast<int>(at.step),
                  second = first + static_cast<int>(at.second);
        float a = x[first] * factor * weight[first], b = x[second] * factor * weight[second];
        turn(a, b, cos[j], sin[j]);
        x[first] = a;
        x[second] = b;
    }
    for (int c = 2 * pairs + lane; c < size; c += kWarpSize) x[c] = x[c] * factor * weight[c];
    __syncwarp();
}

// --- Kernel ---------------------------------------------------------------------------------------
template <class T, class C>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    inject_kv_kernel(const __grid_constant__ InjectArgs args,
                     const __grid_constant__ LayerTable table) {
    CU_DYN_SHARED(memory);
    const InjectKvParams& p = args.p;
    const int64_t row = blockIdx.x;
    const int first = static_cast<int>(blockIdx.y) * args.group;
    const int layers = min(args.group, args.num_layers - first);
    const int heads = static_cast<int>(p.kv.size[3]), size = static_cast<int>(p.kv.size[4]);

    // 1. Whether the row is written, and where.
    CU_SHARED(place, Place);
    if (threadIdx.x == 0) place = Place{p.slots[row], p.positions[row]};
    __syncthreads();
    const int64_t slot = place.slot, position = place.position;
    if (slot < 0 || position < 0 || position >= p.max_position) return;
    if (!is_committed(p.committed, row)) return;

    // 2. Angles of the row, weights and scales of the layers.
    float* cos = cu::smem_at<float>(memory, args.smem.cos, p.rotary_pairs);
    float* sin = cu::smem_at<float>(memory, args.smem.sin, p.rotary_pairs);
    float* weights = cu::smem_at<float>(memory, args.smem.weights, args.group * size);
    float* scales = cu::smem_at<float>(memory, args.smem.scales, 2 * args.group * heads);
    const int stride = (size + 3) / 4 * 4;
    float* rows = cu::smem_at<float>(memory, args.smem.rows, kWarps * stride);
    for_matrix(1, static_cast<int>(p.rotary_pairs), [&](int i, int, int j) {
        cos[i] = float_at(row_of(p.cos, position), p.cos.dtype, j);
        sin[i] = float_at(row_of(p.sin, position), p.sin.dtype, j);
    });
    const int64_t first_layer = args.first_layer + first;
    for_matrix(layers, size, [&](int i, int l, int c) {
        const FloatsView& all = p.k_norm_weight;
        weights[i] =
            all.data == nullptr ? 1.0f : float_at(row_of(all, first_layer + l), all.dtype, c);
    });
    for_matrix(layers, 2 * heads, [&](int i, int l, int k) {
        const int64_t layer = first_layer + l;
        scales[i] = k < heads ? p.k_scale.layer(layer)[k] : p.v_scale.layer(layer)[k - heads];
    });
    __syncthreads();

    // 3. Heads of K and V, in the order of kv.
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float* x = rows + warp * stride;
    for (int i = warp; i < layers * 2 * heads; i += kWarps) {
        const int l = i / (2 * heads), side = i / heads % 2, h = i % heads;
        const LayerCache& caches = table.layer[first + l];
        const View<C, 4> cache = (side == 0 ? caches.k : caches.v).template as<C>();
        const int64_t offset = slot_offset(cache, slot);
        if (offset < 0) continue;
        const T* from = p.head<T>(row, first_layer + l, side, h);
        C* to = cache.data + offset + h * cache.stride[2];
        if (side == 1) {
            for_pieces(from, size, args.in_quads, lane,
                       [&](int c, const auto& piece) { store_piece(to + c, piece, scales[i]); });
            continue;
        }
        for_pieces(from, size, args.in_quads, lane,
                   [&](int c, const auto& piece) { widen_piece(x + c, piece); });
        __syncwarp();
        norm_and_turn(x, p, weights + l * size, cos, sin, lane);
        // A lane reads what it will write over with the next head.
        for_pieces(static_cast<const float*>(x), size, args.in_quads, lane,
                   [&](int c, const auto& piece) { store_piece(to + c, piece, scales[i]); });
    }
}

// --- Launch ---------------------------------------------------------------------------------------
template <class T, int N>
bool in_quads(const View<T, N>& view, int element_size) {
    uint64_t all = reinterpret_cast<uintptr_t>(view.data);
    for (int d = 0; d + 1 < N; ++d) all |= static_cast<uint64_t>(view.stride[d] * element_size);
    return all % (4 * element_size) == 0 && view.size[N - 1] % 4 == 0;
}

bool all_in_quads(const InjectKvParams& p) {
    bool ok = in_quads(p.kv, dtype_size(p.dtype));
    for (int64_t l = 0; l < p.kv.size[1]; ++l) {
        ok = ok && in_quads(p.layers[l].k, dtype_size(p.cache_dtype)) &&
             in_quads(p.layers[l].v, dtype_size(p.cache_dtype));
    }
    return ok;
}

// Layers of a block: as many as share its angles well, fewer where heads are many or long, and no small last
// group. Not a matter of the number of rows.
int layers_of_a_block(const InjectKvParams& p) {
    constexpr int64_t kGroupFloats = 8192;  // of weights and scales
    const int64_t layers = std::min<int64_t>(p.kv.size[1], kMaxLayers);
    const int64_t fit = kGroupFloats / (p.kv.size[4] + 2 * p.kv.size[3]);
    const int64_t most = std::clamp<int64_t>(fit, 1, kMaxGroup);
    const int64_t groups = (layers + most - 1) / most;
    return static_cast<int>((layers + groups - 1) / groups);
}

template <class T, class C>
Status launch(const InjectKvParams& p, InjectArgs& args, Stream stream) {
    LayerTable table;
    std::copy_n(p.layers + args.first_layer, args.num_layers, table.layer);
    cu::LaunchCfg cfg;
    cfg.grid = dim3(static_cast<unsigned>(p.kv.size[0]),
                    static_cast<unsigned>((args.num_layers + args.group - 1) / args.group));
    cfg.block = dim3(kThreads);
    cfg.smem = args.smem.bytes;
    cfg.stream = stream;
    return cu::launch(cfg, inject_kv_kernel<T, C>, args, table);
}

template <class T, class C>
Status launch_all(const InjectKvParams& p, Stream stream) {
    InjectArgs args;
    args.p = p;
    args.in_quads = all_in_quads(p);
    const int64_t layers = p.kv.size[1];
    args.group = layers_of_a_block(p);
    args.smem = plan_smem(p, args.group);
    for (int64_t first = 0; first < layers; first += kMaxLayers) {
        args.first_layer = first;
        args.num_layers = static_cast<int>(std::min<int64_t>(layers - first, kMaxLayers));
        const Status status = launch<T, C>(p, args, stream);
        if (!status.ok()) return status;
    }
    return Status{};
}

}  // namespace

Status inject_kv(const InjectKvParams& p, Stream stream) {
    Status status;
    dispatch_float(p.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        status = p.cache_dtype == DType::kF8E4M3 ? launch_all<T, f8e4m3>(p, stream)
                                                 : launch_all<T, T>(p, stream);
    });
    return status;
}

}  // namespace specdec::cuda
