// What tests may ask of the emulator that is linked into a library of emulated kernels.
#pragma once

#define EMU_API __attribute__((visibility("default")))

extern "C" {

// Keys: order (0 forward, 1 reverse, 2 random, 3 skewed: one warp runs as far ahead as it can),
// seed, resident (blocks of an ordinary launch that run at the same time), max_coop_blocks,
// multiprocessors, allow_exited (barriers do not wait for threads that returned), cp_early
// (cp.async copies at issue). Returns 0, or -1 for an unknown key or value.
EMU_API int emu_set(const char* key, long long value);
// Text of the last launch's error, empty if it had none.
EMU_API const char* emu_last_error();
// Fiber switches since the library was loaded.
EMU_API unsigned long long emu_switches();
// "plain", "asan" or "hooks".
EMU_API const char* emu_flavour();

// Memory that kernels may access. Once anything is registered, an access outside of it, of shared
// memory and of the thread's own stack is an error (hooks build). Ranges may overlap: an access is
// good if it lies in one of them. The other builds accept these calls and do nothing.
EMU_API void emu_register(const void* pointer, long long bytes, const char* name, int read_only);
EMU_API void emu_unregister(const void* pointer);
EMU_API void emu_unregister_all();

// Switches detectors of the hooks build: races with uninitialised and in-flight reads; counters.
EMU_API void emu_hooks_config(int race, int count);
// Counters since the last reset, valid until the next call.
EMU_API const char* emu_stats_json();
EMU_API void emu_stats_reset();

}  // extern "C"
