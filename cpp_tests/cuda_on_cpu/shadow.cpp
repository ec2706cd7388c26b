// The shadow of race.h: per piece of memory the last plain write, and the reads and atomics since.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "race.h"
#include "symbols.h"

namespace specdec::emu::race {

namespace {

// Lanes of one warp that made the same kind of access at the same clock.
struct Reader {
    uint32_t warp;  // of the grid, plus 1; 0: none
    uint32_t lanes;
    uint32_t clock;
    Place place;
    Access kind;
    uint32_t next;         // index in `readers`; 0: none
    const void* variable;  // of an atomic on global memory
};

struct Cell {
    uint32_t writer;  // thread of the grid, plus 1; 0: none
    uint32_t write_clock;
    Place write_place;
    Reader first;
};

// 1 KB of memory in cells of 2^shift bytes. Pages begin with 16-byte cells and are split when an
// access is smaller, so streams of wide accesses stay cheap and neighbouring bytes are still told
// apart.
constexpr size_t kPageBytes = 1024;
constexpr unsigned kWidestShift = 4;

struct Page {
    uint64_t generation = 0;
    unsigned shift = kWidestShift;
    std::vector<Cell> cells;
};

std::vector<Reader> readers{Reader{}};
uint32_t free_reader = 0;

uint32_t take_reader(const Reader& value) {
    if (free_reader == 0) {
        readers.push_back(value);
        return static_cast<uint32_t>(readers.size() - 1);
    }
    const uint32_t index = free_reader;
    free_reader = readers[index].next;
    readers[index] = value;
    return index;
}

void drop_list(uint32_t index) {
    while (index != 0) {
        const uint32_t next = readers[index].next;
        readers[index].next = free_reader;
        free_reader = index;
        index = next;
    }
}

void drop_readers(Cell& cell) {
    drop_list(cell.first.next);
    cell.first.warp = cell.first.next = 0;
}

void reset(Page& page, uint64_t generation) {
    for (Cell& cell : page.cells) drop_list(cell.first.next);
    page.generation = generation;
    page.shift = kWidestShift;
    page.cells.assign(kPageBytes >> kWidestShift, Cell{});
}

void split(Page& page, unsigned shift) {
    const unsigned ratio_shift = page.shift - shift;
    std::vector<Cell> cells(kPageBytes >> shift);
    for (size_t i = 0; i < cells.size(); ++i) {
        cells[i] = page.cells[i >> ratio_shift];
        if ((i & ((size_t{1} << ratio_shift) - 1)) == 0) continue;
        uint32_t* link = &cells[i].first.next;  // later parts get lists of their own
        for (uint32_t from = *link; from != 0;) {
            const Reader copy = readers[from];
            const uint32_t index = take_reader(copy);
            *link = index;
            link = &readers[index].next;
            from = copy.next;
        }
    }
    page.cells = std::move(cells);
    page.shift = shift;
}

std::vector<std::vector<Page>> shared_pages;  // per block slot
std::vector<uint64_t> shared_generation;
std::unordered_map<uintptr_t, Page> global_pages;
uint64_t launch_generation = 0;

constexpr size_t kPageCache = 64;
struct CachedPage {
    uintptr_t number;
    Page* page;
} page_cache[kPageCache];

const char* name_of(Access kind) {
    switch (kind) {
        case Access::kRead:
            return "read";
        case Access::kWrite:
            return "write";
        case Access::kAtomicRead:
            return "acquiring read";
        default:
            return "atomic";
    }
}

[[noreturn]] void report(Fiber& fiber, Access kind, Place place, Access other_kind, uint32_t other,
                         Place other_place, const char* memory) {
    const unsigned threads = fiber.block->threads;
    fail(Site{nullptr, 0},
         "%s: race on %s memory: %s by thread %u of block %llu, not ordered after the %s by thread "
         "%u "
         "of block %u at %s",
         symbols::token(place).c_str(), memory, name_of(kind), fiber.linear,
         static_cast<unsigned long long>(fiber.block->linear), name_of(other_kind), other % threads,
         other / threads, symbols::token(other_place).c_str());
}

uint32_t warp_of(const Fiber& fiber) {
    return static_cast<uint32_t>(fiber.block->linear * fiber.block->warps.size() +
                                 fiber.warp->index);
}

uint32_t first_thread_of(const Fiber& fiber, uint32_t warp) {
    const auto warps = static_cast<uint32_t>(fiber.block->warps.size());
    return warp / warps * fiber.block->threads + warp % warps * kWarpSize;
}

bool conflicts(Access a, Access b) {
    if (a == Access::kWrite || b == Access::kWrite) return true;
    const bool a_atomic = a != Access::kRead;
    const bool b_atomic = b != Access::kRead;
    // Of a plain read and an atomic, one that writes.
    return a_atomic != b_atomic && (a == Access::kAtomicWrite || b == Access::kAtomicWrite);
}

// The first lane of `reader` that is not ordered before `fiber`, or -1.
int unordered_lane(const Fiber& fiber, const Reader& reader) {
    const void* variable = reader.kind == Access::kRead ? nullptr : reader.variable;
    const uint32_t first = first_thread_of(fiber, reader.warp - 1);
    for (unsigned rest = reader.lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (!ordered(fiber, first + static_cast<uint32_t>(lane), reader.clock, variable))
            return lane;
    }
    return -1;
}

void check_reader(Fiber& fiber, const Reader& reader, Access kind, Place place,
                  const char* memory) {
    if (!conflicts(kind, reader.kind)) return;
    const int lane = unordered_lane(fiber, reader);
    if (lane < 0) return;
    const uint32_t first = first_thread_of(fiber, reader.warp - 1);
    report(fiber, kind, place, reader.kind, first + static_cast<uint32_t>(lane), reader.place,
           memory);
}

void add_reader(Fiber& fiber, Cell& cell, Access kind, uint32_t clock, Place place,
                const void* variable) {
    const uint32_t warp = warp_of(fiber) + 1;
    const uint32_t bit = 1u << fiber.lane;
    const Reader mine{warp, bit, clock, place, kind, 0, variable};
    if (cell.first.warp == 0) {
        cell.first = mine;
        return;
    }
    // Earlier accesses of the same kind that are ordered before this one are implied by it.
    uint32_t* link = &cell.first.next;
    while (*link != 0) {
        Reader& reader = readers[*link];
        if (reader.warp == warp && reader.kind == kind && reader.clock == clock) {
            reader.lanes |= bit;
            return;
        }
        if (reader.kind == kind && unordered_lane(fiber, reader) < 0) {
            const uint32_t dead = *link;
            *link = reader.next;
            readers[dead].next = free_reader;
            free_reader = dead;
        } else {
            link = &reader.next;
        }
    }
    Reader& first = cell.first;
    if (first.warp == warp && first.kind == kind && first.clock == clock) {
        first.lanes |= bit;
        return;
    }
    if (first.kind == kind && unordered_lane(fiber, first) < 0) {
        const uint32_t next = first.next;
        first = mine;
        first.next = next;
        return;
    }
    const uint32_t index = take_reader(mine);
    readers[index].next = cell.first.next;
    cell.first.next = index;
}

void touch(Fiber& fiber, Cell& cell, Access kind, uint32_t thread, uint32_t clock, Place place,
           const void* variable, const char* memory) {
    Reader& first = cell.first;
    if (kind == Access::kWrite) {
        if (cell.writer == thread + 1 && cell.write_clock == clock && first.warp == 0) return;
    } else if (first.warp == warp_of(fiber) + 1 && first.clock == clock && first.kind == kind &&
               (first.lanes >> fiber.lane & 1u) != 0 && first.next == 0) {
        return;  // has been checked at this clock, and nothing conflicting came since
    }
    if (cell.writer != 0 && !ordered(fiber, cell.writer - 1, cell.write_clock, nullptr)) {
        report(fiber, kind, place, Access::kWrite, cell.writer - 1, cell.write_place, memory);
    }
    if (first.warp != 0) {
        check_reader(fiber, first, kind, place, memory);
        for (uint32_t i = first.next; i != 0; i = readers[i].next) {
            check_reader(fiber, readers[i], kind, place, memory);
        }
    }
    if (kind == Access::kWrite) {
        drop_readers(cell);
        cell.writer = thread + 1;
        cell.write_clock = clock;
        cell.write_place = place;
    } else {
        add_reader(fiber, cell, kind, clock, place, variable);
    }
}

void touch_page(Fiber& fiber, Page& page, size_t offset, size_t bytes, Access kind, Place place,
                const void* variable, const char* memory) {
    const auto finest = static_cast<unsigned>(__builtin_ctzll(offset | bytes));
    if (finest < page.shift) split(page, finest);
    const uint32_t thread = global_thread(fiber);
    const uint32_t clock = now(fiber);
    const size_t end = (offset + bytes) >> page.shift;
    for (size_t i = offset >> page.shift; i < end; ++i) {
        touch(fiber, page.cells[i], kind, thread, clock, place, variable, memory);
    }
}

}  // namespace

void begin_shadow() {
    ++launch_generation;
    readers.resize(1);
    free_reader = 0;
    for (auto& pages : shared_pages) pages.clear();
    global_pages.clear();
    std::memset(page_cache, 0, sizeof(page_cache));
    shared_pages.resize(std::max(shared_pages.size(), machine.blocks.size()));
    shared_generation.resize(shared_pages.size(), 0);
}

void begin_block_shadow(const Block& block) {
    ++shared_generation[block.slot];
    const size_t pages = (block.shared_bytes + kPageBytes - 1) / kPageBytes;
    if (shared_pages[block.slot].size() < pages) shared_pages[block.slot].resize(pages);
}

void access_shared(Fiber& fiber, size_t offset, size_t bytes, Access kind, Place place) {
    const unsigned slot = fiber.block->slot;
    while (bytes > 0) {
        Page& page = shared_pages[slot][offset / kPageBytes];
        if (page.generation != shared_generation[slot]) reset(page, shared_generation[slot]);
        const size_t here = std::min(bytes, kPageBytes - offset % kPageBytes);
        touch_page(fiber, page, offset % kPageBytes, here, kind, place, nullptr, "shared");
        offset += here;
        bytes -= here;
    }
}

void access_global(Fiber& fiber, uintptr_t address, size_t bytes, Access kind, Place place) {
    const bool atomic = kind == Access::kAtomicRead || kind == Access::kAtomicWrite;
    const void* variable = atomic ? reinterpret_cast<const void*>(address) : nullptr;
    while (bytes > 0) {
        const uintptr_t number = address / kPageBytes;
        CachedPage& cached = page_cache[number % kPageCache];
        if (cached.number != number || cached.page == nullptr) {
            cached.number = number;
            cached.page = &global_pages[number];
            if (cached.page->generation != launch_generation)
                reset(*cached.page, launch_generation);
        }
        const size_t here = std::min<size_t>(bytes, kPageBytes - address % kPageBytes);
        touch_page(fiber, *cached.page, address % kPageBytes, here, kind, place, variable,
                   "global");
        address += here;
        bytes -= here;
    }
}

}  // namespace specdec::emu::race
