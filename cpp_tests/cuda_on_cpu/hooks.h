// What the runtime tells the detectors of the hooks build. Called only if kHooks.
#pragma once

#include "runtime.h"

namespace specdec::emu::hooks {

void launch_begin(const LaunchRequest& request);
void launch_end();
void block_begin(Block& block);
void block_end(Block& block);

// Ordering between threads.
void block_synchronized(Block& block);
void warp_synchronized(Warp& warp, unsigned mask);  // __syncwarp
// bar.arrive and bar.sync: each arrival, then, when all have come, those that waited (`caller` is
// the last arrival if it waits too, else null).
void named_arrived(Fiber& fiber, int id);
void named_synchronized(Block& block, int id, const std::vector<Fiber*>& waiting, Fiber* caller);
void grid_synchronized();
void fence();

// All lanes of the mask have reached one point: accesses after it belong to new instructions.
void warp_met(Warp& warp, unsigned mask);

// Accesses made on behalf of an operation, with its place in the source.
void atomic(void* address, int bytes, bool acq_rel, Site site);
void acquire(const void* address, int bytes, Site site);
void release(void* address, int bytes, Site site);
void async_issued(const AsyncCopy& copy);
void async_delivered(const AsyncCopy& copy);
void ldmatrix(Warp& warp, const Rendezvous& meeting, int lanes);
void shared_array_added(Block& block, size_t offset, size_t bytes);

std::string stats_json();  // members of an object
void stats_reset();

}  // namespace specdec::emu::hooks
