// The hooks build: the compiler calls __tsan_readN/__tsan_writeN for every access of kernel code.
#include "hooks.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "counters.h"
#include "emu_test.h"
#include "race.h"
#include "symbols.h"

namespace specdec::emu {

namespace hooks {

namespace {

using counters::Space;
using race::Access;
using race::Place;

bool races_on = true;
bool counters_on = true;

// ---- registered memory --------------------------------------------------------------------------

struct Region {
    uintptr_t begin, end;
    std::string name;
    bool read_only;
    bool never_written;  // and no other region overlaps that may be: reads cannot race
    uint64_t read_bytes, written_bytes;
};

std::vector<Region> regions;
size_t last_region = 0;
struct Traffic {
    std::string name;
    uint64_t read_bytes, written_bytes;
};
std::vector<Traffic> traffic;  // of regions that are gone

void keep_traffic(const Region& region) {
    for (Traffic& t : traffic) {
        if (t.name == region.name) {
            t.read_bytes += region.read_bytes;
            t.written_bytes += region.written_bytes;
            return;
        }
    }
    traffic.push_back(Traffic{region.name, region.read_bytes, region.written_bytes});
}

bool allows(const Region& region, uintptr_t address, size_t bytes, bool write) {
    return address >= region.begin && address + bytes <= region.end && !(write && region.read_only);
}

[[noreturn]] void report_bounds(Fiber& fiber, uintptr_t address, size_t bytes, bool write,
                                Place place) {
    const std::string where = symbols::token(place);
    const char* what = write ? "write" : "read";
    if (in_any_stack(address)) {
        fail(Site{nullptr, 0}, "%s: %s of %zu bytes in the stack of another thread", where.c_str(),
             what, bytes);
    }
    const Region* nearest = nullptr;
    uintptr_t distance = UINTPTR_MAX;
    for (const Region& r : regions) {
        if (address >= r.begin && address + bytes <= r.end) {
            fail(Site{nullptr, 0}, "%s: write of %zu bytes to %s, which is read-only",
                 where.c_str(), bytes, r.name.c_str());
        }
        const uintptr_t d =
            address < r.begin ? r.begin - address : address - std::min(address, r.end);
        if (d < distance) {
            distance = d;
            nearest = &r;
        }
    }
    (void)fiber;
    const bool before = address < nearest->begin;
    const auto size = static_cast<size_t>(nearest->end - nearest->begin);
    fail(Site{nullptr, 0}, "%s: out of bounds: %s of %zu bytes %zu bytes %s %s (%zu bytes)",
         where.c_str(), what, bytes,
         static_cast<size_t>(before ? nearest->begin - address : address - nearest->begin),
         before ? "before" : "after the start of", nearest->name.c_str(), size);
}

void global_access(Fiber& fiber, uintptr_t address, size_t bytes, Access kind, Place place) {
    const bool write = kind == Access::kWrite || kind == Access::kAtomicWrite;
    bool may_race = true;
    if (!regions.empty()) {
        if (last_region >= regions.size() || !allows(regions[last_region], address, bytes, write)) {
            size_t i = 0;
            while (i < regions.size() && !allows(regions[i], address, bytes, write)) ++i;
            if (i == regions.size()) report_bounds(fiber, address, bytes, write, place);
            last_region = i;
        }
        Region& region = regions[last_region];
        (write ? region.written_bytes : region.read_bytes) += bytes;
        may_race = !region.never_written;
    }
    if (races_on && may_race) race::access_global(fiber, address, bytes, kind, place);
    if (counters_on && (kind == Access::kRead || kind == Access::kWrite)) {
        counters::access(fiber, address, static_cast<unsigned>(bytes), write, Space::kGlobal,
                         place);
    }
}

// ---- shared memory ------------------------------------------------------------------------------

enum ByteState : unsigned char { kNoArray, kUninitialised, kInitialised, kInFlight };

std::vector<std::vector<unsigned char>> shared_states;  // [block slot][byte]

const SharedArray* array_at(const Block& block, size_t offset) {
    for (const SharedArray& array : block.arrays) {
        if (offset >= array.offset && offset < array.offset + array.bytes) return &array;
    }
    return nullptr;
}

[[noreturn]] void report_shared(const Block& block, size_t offset, size_t bytes, bool write,
                                Place place, unsigned char state) {
    const std::string where = symbols::token(place);
    const char* what = write ? "write" : "read";
    if (state == kNoArray) {
        const SharedArray* before = nullptr;
        for (const SharedArray& array : block.arrays) {
            if (array.offset <= offset + bytes &&
                (before == nullptr || array.offset > before->offset)) {
                before = &array;
            }
        }
        if (before == nullptr) {
            fail(Site{nullptr, 0}, "%s: %s of %zu bytes of shared memory outside every array",
                 where.c_str(), what, bytes);
        }
        fail(Site{nullptr, 0},
             "%s: out of bounds: %s of %zu bytes at byte %zu of shared array %s (%zu bytes, "
             "declared at %s)",
             where.c_str(), what, bytes, offset - before->offset, before->name, before->bytes,
             describe_location(before->site.file, before->site.line).c_str());
    }
    const SharedArray* array = array_at(block, offset);
    const char* name = array == nullptr ? "?" : array->name;
    if (state == kUninitialised) {
        fail(Site{nullptr, 0}, "%s: read of uninitialised shared memory: byte %zu of %s",
             where.c_str(), array == nullptr ? offset : offset - array->offset, name);
    }
    fail(Site{nullptr, 0}, "%s: %s of shared memory with a cp.async in flight: byte %zu of %s",
         where.c_str(), what, array == nullptr ? offset : offset - array->offset, name);
}

void check_states(const Block& block, unsigned char* state, size_t offset, size_t bytes, bool write,
                  Place place) {
    for (size_t i = 0; i < bytes; ++i) {
        const bool bad =
            state[i] == kNoArray ||
            (races_on && (state[i] == kInFlight || (!write && state[i] == kUninitialised)));
        if (bad) report_shared(block, offset + i, bytes, write, place, state[i]);
    }
}

bool all_initialised(const unsigned char* state, size_t bytes) {
    constexpr uint64_t kGood = 0x0101010101010101ull * kInitialised;
    uint64_t words[2] = {kGood, kGood};
    switch (bytes) {  // sizes known to the compiler, for single instructions
        case 1:
            return *state == kInitialised;
        case 2:
            std::memcpy(words, state, 2);
            break;
        case 4:
            std::memcpy(words, state, 4);
            break;
        case 8:
            std::memcpy(words, state, 8);
            break;
        case 16:
            std::memcpy(words, state, 16);
            break;
        default:
            for (size_t i = 0; i < bytes; ++i) {
                if (state[i] != kInitialised) return false;
            }
    }
    return words[0] == kGood && words[1] == kGood;
}

void shared_access(Fiber& fiber, size_t offset, size_t bytes, Access kind, Place place) {
    Block& block = *fiber.block;
    unsigned char* state = &shared_states[block.slot][offset];
    const bool write = kind == Access::kWrite;
    if (!all_initialised(state, bytes)) {
        check_states(block, state, offset, bytes, write, place);
        if (kind == Access::kAtomicWrite) check_states(block, state, offset, bytes, false, place);
        std::memset(state, kInitialised, bytes);
    }
    if (races_on) race::access_shared(fiber, offset, bytes, kind, place);
    if (counters_on && (kind == Access::kRead || kind == Access::kWrite)) {
        counters::access(fiber, offset, static_cast<unsigned>(bytes), write, Space::kShared, place);
    }
}

// ---- every access -------------------------------------------------------------------------------

bool in_shared(const Block& block, uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(block.shared) < block.shared_bytes;
}

bool in_frame(uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(machine.request->frame) <
           machine.request->frame_bytes;
}

// An endless loop without a barrier or an atomic never comes back to the scheduler.
void expect_progress(Place place) {
    constexpr uint64_t kLimit = 200 * 1000 * 1000;
    static uint64_t switches = 0;
    static uint64_t accesses = 0;
    if (switches != machine.switches) {
        switches = machine.switches;
        accesses = 0;
    } else if (++accesses > kLimit) {
        fail(Site{nullptr, 0}, "%s: this thread runs on and on without meeting any other",
             symbols::token(place).c_str());
    }
}

void note(Fiber& fiber, uintptr_t address, size_t bytes, Access kind, Place place) {
    if (in_shared(*fiber.block, address)) {
        const size_t offset = address - reinterpret_cast<uintptr_t>(fiber.block->shared);
        if (offset + bytes <= fiber.block->shared_bytes) {
            shared_access(fiber, offset, bytes, kind, place);
            return;
        }
    }
    if (in_frame(address) || symbols::in_library(address)) return;
    global_access(fiber, address, bytes, kind, place);
}

bool in_own_stack(const Fiber& fiber, uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(fiber.stack) < stack_bytes;
}

template <size_t kBytes>
__attribute__((always_inline)) inline void on_access(void* pointer, Access kind, bool aligned,
                                                     void* return_address) {
    Fiber* fiber = current;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (fiber == nullptr || in_own_stack(*fiber, address)) return;
    const Place place = symbols::from_return_address(reinterpret_cast<uintptr_t>(return_address));
    if (aligned && address % kBytes != 0) {
        fail(Site{nullptr, 0}, "%s: misaligned access: %zu bytes at address %p",
             symbols::token(place).c_str(), kBytes, pointer);
    }
    expect_progress(place);
    note(*fiber, address, kBytes, kind, place);
}

// Copies of structs: in pieces of at most 16 bytes, as a GPU would.
void on_range(void* pointer, size_t bytes, Access kind, void* return_address) {
    Fiber* fiber = current;
    auto address = reinterpret_cast<uintptr_t>(pointer);
    if (fiber == nullptr || in_own_stack(*fiber, address)) return;
    const Place place = symbols::from_return_address(reinterpret_cast<uintptr_t>(return_address));
    expect_progress(place);
    while (bytes > 0) {
        const size_t here = std::min<size_t>(bytes, 16 - address % 16);
        note(*fiber, address, here, kind, place);
        address += here;
        bytes -= here;
    }
}

}  // namespace

// ---- what the runtime reports -------------------------------------------------------------------

void launch_begin(const LaunchRequest&) {
    for (Region& region : regions) {
        region.never_written = region.read_only;
        for (const Region& other : regions) {
            if (!other.read_only && other.begin < region.end && region.begin < other.end) {
                region.never_written = false;
            }
        }
    }
    shared_states.resize(std::max(shared_states.size(), machine.blocks.size()));
    race::begin_launch();
    race::begin_shadow();
    counters::begin_launch();
}

void launch_end() {
    if (machine.failed) machine.error = symbols::resolve(machine.error);
}

void block_begin(Block& block) {
    shared_states[block.slot].assign(block.shared_bytes, kNoArray);
    race::begin_block(block);
    race::begin_block_shadow(block);
    counters::begin_block(block);
}

void block_end(Block& block) {
    for (const Warp& warp : block.warps) counters::flush(warp);
}

void shared_array_added(Block& block, size_t offset, size_t bytes) {
    std::memset(&shared_states[block.slot][offset], kUninitialised, bytes);
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
    note(self, a, static_cast<size_t>(bytes), Access::kAtomicWrite, symbols::from_site(site));
    if (!races_on || in_shared(*self.block, a)) return;
    race::acquire(self, address);
    race::release(self, address, acq_rel);
}

void acquire(const void* address, int bytes, Site site) {
    if (current == nullptr) return;
    note(*current, reinterpret_cast<uintptr_t>(address), static_cast<size_t>(bytes),
         Access::kAtomicRead, symbols::from_site(site));
    if (races_on) race::acquire(*current, address);
}

void release(void* address, int bytes, Site site) {
    if (current == nullptr) return;
    note(*current, reinterpret_cast<uintptr_t>(address), static_cast<size_t>(bytes),
         Access::kAtomicWrite, symbols::from_site(site));
    if (races_on) race::release(*current, address, true);
}

void async_issued(const AsyncCopy& copy) {
    Fiber& self = *current;
    const Place place = symbols::from_site(copy.site);
    const auto bytes = static_cast<size_t>(copy.bytes);
    if (copy.valid) note(self, reinterpret_cast<uintptr_t>(copy.gmem), bytes, Access::kRead, place);
    note(self, reinterpret_cast<uintptr_t>(copy.smem), bytes, Access::kWrite, place);
    const Block& block = *self.block;
    std::memset(&shared_states[block.slot][static_cast<size_t>(copy.smem - block.shared)],
                kInFlight, bytes);
}

void async_delivered(const AsyncCopy& copy) {
    Fiber& self = *current;
    const auto bytes = static_cast<size_t>(copy.bytes);
    const auto offset = static_cast<size_t>(copy.smem - self.block->shared);
    std::memset(&shared_states[self.block->slot][offset], kInitialised, bytes);
    if (races_on) {
        race::access_shared(self, offset, bytes, Access::kWrite, symbols::from_site(copy.site));
    }
}

void ldmatrix(Warp& warp, const Rendezvous& meeting, int lanes) {
    const Place place = symbols::from_site(meeting.site);
    for (int lane = 0; lane < lanes; ++lane) {
        const auto* args = static_cast<const LdmatrixArgs*>(meeting.args[lane]);
        note(warp.lanes[lane], reinterpret_cast<uintptr_t>(args->row), 16, Access::kRead, place);
    }
}

}  // namespace hooks
}  // namespace specdec::emu

