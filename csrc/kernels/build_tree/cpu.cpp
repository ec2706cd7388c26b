// build_tree on the CPU: a limit of the score that the best candidates reach, found by bisection over counts (vectors
// of compares, no branches, no sort); those that do, in the order of their indices, which is that of the numbers
// wherever parents come first; then masks from parents and links from the last node up.
// Work: a thread takes whole requests. Bytes moved: C (8 + id) read, N (20 + id + 4 W) written.
// Determinism: equal scores go by index; the rest are integers.
#include "parallel.h"
#include "params.h"

namespace specdec::cpu::SPECDEC_ISA {
namespace {

constexpr int32_t kRoot = -1;    // as the parent of a place
constexpr int32_t kNobody = -2;  // neither the root nor chosen

// The chosen candidates of a request, by their places in the order of indices.
struct Chosen {
    uint32_t keys[kMaxBuildCandidates];     // upper halves of orders
    int32_t place_of[kMaxBuildCandidates];  // of a candidate; kNobody: it is not chosen
    int32_t candidate[kMaxDraftedNodes];
    int32_t parent[kMaxDraftedNodes];  // a place, kRoot or kNobody
    int32_t number[kMaxDraftedNodes];  // the node of a place; 0: it is none
    int32_t place[kMaxDraftedNodes];   // of a node
    int32_t count;
};

void choose(const BuildTreeParams& p, int64_t b, Chosen& c) {
    const int32_t candidates = static_cast<int32_t>(p.num_candidates);
    const int32_t wanted = static_cast<int32_t>(p.nodes.num_nodes - 1);
    for (int32_t i = 0; i < candidates; ++i) {
        c.keys[i] = static_cast<uint32_t>(candidate_order(p, b, i) >> 32);
    }
    const auto count_up_to = [&](uint32_t limit) {
        int32_t count = 0;
        for (int32_t i = 0; i < candidates; ++i) count += c.keys[i] <= limit ? 1 : 0;
        return count;
    };
    // The least limit that enough candidates reach; that of all usable ones where they are too few.
    uint32_t low = 0, limit = static_cast<uint32_t>(kNoOrder >> 32) - 1;
    int32_t below = 0, up_to = count_up_to(limit);
    while (low < limit && up_to > wanted) {
        const uint32_t middle = low + (limit - low) / 2;
        const int32_t count = count_up_to(middle);
        if (count >= wanted) {
            limit = middle;
            up_to = count;
        } else {
            low = middle + 1;
            below = count;
        }
    }
    // Of one key there may be more than are wanted: below it lie `below`, all of which are.
    int32_t ties = up_to > wanted ? wanted - below : up_to;
    c.count = 0;
    for (int32_t i = 0; i < candidates; ++i) {
        const bool tie = up_to > wanted && c.keys[i] == limit;
        const bool take = c.keys[i] <= limit && (!tie || ties > 0);
        ties -= tie ? 1 : 0;
        c.place_of[i] = take ? c.count : kNobody;
        if (take) c.candidate[c.count++] = i;
    }
}

// Gives every place its number; returns how many nodes there are with the root.
int32_t number_places(const BuildTreeParams& p, int64_t b, Chosen& c) {
    bool in_order = true;
    for (int32_t i = 0; i < c.count; ++i) {
        const int32_t parent = *p.parents.at(b, c.candidate[i]);
        const bool inside = parent >= 0 && parent < p.num_candidates;
        c.parent[i] = parent == -1 ? kRoot : inside ? c.place_of[parent] : kNobody;
        c.number[i] = 0;
        in_order = in_order && c.parent[i] <= i;
    }
    int32_t nodes = 1;
    const auto take_if_ready = [&](int32_t i) {
        const int32_t parent = c.parent[i];
        const bool ready = parent == kRoot || (parent >= 0 && c.number[parent] > 0);
        if (!ready || c.number[i] > 0) return false;
        c.place[nodes] = i;
        c.number[i] = nodes++;
        return true;
    };
    if (in_order) {
        for (int32_t i = 0; i < c.count; ++i) take_if_ready(i);
        return nodes;
    }
    // A child may wait for its parent: always the lowest place that can be taken.
    for (int32_t i = 0; i < c.count;) i = take_if_ready(i) ? 0 : i + 1;
    return nodes;
}

void request_tree(const BuildTreeParams& p, int64_t b, Chosen& c) {
    choose(p, b, c);
    const int32_t nodes = number_places(p, b, c);
    write_tree(
        p.nodes, b, nodes,
        [&](int64_t node) { return candidate_token(p, b, c.candidate[c.place[node]]); },
        [&](int64_t node) {
            const int32_t parent = c.parent[c.place[node]];
            return parent == kRoot ? 0 : c.number[parent];
        });
    p.nodes.status[b] = nodes < p.nodes.num_nodes ? kBadTree : 0;
}

}  // namespace

void build_tree(const BuildTreeParams& p) {
    // A tree of 60 nodes takes some microseconds.
    constexpr int64_t kGrain = 8;
    parallel_for(0, p.batch, kGrain, [&](int64_t begin, int64_t end) {
        Chosen chosen;
        for (int64_t b = begin; b < end; ++b) request_tree(p, b, chosen);
    });
}

}  // namespace specdec::cpu::SPECDEC_ISA
