// cu::launch and shared memory on the emulator. Included at the end of launch.h.
#pragma once

#include <cstring>
#include <exception>
#include <tuple>
#include <type_traits>
#include <utility>

#include "emu.h"

namespace specdec::cu {

namespace detail {
template <class T>
struct identity {
    using type = T;
};

template <class... Params>
struct Frame {
    void (*kernel)(Params...);
    std::tuple<std::decay_t<Params>...> args;
};

inline Status status_of(int code, const char* what) {
    Status status{};
    status.code = code;
    status.what = code == 0 ? nullptr : what;
    return status;
}
}  // namespace detail

template <class... Params, class... Args>
[[nodiscard]] Status launch(const LaunchCfg& cfg, void (*kernel)(Params...), Args&&... args) {
    static_assert(sizeof...(Params) == sizeof...(Args), "one argument per kernel parameter");
    static_assert((std::is_trivially_copyable_v<std::decay_t<Params>> && ...),
                  "kernel parameters are copied as bytes");
    static_assert((!std::is_reference_v<Params> && ...), "kernel parameters are passed by value");
    const detail::Frame<Params...> frame{
        kernel,
        std::tuple<std::decay_t<Params>...>(static_cast<Params>(std::forward<Args>(args))...)};
    emu::LaunchRequest request{};
    request.grid = {cfg.grid.x, cfg.grid.y, cfg.grid.z};
    request.block = {cfg.block.x, cfg.block.y, cfg.block.z};
    request.smem = cfg.smem;
    request.cooperative = cfg.cooperative;
    request.body = [](const void* opaque) {
        const auto* f = static_cast<const detail::Frame<Params...>*>(opaque);
        std::apply(f->kernel, f->args);
    };
    request.frame = &frame;
    request.frame_bytes = sizeof(frame);
    const char* what = nullptr;
    const int code = emu::run(request, &what);
    return detail::status_of(code, what);
}

// `count` elements of T at byte `offset` of dynamic shared memory, with bounds.
template <class T>
T* smem_at(unsigned char* base, size_t offset, size_t count, const char* file = __builtin_FILE(),
           int line = __builtin_LINE()) {
    emu::shared_array(base, offset, count * sizeof(T), alignof(T), emu::Site{file, line});
    return reinterpret_cast<T*>(base + offset);
}

[[nodiscard]] inline Status sm_count(int* count) {
    *count = emu::multiprocessors();
    return Status{};
}

template <class... Params>
[[nodiscard]] Status max_resident_blocks(void (*)(Params...), int, size_t, int* count) {
    *count = emu::resident_limit();
    return Status{};
}

[[nodiscard]] inline Status memset_async(void* data, int byte, size_t bytes, Stream) {
    std::memset(data, byte, bytes);
    return Status{};
}

}  // namespace specdec::cu

// A static char per declaration (and per template instantiation) identifies the array in its block.
#define CU_SHARED(name, ...)                                                                  \
    static const char name##_key = 0;                                                         \
    auto& name = *static_cast<typename ::specdec::cu::detail::identity<__VA_ARGS__>::type*>(  \
        ::specdec::emu::shared_static(                                                        \
            &name##_key, sizeof(typename ::specdec::cu::detail::identity<__VA_ARGS__>::type), \
            alignof(typename ::specdec::cu::detail::identity<__VA_ARGS__>::type), #name,      \
            ::specdec::emu::Site{__FILE__, __LINE__}))
#define CU_DYN_SHARED(name) unsigned char* const name = ::specdec::emu::shared_dynamic()
