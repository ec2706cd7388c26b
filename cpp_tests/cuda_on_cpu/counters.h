// What each source line costs: 32-byte sectors of global memory, wavefronts of shared memory.
//
// Lanes run one after the other, so the n-th execution of an instruction by each lane, counted from
// the last point where the whole warp met, is taken as one warp-wide access.
#pragma once

#include <cstdint>
#include <string>

#include "race.h"

namespace specdec::emu::counters {

enum class Space : uint8_t { kGlobal, kShared };

void begin_launch();
void begin_block(const Block& block);
// `group` lanes make one wavefront at best: 32 for accesses of up to 4 bytes, 16 for 8, 8 for 16.
void access(const Fiber& fiber, uintptr_t address, unsigned bytes, bool write, Space space,
            race::Place place);
// All lanes of the warp are at one point: what has been gathered is complete.
void flush(const Warp& warp);

void reset();
std::string lines_json();   // one object per source line, space and direction
std::string totals_json();  // the sums, as members of an object

}  // namespace specdec::emu::counters