// ---- called by instrumented code ----------------------------------------------------------------

namespace hooks = specdec::emu::hooks;
using specdec::emu::race::Access;

extern "C" {

#define EMU_HOOK(bytes)                                                                \
    void __tsan_read##bytes(void* p) {                                                 \
        hooks::on_access<bytes>(p, Access::kRead, true, __builtin_return_address(0));  \
    }                                                                                  \
    void __tsan_write##bytes(void* p) {                                                \
        hooks::on_access<bytes>(p, Access::kWrite, true, __builtin_return_address(0)); \
    }                                                                                  \
    void __tsan_unaligned_read##bytes(void* p) {                                       \
        hooks::on_range(p, bytes, Access::kRead, __builtin_return_address(0));         \
    }                                                                                  \
    void __tsan_unaligned_write##bytes(void* p) {                                      \
        hooks::on_range(p, bytes, Access::kWrite, __builtin_return_address(0));        \
    }
EMU_HOOK(1)
EMU_HOOK(2)
EMU_HOOK(4)
EMU_HOOK(8)
EMU_HOOK(16)
#undef EMU_HOOK

void __tsan_read_range(void* p, unsigned long bytes) {
    hooks::on_range(p, bytes, Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* p, unsigned long bytes) {
    hooks::on_range(p, bytes, Access::kWrite, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
    hooks::on_range(const_cast<void*>(from), bytes, Access::kRead, __builtin_return_address(0));
    hooks::on_range(to, bytes, Access::kWrite, __builtin_return_address(0));
    return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
    hooks::on_range(const_cast<void*>(from), bytes, Access::kRead, __builtin_return_address(0));
    hooks::on_range(to, bytes, Access::kWrite, __builtin_return_address(0));
    return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int byte, unsigned long bytes) {
    hooks::on_range(to, bytes, Access::kWrite, __builtin_return_address(0));
    return std::memset(to, byte, bytes);
}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// ---- the test side ------------------------------------------------------------------------------

void emu_register(const void* pointer, long long bytes, const char* name, int read_only) {
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    hooks::regions.push_back(hooks::Region{begin, begin + static_cast<uintptr_t>(bytes), name,
                                           read_only != 0, false, 0, 0});
}

void emu_unregister(const void* pointer) {
    for (size_t i = hooks::regions.size(); i-- > 0;) {
        if (hooks::regions[i].begin != reinterpret_cast<uintptr_t>(pointer)) continue;
        hooks::keep_traffic(hooks::regions[i]);
        hooks::regions.erase(hooks::regions.begin() + static_cast<std::ptrdiff_t>(i));
        return;
    }
}

void emu_unregister_all() {
    for (const auto& region : hooks::regions) hooks::keep_traffic(region);
    hooks::regions.clear();
}

void emu_hooks_config(int race, int count) {
    hooks::races_on = race != 0;
    hooks::counters_on = count != 0;
}

}  // extern "C"

namespace specdec::emu::hooks {

std::string stats_json() {
    std::vector<Region> live = regions;
    for (const Region& region : live) keep_traffic(region);
    for (Region& region : regions) region.read_bytes = region.written_bytes = 0;
    std::string tensors;
    for (const Traffic& t : traffic) {
        tensors += (tensors.empty() ? "" : ", ") + ("\"" + t.name + "\": {\"read_bytes\": ") +
                   std::to_string(t.read_bytes) +
                   ", \"written_bytes\": " + std::to_string(t.written_bytes) + "}";
    }
    return counters::totals_json() + ", \"tensors\": {" + tensors +
           "}, \"lines\": " + counters::lines_json();
}

void stats_reset() {
    counters::reset();
    traffic.clear();
    for (Region& region : regions) region.read_bytes = region.written_bytes = 0;
}

}  // namespace specdec::emu::hooks
