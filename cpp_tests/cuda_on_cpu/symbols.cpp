#include "symbols.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[];

namespace specdec::emu::symbols {

namespace {

constexpr Place kSiteBit = 0x80000000u;
constexpr char kOpen = '\x01';
constexpr char kClose = '\x02';

std::vector<Site> sites;
std::map<std::pair<const char*, int>, Place> site_numbers;
struct CachedSite {
    const char* file;
    int line;
    Place place;
} site_cache[256];

std::unordered_map<Place, Location> known;

uintptr_t base() {
    return reinterpret_cast<uintptr_t>(__ehdr_start);
}

uintptr_t library_end() {
    static const uintptr_t end = [] {
        struct Find {
            uintptr_t base, end;
        } find{base(), base()};
        dl_iterate_phdr(
            [](dl_phdr_info* info, size_t, void* data) {
                auto* f = static_cast<Find*>(data);
                if (info->dlpi_addr != f->base) return 0;
                for (int i = 0; i < info->dlpi_phnum; ++i) {
                    const auto& segment = info->dlpi_phdr[i];
                    const uintptr_t end = info->dlpi_addr + segment.p_vaddr + segment.p_memsz;
                    if (segment.p_type == PT_LOAD && end > f->end) f->end = end;
                }
                return 1;
            },
            &find);
        return find.end;
    }();
    return end;
}

std::string shorten(const std::string& path) {
    for (const char* mark : {"/csrc/", "/cpp_tests/"}) {
        const size_t found = path.find(mark);
        if (found != std::string::npos) return path.substr(found + 1);
    }
    return path;
}

bool ends_with(const std::string& text, const char* end) {
    const size_t length = std::strlen(end);
    return text.size() >= length && text.compare(text.size() - length, length, end) == 0;
}

// Frames innermost first; the kernel's own line is what its author can act on.
Location choose(const std::vector<Location>& frames) {
    for (const Location& frame : frames) {
        if (ends_with(frame.file, ".cu") || ends_with(frame.file, ".cuh")) return frame;
    }
    return frames.empty() ? Location{"?", 0} : frames.front();
}

// One run of addr2line for all addresses: "0xADDRESS" begins the frames of each.
void look_up(const std::vector<Place>& places) {
    Dl_info library{};
    if (places.empty() || dladdr(__ehdr_start, &library) == 0) return;
    std::string command = std::string("addr2line -a -i -e '") + library.dli_fname + "'";
    for (const Place place : places) {
        char address[32];
        // A return address is behind the call; the byte before it is in the call's line.
        std::snprintf(address, sizeof(address), " 0x%x", place - 1);
        command += address;
    }
    command += " 2>/dev/null";
    // The sanitizer and interposers of the process are no business of addr2line.
    command = "env -u LD_PRELOAD " + command;
    FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return;
    char line[4096];
    size_t next = 0;
    std::vector<Location> frames;
    const auto finish = [&] {
        if (next > 0 && next <= places.size()) known[places[next - 1]] = choose(frames);
        frames.clear();
    };
    while (std::fgets(line, sizeof(line), pipe) != nullptr) {
        line[std::strcspn(line, "\n")] = 0;
        if (std::strncmp(line, "0x", 2) == 0) {
            finish();
            ++next;
            continue;
        }
        char* colon = std::strrchr(line, ':');
        if (colon == nullptr) continue;
        *colon = 0;
        frames.push_back(Location{shorten(line), std::atoi(colon + 1)});
    }
    finish();
    pclose(pipe);
}

}  // namespace

Place from_return_address(uintptr_t address) {
    return static_cast<Place>(address - base());
}

Place from_site(Site site) {
    const size_t slot =
        (reinterpret_cast<uintptr_t>(site.file) * 31 + static_cast<size_t>(site.line)) % 256;
    CachedSite& cached = site_cache[slot];
    if (cached.file == site.file && cached.line == site.line && cached.file != nullptr) {
        return cached.place;
    }
    const auto [found, is_new] = site_numbers.try_emplace({site.file, site.line}, 0);
    if (is_new) {
        found->second = kSiteBit | static_cast<Place>(sites.size());
        sites.push_back(site);
    }
    cached = CachedSite{site.file, site.line, found->second};
    return found->second;
}

std::string token(Place place) {
    return kOpen + std::to_string(place) + kClose;
}

std::vector<Location> locate(const std::vector<Place>& places) {
    std::vector<Place> missing;
    for (const Place place : places) {
        if ((place & kSiteBit) == 0 && known.find(place) == known.end()) missing.push_back(place);
    }
    look_up(missing);
    std::vector<Location> locations;
    for (const Place place : places) {
        if ((place & kSiteBit) != 0) {
            const Site site = sites[place & ~kSiteBit];
            locations.push_back(Location{shorten(site.file), site.line});
        } else {
            const auto found = known.find(place);
            locations.push_back(found == known.end() ? Location{"?", 0} : found->second);
        }
    }
    return locations;
}

std::string resolve(const std::string& text) {
    std::vector<Place> places;
    for (size_t at = text.find(kOpen); at != std::string::npos; at = text.find(kOpen, at + 1)) {
        places.push_back(static_cast<Place>(std::strtoul(text.c_str() + at + 1, nullptr, 10)));
    }
    if (places.empty()) return text;
    const std::vector<Location> locations = locate(places);
    std::string resolved;
    size_t from = 0;
    for (const Location& location : locations) {
        const size_t open = text.find(kOpen, from);
        const size_t close = text.find(kClose, open);
        resolved +=
            text.substr(from, open - from) + location.file + ":" + std::to_string(location.line);
        from = close + 1;
    }
    return resolved + text.substr(from);
}

bool in_library(uintptr_t address) {
    return address >= base() && address < library_end();
}

}  // namespace specdec::emu::symbols
