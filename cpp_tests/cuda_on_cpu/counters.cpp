#include "counters.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "symbols.h"

namespace specdec::emu::counters {

namespace {

constexpr unsigned kSectorBytes = 32;
constexpr unsigned kBanks = 32;

struct Counts {
    uint64_t instructions = 0;  // of whole warps
    uint64_t bytes = 0;         // asked for by lanes
    uint64_t moved = 0;         // sectors or wavefronts
    uint64_t ideal = 0;         // the fewest that hold these bytes
};

struct Key {
    race::Place place;
    bool write;
    Space space;
};

// One instruction of one warp, gathered lane by lane.
struct Gathered {
    unsigned lanes = 0;
    unsigned bytes = 0;
    uintptr_t address[kWarpSize];
};

struct Log {
    unsigned done = 0;               // accesses already accounted
    uint32_t count[kWarpSize] = {};  // of each lane, since the last flush
    std::vector<Gathered> gathered;  // from number `done` on, a queue
    size_t head = 0;
    bool touched = false;
};

struct WarpLogs {
    std::vector<Log> logs;  // by instruction number
    std::vector<uint32_t> touched;
};

std::vector<Key> keys;
std::vector<Counts> counts;
std::unordered_map<uint64_t, uint32_t> numbers;
struct CachedNumber {
    uint64_t key;
    uint32_t number;
} number_cache[1024];

std::vector<std::vector<WarpLogs>> slots;  // [block slot][warp]

uint32_t number_of(race::Place place, bool write, Space space) {
    const uint64_t key = (static_cast<uint64_t>(place) << 2 | (write ? 2u : 0u) |
                          (space == Space::kShared ? 1u : 0u)) +
                         1;
    CachedNumber& cached = number_cache[(key * 0x9e3779b97f4a7c15ull) >> 54];
    if (cached.key == key) return cached.number;
    const auto [found, is_new] = numbers.try_emplace(key, static_cast<uint32_t>(keys.size()));
    if (is_new) {
        keys.push_back(Key{place, write, space});
        counts.emplace_back();
    }
    cached = CachedNumber{key, found->second};
    return found->second;
}

// Distinct sectors touched, and the fewest sectors that could hold the distinct bytes.
void count_sectors(const Gathered& g, Counts& c) {
    uintptr_t sorted[kWarpSize];
    unsigned n = 0;
    bool ascending = true;
    for (unsigned rest = g.lanes; rest != 0; rest &= rest - 1) {
        sorted[n] = g.address[__builtin_ctz(rest)];
        ascending = ascending && (n == 0 || sorted[n - 1] <= sorted[n]);
        ++n;
    }
    if (!ascending) std::sort(sorted, sorted + n);
    uint64_t sectors = 0;
    uint64_t distinct = 0;
    uintptr_t next_byte = 0;
    uintptr_t next_sector = 0;
    for (unsigned i = 0; i < n; ++i) {
        const uintptr_t begin = std::max(sorted[i], next_byte);
        const uintptr_t end = sorted[i] + g.bytes;
        if (begin >= end) continue;
        distinct += end - begin;
        next_byte = end;
        const uintptr_t first = std::max(begin / kSectorBytes, next_sector);
        const uintptr_t last = (end - 1) / kSectorBytes;
        if (first <= last) sectors += last - first + 1;
        next_sector = last + 1;
    }
    c.moved += sectors;
    c.ideal += (distinct + kSectorBytes - 1) / kSectorBytes;
}

// Lanes are served in groups that fill all banks once; a bank serves one of its words at a time.
void count_wavefronts(const Gathered& g, Counts& c) {
    const unsigned group = g.bytes <= 4 ? 32 : (g.bytes <= 8 ? 16 : 8);
    for (unsigned first = 0; first < kWarpSize; first += group) {
        uintptr_t words[kWarpSize];
        unsigned n = 0;
        for (unsigned lane = first; lane < first + group; ++lane) {
            if ((g.lanes >> lane & 1u) == 0) continue;
            const uintptr_t end = g.address[lane] + g.bytes;
            for (uintptr_t w = g.address[lane] / 4; w * 4 < end && n < kWarpSize; ++w)
                words[n++] = w;
        }
        if (n == 0) continue;
        std::sort(words, words + n);
        n = static_cast<unsigned>(std::unique(words, words + n) - words);
        unsigned per_bank[kBanks] = {};
        unsigned most = 0;
        for (unsigned i = 0; i < n; ++i) most = std::max(most, ++per_bank[words[i] % kBanks]);
        c.moved += most;
        c.ideal += 1;
    }
}

void account(uint32_t number, const Gathered& g) {
    Counts& c = counts[number];
    ++c.instructions;
    c.bytes += static_cast<uint64_t>(g.bytes) * static_cast<unsigned>(__builtin_popcount(g.lanes));
    if (keys[number].space == Space::kGlobal) {
        count_sectors(g, c);
    } else {
        count_wavefronts(g, c);
    }
}

void flush_logs(WarpLogs& warp) {
    for (const uint32_t number : warp.touched) {
        Log& log = warp.logs[number];
        for (size_t i = log.head; i < log.gathered.size(); ++i) {
            if (log.gathered[i].lanes != 0) account(number, log.gathered[i]);
        }
        log.gathered.clear();
        log.head = 0;
        log.done = 0;
        std::memset(log.count, 0, sizeof(log.count));
        log.touched = false;
    }
    warp.touched.clear();
}

std::string members(const Counts& c, Space space) {
    const char* moved = space == Space::kGlobal ? "sectors" : "wavefronts";
    return "\"instructions\": " + std::to_string(c.instructions) +
           ", \"bytes\": " + std::to_string(c.bytes) + ", \"" + moved +
           "\": " + std::to_string(c.moved) + ", \"ideal_" + moved +
           "\": " + std::to_string(c.ideal);
}

void add(Counts& to, const Counts& c) {
    to.instructions += c.instructions;
    to.bytes += c.bytes;
    to.moved += c.moved;
    to.ideal += c.ideal;
}

}  // namespace

void begin_launch() {
    slots.resize(std::max(slots.size(), machine.blocks.size()));
    for (auto& warps : slots) {
        for (WarpLogs& warp : warps) {
            warp.logs.clear();
            warp.touched.clear();
        }
    }
}

void begin_block(const Block& block) {
    auto& warps = slots[block.slot];
    if (warps.size() < block.warps.size()) warps.resize(block.warps.size());
}

void access(const Fiber& fiber, uintptr_t address, unsigned bytes, bool write, Space space,
            race::Place place) {
    const uint32_t number = number_of(place, write, space);
    WarpLogs& warp = slots[fiber.block->slot][fiber.warp->index];
    if (warp.logs.size() <= number) warp.logs.resize(number + 1);
    Log& log = warp.logs[number];
    if (!log.touched) {
        log.touched = true;
        warp.touched.push_back(number);
    }
    const size_t index = log.head + log.count[fiber.lane]++ - log.done;
    if (log.gathered.size() <= index) log.gathered.resize(index + 1);
    Gathered& g = log.gathered[index];
    g.lanes |= 1u << fiber.lane;
    g.bytes = bytes;
    g.address[fiber.lane] = address;
    if (index == log.head && g.lanes == fiber.warp->existing) {
        account(number, g);
        ++log.head;
        ++log.done;
        if (log.head == log.gathered.size()) {
            log.gathered.clear();
            log.head = 0;
        }
    }
}

void flush(const Warp& warp) {
    flush_logs(slots[warp.block->slot][warp.index]);
}

void reset() {
    std::fill(counts.begin(), counts.end(), Counts{});
}

std::string lines_json() {
    std::vector<race::Place> places;
    for (const Key& key : keys) places.push_back(key.place);
    const std::vector<symbols::Location> locations = symbols::locate(places);
    std::map<std::tuple<std::string, int, Space, bool>, Counts> lines;
    for (size_t i = 0; i < keys.size(); ++i) {
        if (counts[i].instructions == 0) continue;
        add(lines[{locations[i].file, locations[i].line, keys[i].space, keys[i].write}], counts[i]);
    }
    std::string json;
    for (const auto& [key, c] : lines) {
        const auto& [file, line, space, write] = key;
        json += (json.empty() ? "" : ", ") + std::string("{\"file\": \"") + file +
                "\", \"line\": " + std::to_string(line) + ", \"space\": \"" +
                (space == Space::kGlobal ? "global" : "shared") + "\", \"op\": \"" +
                (write ? "write" : "read") + "\", " + members(c, space) + "}";
    }
    return "[" + json + "]";
}

std::string totals_json() {
    Counts read, write, shared;
    for (size_t i = 0; i < keys.size(); ++i) {
        if (keys[i].space == Space::kShared) {
            add(shared, counts[i]);
        } else {
            add(keys[i].write ? write : read, counts[i]);
        }
    }
    return "\"global_read\": {" + members(read, Space::kGlobal) + "}, \"global_write\": {" +
           members(write, Space::kGlobal) + "}, \"shared\": {" + members(shared, Space::kShared) +
           "}";
}

}  // namespace specdec::emu::counters
