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
    uint32_t next;  // index in `readers`; 0: none
    Access kind;
    uint8_t back;  // an atomic's address is this many bytes before the cell's
};

struct Cell {
    uint32_t writer;  // thread of the grid, plus 1; 0: none
    uint32_t write_clock;
    Place write_place;
    Reader first;
};
static_assert(sizeof(Cell) == 36, "many cells are live at once");

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

void reset(Page& page, uint64_t generation, unsigned finest) {
    for (Cell& cell : page.cells) drop_list(cell.first.next);
    page.generation = generation;
    page.shift = std::min(finest, kWidestShift);
    page.cells.assign(kPageBytes >> page.shift, Cell{});
}

void split(Page& page, unsigned shift) {
    const unsigned ratio_shift = page.shift - shift;
    std::vector<Cell> cells(kPageBytes >> shift);
    for (size_t i = 0; i < cells.size(); ++i) {
        cells[i] = page.cells[i >> ratio_shift];
        if ((i & ((size_t{1} << ratio_shift) - 1)) == 0) continue;
        const auto further = static_cast<uint8_t>((i << shift) & ((size_t{1} << page.shift) - 1));
        cells[i].first.back = static_cast<uint8_t>(cells[i].first.back + further);
        // Later parts get lists of their own. Links by index: taking a reader may move them all.
        uint32_t last = 0;
        for (uint32_t from = cells[i].first.next; from != 0;) {
            Reader copy = readers[from];
            copy.back = static_cast<uint8_t>(copy.back + further);
            const uint32_t index = take_reader(copy);
            (last == 0 ? cells[i].first.next : readers[last].next) = index;
            last = index;
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

// One access to one cell.
struct Touch {
    Fiber& fiber;
    Access kind;
    Place place;
    uint32_t thread;  // of the grid
    uint32_t clock;
    const char* memory;
    uintptr_t cell = 0;  // its address; 0 in shared memory, where atomics order nothing
    uint8_t back = 0;    // how far before it an atomic's address lies
};

[[noreturn]] void report(const Touch& t, Access other_kind, uint32_t other, Place other_place) {
    const unsigned threads = t.fiber.block->threads;
    fail(Site{nullptr, 0},
         "%s: race on %s memory: %s by thread %u of block %llu, not ordered after the %s by thread "
         "%u of "
         "block %u at %s",
         symbols::token(t.place).c_str(), t.memory, name_of(t.kind), t.fiber.linear,
         static_cast<unsigned long long>(t.fiber.block->linear), name_of(other_kind),
         other % threads, other / threads, symbols::token(other_place).c_str());
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

// The first lane of `reader` that is not ordered before the access, or -1.
int unordered_lane(const Touch& t, const Reader& reader) {
    const bool atomic = reader.kind != Access::kRead && t.cell != 0;
    const void* variable = atomic ? reinterpret_cast<const void*>(t.cell - reader.back) : nullptr;
    const uint32_t first = first_thread_of(t.fiber, reader.warp - 1);
    for (unsigned rest = reader.lanes; rest != 0; rest &= rest - 1) {
        const int lane = __builtin_ctz(rest);
        if (!ordered(t.fiber, first + static_cast<uint32_t>(lane), reader.clock, variable))
            return lane;
    }
    return -1;
}

void check_reader(const Touch& t, const Reader& reader) {
    if (!conflicts(t.kind, reader.kind)) return;
    const int lane = unordered_lane(t, reader);
    if (lane < 0) return;
    const uint32_t first = first_thread_of(t.fiber, reader.warp - 1);
    report(t, reader.kind, first + static_cast<uint32_t>(lane), reader.place);
}

void add_reader(const Touch& t, Cell& cell) {
    const uint32_t warp = warp_of(t.fiber) + 1;
    const uint32_t bit = 1u << t.fiber.lane;
    const Reader mine{warp, bit, t.clock, t.place, 0, t.kind, t.back};
    Reader& first = cell.first;
    if (first.warp == 0) {
        first = mine;
        return;
    }
    const auto same = [&](const Reader& reader) {
        return reader.warp == warp && reader.kind == t.kind && reader.clock == t.clock;
    };
    // Earlier accesses of the same kind that are ordered before this one are implied by it.
    const auto implied = [&](const Reader& reader) {
        return reader.kind == t.kind && unordered_lane(t, reader) < 0;
    };
    uint32_t* link = &first.next;
    while (*link != 0) {
        Reader& reader = readers[*link];
        if (same(reader)) {
            reader.lanes |= bit;
            return;
        }
        if (implied(reader)) {
            const uint32_t dead = *link;
            *link = reader.next;
            readers[dead].next = free_reader;
            free_reader = dead;
        } else {
            link = &reader.next;
        }
    }
    if (same(first)) {
        first.lanes |= bit;
    } else if (implied(first)) {
        const uint32_t next = first.next;
        first = mine;
        first.next = next;
    } else {
        const uint32_t index = take_reader(mine);
        readers[index].next = first.next;
        first.next = index;
    }
}

void touch(const Touch& t, Cell& cell) {
    Reader& first = cell.first;
    if (t.kind == Access::kWrite) {
        if (cell.writer == t.thread + 1 && cell.write_clock == t.clock && first.warp == 0) return;
    } else if (first.warp == warp_of(t.fiber) + 1 && first.clock == t.clock &&
               first.kind == t.kind && (first.lanes >> t.fiber.lane & 1u) != 0 && first.next == 0) {
        return;  // has been checked at this clock, and nothing conflicting came since
    }
    if (cell.writer != 0 && !ordered(t.fiber, cell.writer - 1, cell.write_clock, nullptr)) {
        report(t, Access::kWrite, cell.writer - 1, cell.write_place);
    }
    if (first.warp != 0) {
        check_reader(t, first);
        for (uint32_t i = first.next; i != 0; i = readers[i].next) check_reader(t, readers[i]);
    }
    if (t.kind == Access::kWrite) {
        drop_readers(cell);
        cell.writer = t.thread + 1;
        cell.write_clock = t.clock;
        cell.write_place = t.place;
    } else {
        add_reader(t, cell);
    }
}

unsigned finest_shift(size_t offset, size_t bytes) {
    return static_cast<unsigned>(__builtin_ctzll(offset | bytes));
}

void touch_page(Touch& t, Page& page, uintptr_t page_address, size_t offset, size_t bytes) {
    const unsigned finest = finest_shift(offset, bytes);
    if (finest < page.shift) split(page, finest);
    const size_t end = (offset + bytes) >> page.shift;
    for (size_t i = offset >> page.shift; i < end; ++i) {
        if (page_address != 0) {
            t.cell = page_address + (i << page.shift);
            t.back = static_cast<uint8_t>((i << page.shift) - offset);
        }
        touch(t, page.cells[i]);
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
    Touch t{fiber, kind, place, global_thread(fiber), now(fiber), "shared"};
    while (bytes > 0) {
        Page& page = shared_pages[slot][offset / kPageBytes];
        const size_t in_page = offset % kPageBytes;
        const size_t here = std::min(bytes, kPageBytes - in_page);
        if (page.generation != shared_generation[slot]) {
            reset(page, shared_generation[slot], finest_shift(in_page, here));
        }
        touch_page(t, page, 0, in_page, here);
        offset += here;
        bytes -= here;
    }
}

void access_global(Fiber& fiber, uintptr_t address, size_t bytes, Access kind, Place place) {
    Touch t{fiber, kind, place, global_thread(fiber), now(fiber), "global"};
    while (bytes > 0) {
        const uintptr_t number = address / kPageBytes;
        const size_t in_page = address % kPageBytes;
        const size_t here = std::min<size_t>(bytes, kPageBytes - in_page);
        CachedPage& cached = page_cache[number % kPageCache];
        if (cached.number != number || cached.page == nullptr) {
            cached.number = number;
            cached.page = &global_pages[number];
            if (cached.page->generation != launch_generation) {
                reset(*cached.page, launch_generation, finest_shift(in_page, here));
            }
        }
        touch_page(t, *cached.page, address - in_page, in_page, here);
        address += here;
        bytes -= here;
    }
}

}  // namespace specdec::emu::race
