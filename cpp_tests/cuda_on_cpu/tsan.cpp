// The callbacks that the compiler inserts with -fsanitize=thread, without libtsan.
#include <algorithm>
#include <cstring>

#include "checks.h"
#include "symbols.h"

namespace specdec::emu::checks {
namespace {

using race::Access;
using race::Place;

// An endless loop without a barrier or an atomic never comes back to the scheduler.
void expect_progress(Place place) {
    constexpr uint64_t kLimit = 200 * 1000 * 1000;
    static uint64_t switches = 0;
    static uint64_t accesses = 0;
    if (switches != machine.switches) {
        switches = machine.switches;
        accesses = 0;
    } else if (++accesses > kLimit) {
        fail(Site{nullptr, 0}, "%s: this thread runs on and on without meeting any other",
             symbols::token(place).c_str());
    }
}

bool in_own_stack(const Fiber& fiber, uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(fiber.stack) < stack_bytes;
}

template <size_t kBytes>
__attribute__((always_inline)) inline void on_access(void* pointer, Access kind, bool aligned,
                                                     void* return_address) {
    Fiber* fiber = current;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (fiber == nullptr || in_own_stack(*fiber, address)) return;
    const Place place = symbols::from_return_address(reinterpret_cast<uintptr_t>(return_address));
    if (aligned && address % kBytes != 0) {
        fail(Site{nullptr, 0}, "%s: misaligned access: %zu bytes at address %p",
             symbols::token(place).c_str(), kBytes, pointer);
    }
    expect_progress(place);
    checks::access(*fiber, address, kBytes, kind, place);
}

// Copies of structs: in pieces of at most 16 bytes, as a GPU would.
void on_range(void* pointer, size_t bytes, Access kind, void* return_address) {
    Fiber* fiber = current;
    auto address = reinterpret_cast<uintptr_t>(pointer);
    if (fiber == nullptr || in_own_stack(*fiber, address)) return;
    const Place place = symbols::from_return_address(reinterpret_cast<uintptr_t>(return_address));
    expect_progress(place);
    while (bytes > 0) {
        const size_t here = std::min<size_t>(bytes, 16 - address % 16);
        checks::access(*fiber, address, here, kind, place);
        address += here;
        bytes -= here;
    }
}

}  // namespace
}  // namespace specdec::emu::checks

namespace checks = specdec::emu::checks;
using specdec::emu::race::Access;

extern "C" {

#define EMU_HOOK(bytes)                                                                 \
    void __tsan_read##bytes(void* p) {                                                  \
        checks::on_access<bytes>(p, Access::kRead, true, __builtin_return_address(0));  \
    }                                                                                   \
    void __tsan_write##bytes(void* p) {                                                 \
        checks::on_access<bytes>(p, Access::kWrite, true, __builtin_return_address(0)); \
    }                                                                                   \
    void __tsan_unaligned_read##bytes(void* p) {                                        \
        checks::on_range(p, bytes, Access::kRead, __builtin_return_address(0));         \
    }                                                                                   \
    void __tsan_unaligned_write##bytes(void* p) {                                       \
        checks::on_range(p, bytes, Access::kWrite, __builtin_return_address(0));        \
    }
EMU_HOOK(1)
EMU_HOOK(2)
EMU_HOOK(4)
EMU_HOOK(8)
EMU_HOOK(16)
#undef EMU_HOOK

void __tsan_read_range(void* p, unsigned long bytes) {
    checks::on_range(p, bytes, Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
    checks::on_range(p, bytes, Access::kWrite, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
    checks::on_range(const_cast<void*>(from), bytes, Access::kRead, __builtin_return_address(0));
    checks::on_range(to, bytes, Access::kWrite, __builtin_return_address(0));
    return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
    checks::on_range(const_cast<void*>(from), bytes, Access::kRead, __builtin_return_address(0));
    checks::on_range(to, bytes, Access::kWrite, __builtin_return_address(0));
    return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int byte, unsigned long bytes) {
    checks::on_range(to, bytes, Access::kWrite, __builtin_return_address(0));
    return std::memset(to, byte, bytes);
}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

}  // extern "C"
