// The hooks build: what the runtime reports, passed on to the detectors.
#include "hooks.h"

#include "checks.h"
#include "counters.h"
#include "race.h"
#include "symbols.h"

namespace specdec::emu::hooks {

using race::Access;
using race::Place;

void launch_begin(const LaunchRequest&) {
    checks::begin_launch();
    race::begin_launch();
    race::begin_shadow();
    counters::begin_launch();
}

void launch_end() {
    if (machine.failed) machine.error = symbols::resolve(machine.error);
}

void block_begin(Block& block) {
    checks::begin_block(block);
    race::begin_block(block);
    race::begin_block_shadow(block);
    counters::begin_block(block);
}

void block_end(Block& block) {
    for (const Warp& warp : block.warps) counters::flush(warp);
}

void shared_array_added(Block& block, size_t offset, size_t bytes) {
    checks::declare(block, offset, bytes);
}

void block_synchronized(Block& block) {
    race::block_synchronized(block);
    for (const Warp& warp : block.warps) counters::flush(warp);
}

void warp_synchronized(Warp& warp, unsigned mask) {
    race::warp_synchronized(warp, mask);
}

void warp_met(Warp& warp, unsigned mask) {
    if ((mask | warp.exited) == warp.existing) counters::flush(warp);
}

void named_arrived(Fiber& fiber, int id) {
    race::named_arrived(fiber, id);
}

void named_synchronized(Block& block, int id, const std::vector<Fiber*>& waiting, Fiber* caller) {
    race::named_synchronized(block, id, waiting, caller);
}

void grid_synchronized() {
    race::grid_synchronized();
}

void fence() {
    race::fence(*current);
}

void atomic(void* address, int bytes, bool acq_rel, Site site) {
    if (current == nullptr) return;
    Fiber& self = *current;
    const auto a = reinterpret_cast<uintptr_t>(address);
    checks::access(self, a, static_cast<size_t>(bytes), Access::kAtomicWrite,
                   symbols::from_site(site));
    if (!checks::races_on || checks::in_shared(*self.block, a)) return;
    race::acquire(self, address);
    race::release(self, address, acq_rel);
}

void acquire(const void* address, int bytes, Site site) {
    if (current == nullptr) return;
    checks::access(*current, reinterpret_cast<uintptr_t>(address), static_cast<size_t>(bytes),
                   Access::kAtomicRead, symbols::from_site(site));
    if (checks::races_on) race::acquire(*current, address);
}

void release(void* address, int bytes, Site site) {
    if (current == nullptr) return;
    checks::access(*current, reinterpret_cast<uintptr_t>(address), static_cast<size_t>(bytes),
                   Access::kAtomicWrite, symbols::from_site(site));
    if (checks::races_on) race::release(*current, address, true);
}

void async_issued(const AsyncCopy& copy) {
    Fiber& self = *current;
    const Place place = symbols::from_site(copy.site);
    const auto bytes = static_cast<size_t>(copy.bytes);
    if (copy.valid)
        checks::access(self, reinterpret_cast<uintptr_t>(copy.gmem), bytes, Access::kRead, place);
    checks::access(self, reinterpret_cast<uintptr_t>(copy.smem), bytes, Access::kWrite, place);
    const Block& block = *self.block;
    checks::copy_begins(block, static_cast<size_t>(copy.smem - block.shared), bytes);
}

void async_delivered(const AsyncCopy& copy) {
    Fiber& self = *current;
    const auto bytes = static_cast<size_t>(copy.bytes);
    const auto offset = static_cast<size_t>(copy.smem - self.block->shared);
    checks::copy_ends(*self.block, offset, bytes);
    if (checks::races_on) {
        race::access_shared(self, offset, bytes, Access::kWrite, symbols::from_site(copy.site));
    }
}

void ldmatrix(Warp& warp, const Rendezvous& meeting, int lanes) {
    const Place place = symbols::from_site(meeting.site);
    for (int lane = 0; lane < lanes; ++lane) {
        const auto* args = static_cast<const LdmatrixArgs*>(meeting.args[lane]);
        checks::access(warp.lanes[lane], reinterpret_cast<uintptr_t>(args->row), 16, Access::kRead,
                       place);
    }
}

std::string stats_json() {
    return counters::totals_json() + ", \"tensors\": " + checks::traffic_json() +
           ", \"lines\": " + counters::lines_json();
}

void stats_reset() {
    counters::reset();
    checks::reset_traffic();
}

}  // namespace specdec::emu::hooks
