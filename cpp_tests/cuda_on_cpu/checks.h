// What one access must satisfy: it lies in a tensor or a shared array, reads data that is there and
// does not race. The hooks build only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "race.h"
#include "runtime.h"

namespace specdec::emu::checks {

extern bool races_on;     // races, uninitialised and in-flight reads
extern bool counters_on;  // sectors, wavefronts

void begin_launch();
void begin_block(const Block& block);

// Checks an access of `fiber` and counts it.
void access(Fiber& fiber, uintptr_t address, size_t bytes, race::Access kind, race::Place place);
bool in_shared(const Block& block, uintptr_t address);

// Shared memory: a new array, which nobody has written; a copy into it that is under way, has come.
void declare(const Block& block, size_t offset, size_t bytes);
void copy_begins(const Block& block, size_t offset, size_t bytes);
void copy_ends(const Block& block, size_t offset, size_t bytes);

// Bytes that kernels have moved, by tensor, as a JSON object.
std::string traffic_json();
void reset_traffic();

}  // namespace specdec::emu::checks
