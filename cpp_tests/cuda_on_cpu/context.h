// Switching stacks. Hand-written on x86-64 (a few nanoseconds), ucontext elsewhere or with
// EMU_UCONTEXT.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT
#endif

#if defined(EMU_UCONTEXT)
#include <ucontext.h>
#endif

namespace specdec::emu {

struct Context {
#if defined(EMU_UCONTEXT)
    ucontext_t state;
#else
    void* sp = nullptr;
#endif
};

#if defined(EMU_UCONTEXT)

inline void context_make(Context& context, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = bytes;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}

inline void context_switch(Context& from, Context& to) {
    swapcontext(&from.state, &to.state);
}

#else

// Saves the callee-saved registers on the current stack, its top in *save_sp, and resumes
// `load_sp`.
extern "C" __attribute__((visibility("hidden"))) void emu_switch_stack(void** save_sp,
                                                                       void* load_sp);

inline void context_make(Context& context, char* stack, size_t bytes, void (*entry)()) {
    constexpr int kSavedRegisters = 6;
    auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~static_cast<uintptr_t>(15);
    auto* frame = reinterpret_cast<void**>(top);
    *--frame =
        nullptr;  // where a return address would lie: keeps the alignment of a called function
    *--frame = reinterpret_cast<void*>(entry);
    for (int i = 0; i < kSavedRegisters; ++i) *--frame = nullptr;
    context.sp = frame;
}

inline void context_switch(Context& from, Context& to) {
    emu_switch_stack(&from.sp, to.sp);
}

#endif

}  // namespace specdec::emu
