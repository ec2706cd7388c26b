"""Faults seen in public tree metadata, by id: the smallest input that shows them."""

import numpy as np
import pytest
import torch
from oracles import tree_links as oracle
from tree_cases import check_from_mask, check_links, ragged, run_from_mask, run_links


# --- B03: a node judged by its own row of the target instead of its parent's ------------------------
def test_B03_a_node_hangs_on_its_parent(backend):
    """The greedy walk by links: at every node the child whose token the node's own row chose."""
    tokens, chosen = [9, 4, 5, 6], [5, 1, 6, 7]
    out = check_links(backend, *ragged([[-1, 0, 0, 2]]), 4)
    first_child, next_sibling = out[2].tolist(), out[3].tolist()
    path, child = [0], first_child[0]
    while child >= 0:
        if tokens[child] == chosen[path[-1]]:
            path.append(child)
            child = first_child[child]
        else:
            child = next_sibling[child]
    assert path == [0, 2, 3]
    assert [chosen[node] for node in path] == [5, 6, 7]


# --- B06: positions by place in the flattened tree instead of by depth ------------------------------
def test_B06_positions_are_prefix_plus_depth(backend):
    depth = check_links(backend, *ragged([[-1, 0, 0, 1]]), 4)[1]
    assert (10 + depth).tolist() == [10, 11, 11, 12]


# --- B09: offsets in bits used as offsets in bytes --------------------------------------------------
def dense(tree_mask, count):
    """Rows of a mask as booleans, read byte by byte, lowest bit first."""
    as_bytes = tree_mask.contiguous().numpy().astype("<i4").view(np.uint8)
    bits = np.unpackbits(as_bytes, axis=1, bitorder="little").astype(bool)
    assert not bits[:, count:].any()
    return bits[:, :count]


@pytest.mark.parametrize("nodes", [1, 7, 8, 9, 31, 32, 33, 64, 65])
def test_B09_masks_pack_and_unpack(backend, nodes):
    """Bit j of word j // 32 is node j, for every request of the batch: rows share no word."""
    g = torch.Generator().manual_seed(nodes)
    for kind in ("any", "chain", "star"):
        trees = [oracle.random_parents(g, n, kind).tolist() for n in (3, nodes, 2, nodes)]
        parents, cu_rows = ragged(trees)
        mask = run_links(backend, parents, cu_rows, nodes + 3)[0]
        for b, tree in enumerate(trees):
            begin, end = int(cu_rows[b]), int(cu_rows[b + 1])
            wanted = np.zeros((len(tree), len(tree)), dtype=bool)
            for node, parent in enumerate(tree):
                wanted[node] = wanted[parent] if node else False
                wanted[node, node] = True
            assert (dense(mask[begin:end], len(tree)) == wanted).all()
        assert run_from_mask(backend, mask, cu_rows)[0].tolist() == parents.tolist()


def test_B09_requests_of_three_and_two_rows(backend):
    """15 and 8 bits: the second request's rows are not those of the first one's last bits."""
    mask = run_links(backend, *ragged([[-1, 0, 1], [-1, 0]]), 5)[0]
    assert mask[:, 0].tolist() == [0b1, 0b11, 0b111, 0b1, 0b11]


# --- E03: more requests than the y dimension of a grid has ------------------------------------------
@pytest.mark.parametrize("batch", [65536, 65537])
def test_E03_many_requests(backend, batch):
    if backend.name in ("emu_hooks", "emu_asan"):
        pytest.skip("the grid is the same in the plain build; 65537 blocks take long here")
    parents = torch.tensor([-1, 0], dtype=torch.int32).repeat(batch)
    cu_rows = torch.arange(batch + 1, dtype=torch.int32) * 2
    mask, depth, first_child, next_sibling, status = run_links(backend, parents, cu_rows, 2)
    assert mask.view(batch, 2).unique(dim=0).tolist() == [[1, 3]]
    assert depth.view(batch, 2).unique(dim=0).tolist() == [[0, 1]]
    assert first_child.view(batch, 2).unique(dim=0).tolist() == [[1, -1]]
    assert (next_sibling == -1).all() and (status == 0).all()
    out = run_from_mask(backend, mask, cu_rows)
    assert out[0].tolist() == parents.tolist() and (out[4] == 0).all()


# --- K03: trees as next-token and next-sibling arrays (structured output libraries) -----------------
def test_K03_links_of_a_published_greedy_walk(backend):
    """Links of a public verifier's test (SGLang, test_eagle_utils.py), made from their parents."""
    trees = {  # parents -> (next token, next sibling) as published
        (-1, 0, 1, 0, 3, 4): ([1, 2, -1, 4, 5, -1], [-1, 3, -1, -1, -1, -1]),
        (-1, 0, 1, 2, 0, 4): ([4, 2, 3, -1, 5, -1], [-1, -1, -1, -1, 1, -1]),
    }
    parents, cu_rows = ragged(trees)
    mask, _, first_child, next_sibling, _ = check_links(backend, parents, cu_rows, 6)
    for b, (next_token, sibling) in enumerate(trees.values()):
        begin = int(cu_rows[b])

        def kids(first, following, node):
            found, child = [], first[node]
            while child >= 0:
                found.append(child)
                child = following[child]
            return found

        ours = first_child[begin : begin + 6].tolist(), next_sibling[begin : begin + 6].tolist()
        for node in range(6):
            # The second tree is published with its children in descending order.
            assert kids(*ours, node) == sorted(kids(next_token, sibling, node))
    assert (first_child[:6].tolist(), next_sibling[:6].tolist()) == next(iter(trees.values()))
    check_from_mask(backend, mask, cu_rows)
