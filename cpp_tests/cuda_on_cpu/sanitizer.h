// Tells AddressSanitizer about stacks and shared memory; nothing in the other builds.
#pragma once

#include "runtime.h"

#if EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace specdec::emu::sanitizer {

#if EMU_ASAN

struct HostStack {
    const void* bottom = nullptr;
    size_t bytes = 0;
    void* fake = nullptr;
    bool known = false;
};
inline HostStack host_stack;
inline void* fake_stack = nullptr;  // of the context being left; handed over right after the switch

inline void enter_host() {
    host_stack.known = false;
}
inline void before_switch(const void* bottom, size_t bytes) {
    __sanitizer_start_switch_fiber(&fake_stack, bottom, bytes);
}
inline void before_switch_no_return(const void* bottom, size_t bytes) {
    __sanitizer_start_switch_fiber(nullptr, bottom, bytes);
}
inline void before_host_switch() {
    __sanitizer_start_switch_fiber(&fake_stack, host_stack.bottom, host_stack.bytes);
}
inline void after_switch() {
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}
inline void after_first_switch() {
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (!host_stack.known) {
        host_stack.bottom = bottom;
        host_stack.bytes = bytes;
        host_stack.known = true;
    }
}
inline void before_last_switch() {}
inline void poison(const void* begin, size_t bytes) {
    __asan_poison_memory_region(begin, bytes);
}
inline void unpoison(const void* begin, size_t bytes) {
    __asan_unpoison_memory_region(begin, bytes);
}

#else

inline void enter_host() {}
inline void before_switch(const void*, size_t) {}
inline void before_switch_no_return(const void*, size_t) {}
inline void before_host_switch() {}
inline void after_switch() {}
inline void after_first_switch() {}
inline void before_last_switch() {}
inline void poison(const void*, size_t) {}
inline void unpoison(const void*, size_t) {}

#endif

}  // namespace specdec::emu::sanitizer
