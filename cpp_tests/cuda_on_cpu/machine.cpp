// The state of the machine, its settings from the environment, and what device code may ask of it.
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace specdec::emu {

Machine machine;
Fiber* current = nullptr;
size_t stack_bytes = (EMU_ASAN ? 256 : 64) * 1024;

namespace {

uint64_t env_number(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr || *text == 0 ? otherwise : std::strtoull(text, nullptr, 0);
}

struct ReadEnvironment {
    ReadEnvironment() {
        Settings& s = machine.settings;
        s.order = static_cast<Order>(env_number("EMU_ORDER", 0) & 3);
        s.seed = env_number("EMU_SEED", s.seed);
        s.resident = static_cast<unsigned>(env_number("EMU_RESIDENT", s.resident));
    }
} read_environment;

}  // namespace

std::string describe_location(const char* file, int line) {
    if (file == nullptr) return "?";
    const char* shown = file;
    for (const char* mark : {"/csrc/", "/cpp_tests/"}) {
        if (const char* found = std::strstr(file, mark)) {
            shown = found + 1;
            break;
        }
    }
    return std::string(shown) + ":" + std::to_string(line);
}

Index3 thread_idx() {
    return current->index;
}
Index3 block_idx() {
    return current->block->index;
}
Index3 block_dim() {
    return machine.request->block;
}
Index3 grid_dim() {
    return machine.request->grid;
}
unsigned lane_id() {
    return current->lane;
}
uint64_t clock_ticks() {
    return machine.switches;
}
int resident_limit() {
    return static_cast<int>(machine.settings.max_coop_blocks);
}
int multiprocessors() {
    return static_cast<int>(machine.settings.multiprocessors);
}

}  // namespace specdec::emu
