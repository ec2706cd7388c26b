// Places of accesses: return addresses of hooks and sites of operations, turned into file:line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "race.h"

namespace specdec::emu::symbols {

using race::Place;

Place from_return_address(uintptr_t address);
Place from_site(Site site);

// What to put into an error text; resolve() replaces it, on the host's stack and all at once.
std::string token(Place place);
std::string resolve(const std::string& text);

struct Location {
    std::string file;
    int line;
};
// Of device code inlined into a kernel, the line of the .cu or .cuh file.
std::vector<Location> locate(const std::vector<Place>& places);

// Whether an address lies in this library: constants and tables of the kernels.
bool in_library(uintptr_t address);

}  // namespace specdec::emu::symbols
