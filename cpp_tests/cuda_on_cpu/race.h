// Happens-before race detection: who is ordered before whom (clocks), and who touched what
// (shadow).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "runtime.h"

namespace specdec::emu::race {

// A place in kernel source: an offset into this library (return address of a hook), or, with the
// top bit set, the number of a Site. symbols.h turns it into file:line.
using Place = uint32_t;

enum class Access : uint8_t { kRead, kWrite, kAtomicRead, kAtomicWrite };

// ---- clocks -------------------------------------------------------------------------------------
// Every thread counts its own release points: barriers, fences, released stores. An access is
// stamped with (thread, its clock). Thread t is ordered after the access (u, c) if t knows u's
// clock up to c. Knowledge inside a block: `full` through block barriers (all threads of the block
// know it), `warp_sync` through whole-warp __syncwarp (all lanes of the warp), `lane` through
// partial __syncwarp (one lane), `named` through named barriers (one warp). Knowledge across
// blocks, and inside a block through global memory, comes from acquiring a variable that was
// released.

using Clocks = std::vector<uint32_t>;  // of the threads of one block
using ClocksPtr = std::shared_ptr<const Clocks>;
// What is known of the threads of a block: of everything they did (no variable), or only of their
// atomics on one variable. The latter comes from the order of the atomics themselves, without any
// fence.
using Foreign = std::map<std::pair<uint64_t, const void*>, ClocksPtr>;
using ForeignPtr = std::shared_ptr<const Foreign>;

struct ThreadClock {
    uint32_t now = 1;
    uint32_t fence_clock = 0;  // accesses up to here are before this thread's last fence
    Clocks fence_known;        // what it knew at that fence
    ForeignPtr fence_foreign;
    ForeignPtr foreign;
    const void* acquired = nullptr;  // last variable acquired, in which version
    uint64_t acquired_version = 0;
};

struct BlockClock {
    std::vector<ThreadClock> threads;
    Clocks full;
    Clocks warp_sync;
    Clocks lane;   // [threads][32]
    Clocks named;  // [warps][threads]
    struct Gathering {
        Clocks known;
        ForeignPtr foreign;
    } barriers[kNumBarriers];
    bool lane_used = false;
    bool named_used = false;
    bool any_fence = false;
    bool any_foreign = false;
};

void begin_launch();
void begin_block(Block& block);
void block_synchronized(Block& block);
void warp_synchronized(Warp& warp, unsigned mask);
void named_arrived(Fiber& fiber, int id);
void named_synchronized(Block& block, int id, const std::vector<Fiber*>& waiting, Fiber* caller);
void grid_synchronized();
void fence(Fiber& fiber);
void acquire(Fiber& fiber, const void* variable);
// `all`: everything the thread knows (st.release); otherwise what fences cover (fence, then
// atomic).
void release(Fiber& fiber, const void* variable, bool all);

uint32_t now(const Fiber& fiber);
uint32_t global_thread(const Fiber& fiber);
// `variable`: the address, if the other access was an atomic.
bool ordered(const Fiber& fiber, uint32_t other_thread, uint32_t clock, const void* variable);

// ---- shadow -------------------------------------------------------------------------------------

void begin_shadow();                          // of a launch
void begin_block_shadow(const Block& block);  // forgets the shared memory of the slot

// Notes an access and fails the launch if it races with an earlier one. Shared memory has a shadow
// per block slot, all else one by address.
void access_shared(Fiber& fiber, size_t offset, size_t bytes, Access kind, Place place);
void access_global(Fiber& fiber, uintptr_t address, size_t bytes, Access kind, Place place);

}  // namespace specdec::emu::race
