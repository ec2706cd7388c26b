// compact_kv(k_caches(a!)[], v_caches(b!)[], slots [R], cu_rows [B+1], path [B, W], num_accepted [B]) -> ()
// In every cache, the place of row path[b, i] of request b goes to the place of its row i. All sources
// of a request are read before any of its places is written; bytes are copied, whatever their type.
#include "compact_kv/params.h"
#include "stable/check.h"

namespace specdec::ops {
namespace {

constexpr const char* kOp = "compact_kv";

void check_caches(const char* list, const TensorList& caches, const Tensor& slots) {
    constexpr int64_t kMaxPlaceBytes = 0x7fffffff;
    for (size_t i = 0; i < caches.size(); ++i) {
        const std::string name = std::string(list) + "[" + std::to_string(i) + "]";
        const Tensor& cache = caches[i];
        Arg(kOp, name.c_str(), cache)
            .same_device(slots, "slots")
            .dims(4, "[num_pages, page_size, heads, head_dim]")
            .dense_last();
        const int64_t bytes = cache.size(2) * cache.size(3) * cache.element_size();
        check_option(bytes <= kMaxPlaceBytes, kOp, name.c_str(), "places of less than 2^31 bytes",
                     bytes);
    }
}

void compact_kv(TensorList k_caches, TensorList v_caches, const Tensor& slots,
                const Tensor& cu_rows, const Tensor& path, const Tensor& num_accepted) {
    // 1. Validate.
    Arg(kOp, "slots", slots).dims(1, "[R]").index();
    check_caches("k_caches", k_caches, slots);
    check_caches("v_caches", v_caches, slots);
    Arg(kOp, "cu_rows", cu_rows).same_device(slots, "slots").offsets();
    const int64_t batch = cu_rows.size(0) - 1;
    Arg(kOp, "path", path)
        .same_device(slots, "slots")
        .dims(2, "[B, W]")
        .dtype({DType::kI32})
        .size(0, batch, "B of cu_rows")
        .dense_last();
    Arg(kOp, "num_accepted", num_accepted)
        .same_device(slots, "slots")
        .per_request(batch, "B of cu_rows");
    if (path.numel() == 0 || slots.size(0) == 0) return;

    // 2. Nothing to allocate. 3. Parameters.
    Launch launch(kOp, slots);
    std::vector<CacheBytes> caches;
    const auto add = [&](const char* name, const TensorList& list) {
        for (const Tensor& cache : list) {
            if (cache.numel() == 0) continue;
            caches.push_back(cache_bytes(launch.out<4>(name, cache), cache.element_size()));
        }
    };
    add("k_caches", k_caches);
    add("v_caches", v_caches);
    CompactKvParams p;
    p.caches = caches.data();
    p.num_caches = static_cast<int64_t>(caches.size());
    p.accepted.slots = launch.index("slots", slots);
    p.accepted.cu_rows = static_cast<const int32_t*>(launch.in_data("cu_rows", cu_rows));
    p.accepted.path = launch.in<2>("path", path).as<const int32_t>();
    p.accepted.num_accepted =
        static_cast<const int32_t*>(launch.in_data("num_accepted", num_accepted));
    p.accepted.batch = batch;
    p.accepted.num_rows = slots.size(0);

    // 4. Run.
    SPECDEC_RUN(compact_kv, launch, p);
}

}  // namespace

SPECDEC_REGISTER(compact_kv, compact_kv)

}  // namespace specdec::ops
