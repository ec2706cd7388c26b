"""Batches of draft trees for the tests: putting requests together, running the ops, comparing."""

import torch
from compare import assert_same
from oracles import tree_from_mask as mask_oracle
from oracles import tree_links as links_oracle

LINK_NAMES = ["tree_mask", "depth", "first_child", "next_sibling", "status"]
MASK_NAMES = ["parents", "depth", "first_child", "next_sibling", "status"]


def ragged(requests, padding=0, leading=0):
    """(parents, cu_rows) of a list of parent lists; rows of no request hold junk."""
    cu = [leading]
    for request in requests:
        cu.append(cu[-1] + len(request))
    flat = [parent for request in requests for parent in request]
    flat = [0] * leading + flat + [1] * padding
    return torch.tensor(flat, dtype=torch.int32), torch.tensor(cu, dtype=torch.int32)


def soil(*sizes):
    """Frees memory full of junk, which outputs of these sizes are likely to get: an element that the
    op leaves unwritten is then not by chance the right one."""
    junk = [torch.full((size,), 0x5A5A5A5A, dtype=torch.int32) for size in sizes]
    del junk


def run_links(backend, parents, cu_rows, max_nodes):
    on = backend.device
    rows = parents.shape[0]
    soil(rows * ((max_nodes + 31) // 32), rows, rows, rows, cu_rows.shape[0] - 1)
    return [t.cpu() for t in backend.ops.tree_links(parents.to(on), cu_rows.to(on), max_nodes)]


def run_from_mask(backend, tree_mask, cu_rows):
    on = backend.device
    soil(*[tree_mask.shape[0]] * 4, cu_rows.shape[0] - 1)
    return [t.cpu() for t in backend.ops.tree_from_mask(tree_mask.to(on), cu_rows.to(on))]


def check_links(backend, parents, cu_rows, max_nodes):
    """tree_links against the oracle; returns the op's results."""
    out = run_links(backend, parents, cu_rows, max_nodes)
    wanted = links_oracle.tree_links(parents, cu_rows, max_nodes)
    for name, mine, theirs in zip(LINK_NAMES, out, wanted, strict=True):
        assert_same(mine, theirs, name)
    return out


def check_from_mask(backend, tree_mask, cu_rows):
    """tree_from_mask against the oracle; returns the op's results."""
    out = run_from_mask(backend, tree_mask, cu_rows)
    wanted = mask_oracle.tree_from_mask(tree_mask, cu_rows)
    for name, mine, theirs in zip(MASK_NAMES, out, wanted, strict=True):
        assert_same(mine, theirs, name)
    return out


def random_tree(generator, low=1, high=80):
    """Parents of a valid tree of a random size and shape, as a list."""
    nodes = int(torch.randint(low, high, (1,), generator=generator))
    kinds = ["any", "any", "deep", "chain", "star"]
    kind = kinds[int(torch.randint(0, len(kinds), (1,), generator=generator))]
    return links_oracle.random_parents(generator, nodes, kind).tolist()


def damaged(generator, parents):
    """The same with some parents replaced by any number."""
    parents = list(parents)
    for _ in range(1 + len(parents) // 8):
        node = int(torch.randint(0, len(parents), (1,), generator=generator))
        bad = [-1, -2, node, node + 1, len(parents), -(2**31), 2**31 - 1, 0]
        parents[node] = bad[int(torch.randint(0, len(bad), (1,), generator=generator))]
    return parents
