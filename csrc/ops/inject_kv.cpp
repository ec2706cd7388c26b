// inject_kv(kv [R, L, 2, Hkv, D], k_norm_weight [L, D], cos, sin [max_position, rotary_dim / 2],
//           positions [R], slots [R], k_caches(a!)[], v_caches(b!)[] [pages, page_size, Hkv, D], *, eps,
//           interleaved, cu_rows [B+1], commit_rows [B], k_scale, v_scale) -> ()
// K of every row and layer, normalised and turned, and V, to place slots[r] of the layer's caches.
#include "inject_kv/params.h"
#include "stable/check.h"
#include "stable/kv_cache.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "inject_kv";

const Arg& check_matrix(const Arg& arg, const char* shape, const Tensor& kv) {
    return arg.dims(2, shape)
        .dtype({DType::kF32, DType::kF16, DType::kBF16})
        .dense_last()
        .same_device(kv, "kv");
}

void check_angles(const Tensor& cos, const Tensor& sin, const Tensor& kv) {
    constexpr const char* kShape = "[max_position, rotary_dim / 2]";
    check_matrix(Arg(kOp, "cos", cos), kShape, kv);
    check_option(2 * cos.size(1) <= kv.size(4), kOp, "cos", "at most head_dim / 2 columns",
                 cos.size(1));
    check_matrix(Arg(kOp, "sin", sin), kShape, kv)
        .size(0, cos.size(0), "max_position of cos")
        .size(1, cos.size(1), "rotary_dim / 2 of cos");
}

std::string entry(const char* list, size_t i) {
    return std::string(list) + "[" + std::to_string(i) + "]";
}

// A pair per layer, all of one dtype.
void check_caches(const TensorList& k_caches, const TensorList& v_caches, const Tensor& kv) {
    const auto layers = static_cast<size_t>(kv.size(1));
    check_option(k_caches.size() == layers, kOp, "k_caches", "L caches", k_caches.size());
    check_option(v_caches.size() == layers, kOp, "v_caches", "L caches", v_caches.size());
    for (size_t l = 0; l < layers; ++l) {
        const std::string k = entry("k_caches", l), v = entry("v_caches", l);
        check_cache(kOp, k.c_str(), k_caches[l], kv, "kv", kv.size(3), kv.size(4));
        check_cache(kOp, v.c_str(), v_caches[l], kv, "kv", kv.size(3), kv.size(4));
        Arg(kOp, k.c_str(), k_caches[l]).dtype({*dtype_of(k_caches[0])});
        check_same_places(kOp, v.c_str(), v_caches[l], k.c_str(), k_caches[l]);
    }
}

FloatsView floats_view(Launch& launch, const char* name, const Tensor& t) {
    return {launch.in_data(name, t), *dtype_of(t), t.stride(0)};
}

void inject_kv(const Tensor& kv, const OptionalTensor& k_norm_weight, const Tensor& cos,
               const Tensor& sin, const Tensor& positions, const Tensor& slots, TensorList k_caches,
               TensorList v_caches, double eps, bool interleaved, const OptionalTensor& cu_rows,
               const OptionalTensor& commit_rows, const OptionalTensor& k_scale,
               const OptionalTensor& v_scale) {
    // 1. Validate.
    const Arg kv_arg(kOp, "kv", kv);
    kv_arg.dims(5, "[R, L, 2, Hkv, D]")
        .dtype({DType::kF32, DType::kF16, DType::kBF16})
        .size(2, 2, "K and V")
        .dense_last();
    const int64_t rows = kv.size(0), layers = kv.size(1), heads = kv.size(3), size = kv.size(4);
    check_option(heads <= kMaxKvHeads, kOp, "kv", "at most 4096 heads", heads);
    check_option(size <= kMaxHeadDim, kOp, "kv", "a head_dim of at most 1024", size);
    if (k_norm_weight) {
        check_matrix(Arg(kOp, "k_norm_weight", *k_norm_weight), "[L, D]", kv)
            .size(0, layers, "L of kv")
            .size(1, size, "D of kv");
    }
    check_angles(cos, sin, kv);
    for (const auto& [name, list] :
         {std::pair{"positions", &positions}, std::pair{"slots", &slots}}) {
        Arg(kOp, name, *list).dims(1, "[R]").index().size(0, rows, "R of kv").same_device(kv, "kv");
    }
    check_caches(k_caches, v_caches, kv);
    check_option(eps >= 0.0, kOp, "eps", "a number >= 0", eps);
    if (cu_rows) Arg(kOp, "cu_rows", *cu_rows).same_device(kv, "kv").offsets();
    if (commit_rows) {
        check_option(cu_rows.has_value(), kOp, "cu_rows", "a tensor beside commit_rows", "None");
        Arg(kOp, "commit_rows", *commit_rows)
            .same_device(kv, "kv")
            .per_request(cu_rows->size(0) - 1, "B of cu_rows");
    }
    const DType cache_dtype = k_caches.empty() ? kv_arg.type() : *dtype_of(k_caches[0]);
    check_layer_scale(kOp, "k_scale", k_scale, cache_dtype, layers, heads, kv, "kv");
    check_layer_scale(kOp, "v_scale", v_scale, cache_dtype, layers, heads, kv, "kv");
    if (kv.numel() == 0) return;

    // 2. Nothing to allocate. 3. Parameters.
    Launch launch(kOp, kv);
    std::vector<LayerCache> caches;
    for (int64_t l = 0; l < layers; ++l) {
        caches.push_back(
            {launch.out<4>("k_caches", k_caches[l]), launch.out<4>("v_caches", v_caches[l])});
    }
    InjectKvParams p;
    p.kv = launch.in<5>("kv", kv);
    if (k_norm_weight) p.k_norm_weight = floats_view(launch, "k_norm_weight", *k_norm_weight);
    p.cos = floats_view(launch, "cos", cos);
    p.sin = floats_view(launch, "sin", sin);
    p.max_position = cos.size(0);
    p.rotary_pairs = cos.size(1);
    p.positions = launch.index("positions", positions);
    p.slots = launch.index("slots", slots);
    p.layers = caches.data();
    p.committed.num_rows = rows;
    if (cu_rows) {
        p.committed.cu_rows = static_cast<const int32_t*>(launch.in_data("cu_rows", *cu_rows));
        p.committed.batch = cu_rows->size(0) - 1;
    }
    if (commit_rows) {
        p.committed.commit_rows =
            static_cast<const int32_t*>(launch.in_data("commit_rows", *commit_rows));
    }
    p.k_scale = layer_scale(launch, "k_scale", k_scale);
    p.v_scale = layer_scale(launch, "v_scale", v_scale);
    p.dtype = kv_arg.type();
    p.cache_dtype = cache_dtype;
    p.eps = static_cast<float>(eps);
    p.interleaved = interleaved;

    // 4. Run.
    SPECDEC_RUN(inject_kv, launch, p);
}

}  // namespace

SPECDEC_REGISTER(inject_kv, inject_kv)

}  // namespace specdec::ops
