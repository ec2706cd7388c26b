// The C interface for tests: C++ or Python through ctypes.
#include "emu_test.h"

#include <string>

#include "hooks.h"
#include "runtime.h"

namespace specdec::emu {
namespace {
std::string text;
}  // namespace
}  // namespace specdec::emu

using specdec::emu::machine;

extern "C" {

int emu_set(const char* key, long long value) {
    auto& s = machine.settings;
    const std::string name = key;
    if (name == "order" && value >= 0 && value <= 3) {
        s.order = static_cast<specdec::emu::Order>(value);
    } else if (name == "seed") {
        s.seed = static_cast<uint64_t>(value);
    } else if (name == "resident" && value > 0) {
        s.resident = static_cast<unsigned>(value);
    } else if (name == "max_coop_blocks" && value > 0) {
        s.max_coop_blocks = static_cast<unsigned>(value);
    } else if (name == "multiprocessors" && value > 0) {
        s.multiprocessors = static_cast<unsigned>(value);
    } else if (name == "allow_exited") {
        s.allow_exited = value != 0;
    } else if (name == "cp_early") {
        s.cp_early = value != 0;
    } else {
        return -1;
    }
    return 0;
}

const char* emu_last_error() {
    specdec::emu::text = machine.error;
    return specdec::emu::text.c_str();
}

unsigned long long emu_switches() {
    return machine.switches;
}

const char* emu_flavour() {
    return specdec::emu::kHooks ? "hooks" : (specdec::emu::kAsan ? "asan" : "plain");
}

#if !EMU_HOOKS
void emu_register(const void*, long long, const char*, int) {}
void emu_unregister(const void*) {}
void emu_unregister_all() {}
void emu_hooks_config(int, int) {}
#endif

void emu_stats_reset() {
    machine.launches = machine.switches = machine.barriers = machine.collectives = 0;
    if constexpr (specdec::emu::kHooks) specdec::emu::hooks::stats_reset();
}

const char* emu_stats_json() {
    std::string json = "{\"launches\": " + std::to_string(machine.launches) +
                       ", \"switches\": " + std::to_string(machine.switches) +
                       ", \"barriers\": " + std::to_string(machine.barriers) +
                       ", \"collectives\": " + std::to_string(machine.collectives);
    if constexpr (specdec::emu::kHooks) json += ", " + specdec::emu::hooks::stats_json();
    specdec::emu::text = json + "}";
    return specdec::emu::text.c_str();
}

}  // extern "C"
