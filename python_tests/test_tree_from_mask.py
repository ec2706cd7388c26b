"""tree_from_mask: every element against the oracle, on every backend, and back from tree_links."""

import itertools
import math

import backends
import pytest
import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import tree_from_mask as oracle
from oracles import tree_links as links_oracle
from tree_cases import (
    check_from_mask,
    damaged,
    ragged,
    random_tree,
    run_from_mask,
    run_links,
)

BAD_TREE = 16


def generator(seed):
    return torch.Generator().manual_seed(seed)


def masks_of(requests, words=1):
    """(tree_mask, cu_rows) of requests given as lists of mask rows (integers of any width)."""
    flat = [row for request in requests for row in request]
    mask = torch.zeros(len(flat), words, dtype=torch.int64)
    for r, row in enumerate(flat):
        mask[r] = torch.tensor([row >> (32 * w) & 0xFFFFFFFF for w in range(words)])
    cu = [0, *itertools.accumulate(len(request) for request in requests)]
    return mask.to(torch.int32), torch.tensor(cu, dtype=torch.int32)


# --- All small masks ------------------------------------------------------------------------------
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_every_mask(backend, nodes):
    """All masks over these bits, one request each, in one batch. (nodes - 1)! of them are trees."""
    requests = list(itertools.product(range(2**nodes), repeat=nodes))
    stride = 1 if nodes < 4 else (7 if backend.name == "cpu" else 61)
    status = check_from_mask(backend, *masks_of(requests[::stride]))[4]
    if stride == 1:
        assert int((status == 0).sum()) == math.factorial(nodes - 1)


def test_every_parent_array_and_back(backend):
    """Valid parents come back; a node outside the tree stays outside of it."""
    for nodes in (1, 2, 3, 4):
        arrays = list(itertools.product(range(-1, nodes), repeat=nodes))
        parents, cu_rows = ragged(arrays)
        mask, depth, first_child, next_sibling, _ = run_links(backend, parents, cu_rows, nodes)
        out = check_from_mask(backend, mask, cu_rows)
        inside = depth >= 0
        root = torch.zeros(len(parents), dtype=torch.bool)
        root[cu_rows[:-1].long()] = True
        assert_same(out[0], torch.where(inside & ~root, parents, -1))
        for got, wanted in zip(out[1:4], (depth, first_child, next_sibling), strict=True):
            assert_same(got, wanted)


# --- Random trees ---------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_and_back(backend, seed):
    """50 valid trees in one ragged batch: parents, depths and links are those of tree_links."""
    g = generator(seed)
    trees = [random_tree(g) for _ in range(50)]
    trees[3] = []
    parents, cu_rows = ragged(trees, padding=seed % 3 * 40, leading=seed % 2 * 3)
    mask, *links = run_links(backend, parents, cu_rows, 80)
    out = check_from_mask(backend, mask, cu_rows)
    mine = torch.zeros(len(parents), dtype=torch.bool)
    mine[int(cu_rows[0]) : int(cu_rows[-1])] = True
    assert_same(out[0], torch.where(mine, parents, -1))
    for got, wanted in zip(out[1:], links, strict=True):
        assert_same(got, wanted)
    assert not out[4].any()


