#include "checks.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "counters.h"
#include "emu_test.h"
#include "symbols.h"

namespace specdec::emu::checks {

bool races_on = true;
bool counters_on = true;

namespace {

using counters::Space;
using race::Access;
using race::Place;

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
    uint64_t bytes;  // of the largest region of this name
};
std::vector<Traffic> traffic;  // of regions that are gone

void keep_traffic(const Region& region) {
    for (Traffic& t : traffic) {
        if (t.name == region.name) {
            t.read_bytes += region.read_bytes;
            t.written_bytes += region.written_bytes;
            t.bytes = std::max<uint64_t>(t.bytes, region.end - region.begin);
            return;
        }
    }
    traffic.push_back(
        Traffic{region.name, region.read_bytes, region.written_bytes, region.end - region.begin});
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

bool in_frame(uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(machine.request->frame) <
           machine.request->frame_bytes;
}

}  // namespace

bool in_shared(const Block& block, uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(block.shared) < block.shared_bytes;
}

void access(Fiber& fiber, uintptr_t address, size_t bytes, Access kind, Place place) {
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

void begin_launch() {
    for (Region& region : regions) {
        region.never_written = region.read_only;
        for (const Region& other : regions) {
            if (!other.read_only && other.begin < region.end && region.begin < other.end) {
                region.never_written = false;
            }
        }
    }
    shared_states.resize(std::max(shared_states.size(), machine.blocks.size()));
}

void begin_block(const Block& block) {
    shared_states[block.slot].assign(block.shared_bytes, kNoArray);
}

void declare(const Block& block, size_t offset, size_t bytes) {
    std::memset(&shared_states[block.slot][offset], kUninitialised, bytes);
}

void copy_begins(const Block& block, size_t offset, size_t bytes) {
    std::memset(&shared_states[block.slot][offset], kInFlight, bytes);
}

void copy_ends(const Block& block, size_t offset, size_t bytes) {
    std::memset(&shared_states[block.slot][offset], kInitialised, bytes);
}

std::string traffic_json() {
    for (Region& region : regions) {
        keep_traffic(region);
        region.read_bytes = region.written_bytes = 0;
    }
    std::string tensors;
    for (const Traffic& t : traffic) {
        tensors += (tensors.empty() ? "" : ", ") + ("\"" + t.name + "\": {\"read_bytes\": ") +
                   std::to_string(t.read_bytes) +
                   ", \"written_bytes\": " + std::to_string(t.written_bytes) +
                   ", \"bytes\": " + std::to_string(t.bytes) + "}";
    }
    return "{" + tensors + "}";
}

void reset_traffic() {
    traffic.clear();
    for (Region& region : regions) region.read_bytes = region.written_bytes = 0;
}

}  // namespace specdec::emu::checks

namespace checks = specdec::emu::checks;

extern "C" {

void emu_register(const void* pointer, long long bytes, const char* name, int read_only) {
    const auto begin = reinterpret_cast<uintptr_t>(pointer);
    checks::regions.push_back(checks::Region{begin, begin + static_cast<uintptr_t>(bytes), name,
                                             read_only != 0, false, 0, 0});
}

void emu_unregister(const void* pointer) {
    for (size_t i = checks::regions.size(); i-- > 0;) {
        if (checks::regions[i].begin != reinterpret_cast<uintptr_t>(pointer)) continue;
        checks::keep_traffic(checks::regions[i]);
        checks::regions.erase(checks::regions.begin() + static_cast<std::ptrdiff_t>(i));
        return;
    }
}

void emu_unregister_all() {
    for (const auto& region : checks::regions) checks::keep_traffic(region);
    checks::regions.clear();
}

void emu_hooks_config(int race, int count) {
    checks::races_on = race != 0;
    checks::counters_on = count != 0;
}

}  // extern "C"
