// append_kv(k [R, Hkv, D], v [R, Hkv, Dv], k_cache(a!), v_cache(b!) [pages, page_size, Hkv, D],
//           slots [R], *, k_scale, v_scale) -> ()
// cache[slots[r]] = row r, for K and V in one launch. Slots outside the cache write nothing.
// The template of every op: validate, allocate, fill Params, run the backend, register.
#include "append_kv/params.h"
#include "stable/check.h"
#include "stable/kv_cache.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "append_kv";

void append_kv(const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache,
               const Tensor& slots, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
    // 1. Validate.
    const Arg k_arg(kOp, "k", k);
    k_arg.dims(3, "[R, Hkv, D]").dtype({DType::kF32, DType::kF16, DType::kBF16}).dense_last();
    Arg(kOp, "v", v)
        .dims(3, "[R, Hkv, Dv]")
        .dtype({k_arg.type()})
        .size(0, k.size(0), "R of k")
        .size(1, k.size(1), "Hkv of k")
        .dense_last()
        .same_device(k, "k");
    check_cache(kOp, "k_cache", k_cache, k, "k", k.size(1), k.size(2));
    check_cache(kOp, "v_cache", v_cache, k, "k", k.size(1), v.size(2));
    check_same_places(kOp, "v_cache", v_cache, "k_cache", k_cache);
    const DType cache_dtype = *dtype_of(k_cache);
    Arg(kOp, "slots", slots)
        .dims(1, "[R]")
        .index()
        .size(0, k.size(0), "R of k")
        .same_device(k, "k");
    check_scale(kOp, "k_scale", k_scale, cache_dtype, k.size(1), k, "k");
    check_scale(kOp, "v_scale", v_scale, cache_dtype, k.size(1), k, "k");
    if (k.size(0) == 0 || k_cache.numel() + v_cache.numel() == 0) return;

    // 2. Nothing to allocate. 3. Parameters.
    Launch launch(kOp, k);
    AppendKvParams p;
    p.k = launch.in<3>("k", k);
    p.v = launch.in<3>("v", v);
    p.k_cache = launch.out<4>("k_cache", k_cache);
    p.v_cache = launch.out<4>("v_cache", v_cache);
    p.slots = launch.index("slots", slots);
    p.dtype = k_arg.type();
    p.cache_dtype = cache_dtype;
    p.k_scale = head_scale(launch, "k_scale", k_scale);
    p.v_scale = head_scale(launch, "v_scale", v_scale);

    // 4. Run.
    SPECDEC_RUN(append_kv, launch, p);
}

}  // namespace

SPECDEC_REGISTER(append_kv, append_kv)

}  // namespace specdec::ops