@pytest.mark.parametrize("seed", range(4))
def test_matches_oracle(backend, seed):
    """Bits of masks turned over, rows exchanged, junk in the bits that stand for no row."""
    g = generator(100 + seed)
    parents, cu_rows = ragged([random_tree(g) for _ in range(30)], padding=3)
    mask = links_oracle.tree_links(parents, cu_rows, 96)[0]
    num_rows, words = mask.shape
    for _ in range(12):
        row, bit = (int(torch.randint(0, n, (1,), generator=g)) for n in (num_rows, 40))
        word = (int(mask[row, bit // 32]) % 2**32) ^ (1 << bit % 32)
        mask[row, bit // 32] = word - 2**32 if word >= 2**31 else word
    a, b = torch.randint(0, num_rows, (2, 4), generator=g)
    mask[a] = mask[b]
    mask[:, 2] |= torch.randint(-(2**31), 2**31, (num_rows,), generator=g).int() & ~0xFFFF
    status = check_from_mask(backend, mask, cu_rows)[4]
    assert 0 < int((status != 0).sum()) < 30


@pytest.mark.parametrize("nodes", [31, 32, 33, 64, 65, 256])
@pytest.mark.parametrize("kind", ["any", "chain", "star"])
def test_sizes_around_words(backend, nodes, kind):
    if backend.name in ("emu_hooks", "emu_asan") and nodes > 65:
        nodes = 140
    parents = links_oracle.random_parents(generator(nodes), nodes, kind)
    cu_rows = torch.tensor([0, nodes], dtype=torch.int32)
    for max_nodes in (nodes, nodes + 40, 1100):
        mask = run_links(backend, parents, cu_rows, max_nodes)[0]
        out = check_from_mask(backend, mask, cu_rows)
        assert_same(out[0], parents)
        assert not out[4].any()
    # Fewer words than nodes: what has a bit is a tree, the rest is outside.
    words = (nodes - 1) // 32
    mask = run_links(backend, parents, cu_rows, nodes)[0][:, :words]
    out = check_from_mask(backend, mask, cu_rows)
    assert_same(out[0][: 32 * words], parents[: 32 * words])
    assert (out[0][32 * words :] == -1).all() and out[4].tolist() == [BAD_TREE]


# --- Malformed masks ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rows, parents",
    [
        ([0b0, 0b11, 0b101], [-1, -1, -1]),  # the root has not its own bit
        ([0b11, 0b11, 0b101], [-1, -1, -1]),  # the root sees a later node
        ([0b1, 0b01, 0b101], [-1, -1, 0]),  # a node without its own bit, like its parent
        ([0b1, 0b10, 0b111], [-1, -1, -1]),  # a node without a parent, and one below it
        ([0b1, 0b111, 0b101], [-1, -1, 0]),  # a node that sees a later one
        ([0b1, 0b11, 0b110], [-1, 0, -1]),  # not all of its parent's ancestors
        ([0b1, 0b11, 0b111, 0b1101], [-1, 0, 1, -1]),  # two branches at once
        ([0b1, 0b111, 0b111, 0b1001], [-1, -1, -1, 0]),  # two nodes with one row
    ],
)
def test_malformed_masks_stay_in_their_request(backend, rows, parents):
    fine = [0b1, 0b11, 0b101, 0b1011]
    out = check_from_mask(backend, *masks_of([fine, rows, fine]))
    assert out[0].tolist() == [-1, 0, 0, 1, *parents, -1, 0, 0, 1]
    assert out[4].tolist() == [0, BAD_TREE, 0]


def test_bits_that_stand_for_no_row_are_ignored(backend):
    """Junk from bit rows_b on, in the words that the request uses and in later ones."""
    parents = links_oracle.random_parents(generator(5), 37)
    cu_rows = torch.tensor([0, 37], dtype=torch.int32)
    mask = links_oracle.tree_links(parents, cu_rows, 128)[0]
    junk = torch.randint(-(2**31), 2**31, mask.shape, generator=generator(6)).int()
    junk[:, 0] = 0
    junk[:, 1] &= ~0b11111
    out = check_from_mask(backend, mask | junk, cu_rows)
    assert_same(out[0], parents)
    assert not out[4].any()


# --- Layout ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("words", [0, 1, 2])
def test_empty_things(backend, batch, rows, words):
    cu_rows = torch.zeros(batch + 1, dtype=torch.int32)
    mask = torch.ones(rows, words, dtype=torch.int32)
    out = check_from_mask(backend, mask, cu_rows)
    assert out[0].shape == (rows,) and out[4].shape == (batch,)
    if batch:
        cu_rows[-1] = rows
        check_from_mask(backend, mask, cu_rows)


def test_offsets_are_clamped(backend):
    mask, _ = masks_of([[0b1, 0b11, 0b101, 0b1, 0b11]])
    for cu in ([-5, 3, 5], [0, 3, 2**31 - 1], [7, 7, 7], [-(2**31), 0, 3], [5, 5, 9]):
        check_from_mask(backend, mask, torch.tensor(cu, dtype=torch.int32))


@pytest.mark.parametrize("width, layout", [(5, "columns"), (3, "rows"), (0, "expanded")])
def test_strided_masks(backend, width, layout):
    """Any row stride: more columns than the mask has, every other row, the same row again."""
    g = generator(8)
    parents, cu_rows = ragged([random_tree(g, 5, 60) for _ in range(4)], padding=2)
    mask = links_oracle.tree_links(parents, cu_rows, 64)[0]
    if layout == "expanded":
        parents, cu_rows = ragged([[-1]] * 7)
        mask = torch.ones(7, 1, dtype=torch.int32)
    wanted = run_from_mask(backend, mask, cu_rows)
    mask, cu_rows = mask.to(backend.device), cu_rows.to(backend.device)
    if layout == "columns":
        wide = torch.full((len(mask), width), -1, dtype=torch.int32, device=backend.device)
        view = wide[:, 1 : 1 + mask.shape[1]]
        view.copy_(mask)
    elif layout == "rows":
        view = torch.stack([mask, ~mask, ~mask], dim=1)[:, 0]
    else:
        view = mask[:1].expand(7, 1)
    assert view.stride(0) != view.shape[1]
    for got, want in zip(backend.ops.tree_from_mask(view, cu_rows), wanted, strict=True):
        assert_same(got.cpu(), want)


def test_request_alone_and_in_any_batch(backend):
    g = generator(9)
    trees = [damaged(g, random_tree(g, 1, 40)) for _ in range(6)]
    parents, cu_rows = ragged(trees, padding=5)
    mask = links_oracle.tree_links(parents, cu_rows, 40)[0]
    together = run_from_mask(backend, mask, cu_rows)
    for b in range(len(trees)):
        begin, end = int(cu_rows[b]), int(cu_rows[b + 1])
        one = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = run_from_mask(backend, mask[begin:end], one)
        for got, want in zip(together[:4], alone[:4], strict=True):
            assert_same(got[begin:end], want)
        assert together[4][b] == alone[4][0]


def test_errors_name_op_argument_wanted_got(backend):
    mask, cu_rows = (t.to(backend.device) for t in masks_of([[0b1, 0b11], [0b1]], words=2))
    call = backend.ops.tree_from_mask
    bad = [
        ((mask[0], cu_rows), r"tree_from_mask: tree_mask: wanted shape \[R, W\], got \[2\]"),
        ((mask.long(), cu_rows), r"tree_mask: wanted dtype int32, got int64"),
        ((mask.bool(), cu_rows), r"tree_mask: wanted dtype int32, got bool"),
        ((mask.t().contiguous().t(), cu_rows), r"tree_mask: wanted stride 1"),
        ((mask, cu_rows.long()), r"cu_rows: wanted dtype int32, got int64"),
        ((mask, cu_rows[:0]), r"cu_rows: wanted at least 1 \(B \+ 1\)"),
        ((mask, cu_rows.repeat(2)[::2]), r"cu_rows: wanted a contiguous tensor"),
    ]
    for arguments, message in bad:
        with pytest.raises(RuntimeError, match=message):
            call(*arguments)


def test_opcheck_and_compile():
    mask, cu_rows = masks_of([[0b1, 0b11, 0b101], [0b1, 0b10]], words=2)
    for case in ((mask, cu_rows), (mask[:0], cu_rows[:1])):
        torch.library.opcheck(torch.ops.specdec.tree_from_mask.default, case)
    wanted = oracle.tree_from_mask(mask, cu_rows)
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(mask, cu_rows):
            return torch.ops.specdec.tree_from_mask(mask, cu_rows)

        for got, want in zip(step(mask, cu_rows), wanted, strict=True):
            assert_same(got, want)


# --- Fuzz -----------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzz(backend_name, data):
    """Masks of trees with some bits turned over, in any batch."""
    sizes = st.one_of(st.integers(0, 12), st.sampled_from([31, 32, 33, 64, 70]))
    requests = []
    for _ in range(data.draw(st.integers(0, 4))):
        nodes = data.draw(sizes)
        requests.append(
            [data.draw(st.integers(0, max(i - 1, 0))) if i else -1 for i in range(nodes)]
        )
    parents, cu_rows = ragged(requests, padding=data.draw(st.integers(0, 3)))
    mask = links_oracle.tree_links(parents, cu_rows, data.draw(st.sampled_from([32, 70, 96])))[0]
    if mask.numel():
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, mask.numel() - 1))
            word = (int(mask.view(-1)[at]) % 2**32) ^ (1 << data.draw(st.integers(0, 31)))
            mask.view(-1)[at] = word - 2**32 if word >= 2**31 else word
    check_from_mask(backends.get(backend_name), mask, cu_rows)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
