"""tree_links: every element against the oracle, on every backend, bit for bit."""

import itertools

import backends
import pytest
import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import tree_links as oracle
from tree_cases import check_links, damaged, ragged, random_tree, run_links

BAD_TREE = 16


def generator(seed):
    return torch.Generator().manual_seed(seed)


# --- All small trees ------------------------------------------------------------------------------
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("max_nodes", [32, 3])
def test_every_parent_array(backend, nodes, max_nodes):
    """All arrays of parents, most of them malformed: one request each, in one batch."""
    values = range(-1, nodes + 1) if nodes == 5 else [-7, *range(-1, nodes), nodes + 40]
    arrays = list(itertools.product(values, repeat=nodes))
    if backend.name != "cpu" and len(arrays) > 1000:
        arrays = arrays[:: len(arrays) // 997]
    status = check_links(backend, *ragged(arrays), max_nodes)[4]
    valid = [a[0] == -1 and all(0 <= p < i for i, p in enumerate(a) if i) for a in arrays]
    wanted = torch.tensor(valid) & (nodes <= max_nodes)
    assert_same(status == 0, wanted, "well-formed")


def test_valid_trees_of_five_nodes(backend):
    """All 24 of them: parents 0; 0, 1; 0, 1, 2; 0, 1, 2, 3."""
    arrays = [(-1, *rest) for rest in itertools.product(*(range(i) for i in range(1, 5)))]
    assert len(arrays) == 24
    assert not check_links(backend, *ragged(arrays), 5)[4].any()


# --- Random trees ---------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_matches_oracle(backend, seed):
    """50 trees in one ragged batch, half of them damaged, some requests empty, rows of no request."""
    g = generator(seed)
    trees = [random_tree(g) for _ in range(50)]
    trees = [damaged(g, t) if i % 2 else t for i, t in enumerate(trees)]
    trees[7] = trees[31] = []
    check_links(backend, *ragged(trees, padding=seed % 3 * 40, leading=seed % 2 * 3), 64)


@pytest.mark.parametrize("nodes", [31, 32, 33, 64, 65, 256, 300])
@pytest.mark.parametrize("kind", ["any", "chain", "star", "deep"])
def test_sizes_around_words(backend, nodes, kind):
    if backend.name in ("emu_hooks", "emu_asan") and nodes > 65:
        nodes = 140
    parents = oracle.random_parents(generator(nodes), nodes, kind).tolist()
    small = oracle.random_parents(generator(1), 5).tolist()
    for max_nodes in (nodes - 1, nodes, nodes + 1):
        status = check_links(backend, *ragged([small, parents, small]), max_nodes)[4]
        assert status.tolist() == [0, BAD_TREE if max_nodes < nodes else 0, 0]


def test_more_words_than_a_warp_has_lanes(backend):
    """A mask row of 40 words: lanes own two words each."""
    parents = oracle.random_parents(generator(3), 100, "deep").tolist()
    check_links(backend, *ragged([parents, [-1, 0]]), 1260)
    if backend.name == "cpu":
        parents = oracle.random_parents(generator(4), 1300, "deep").tolist()
        check_links(backend, *ragged([parents]), 1300)
        check_links(backend, *ragged([parents]), 1200)


# --- Malformed trees ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "parents, depth",
    [
        ([-1, 1, 0], [0, -1, 1]),  # its own parent
        ([-1, 2, 0], [0, -1, 1]),  # a later node
        ([-1, 2, 1, 0], [0, -1, -1, 1]),  # a cycle
        ([-1, 3, 0], [0, -1, 1]),  # no node
        ([-1, -2, 1], [0, -1, -1]),  # no node, and a node below it
        ([-1, 0, -1, 2, 1], [0, 1, -1, -1, 2]),  # a second root
        ([0, 0, 1], [0, 1, 2]),  # a root that is its own child
        ([2, 0, 2, 2], [0, 1, -1, -1]),  # a root with the parent of a later node, which is none
        ([2**31 - 1, 0, -(2**31)], [0, 1, -1]),
    ],
)
def test_malformed_trees_stay_in_their_request(backend, parents, depth):
    fine = [-1, 0, 0, 1]
    out = check_links(backend, *ragged([fine, parents, fine]), 8)
    alone = run_links(backend, *ragged([fine]), 8)
    assert out[1][4:-4].tolist() == depth
    assert out[4].tolist() == [0, BAD_TREE, 0]
    for got, wanted in zip(out[:4], alone[:4], strict=True):
        assert_same(got[:4], wanted)
        assert_same(got[-4:], wanted)


def test_a_root_that_names_a_parent_gets_no_sibling(backend):
    """Node 3 has the same parent 1, and is a node of the tree: the root is still beside nobody."""
    out = check_links(backend, *ragged([[1, 0, 0, 1]]), 4)
    assert out[3].tolist() == [-1, 2, -1, -1]
    assert out[2].tolist() == [1, 3, -1, -1]


def test_nodes_past_max_nodes(backend):
    """Outside: the mask is the own bit as long as there is a word for it, and no child is linked."""
    parents = [-1, 0, 1, 1, 0]
    mask, depth, first_child, next_sibling, status = check_links(backend, *ragged([parents]), 3)
    assert mask[:, 0].tolist() == [0b1, 0b11, 0b111, 0b1000, 0b10000]
    assert depth.tolist() == [0, 1, 2, -1, -1]
    assert next_sibling.tolist() == [-1] * 5 and first_child.tolist() == [1, 2, -1, -1, -1]
    assert status.tolist() == [BAD_TREE]
    chain = oracle.random_parents(generator(0), 40, "chain").tolist()
    mask = check_links(backend, *ragged([chain]), 32)[0]
    assert (mask[32:] == 0).all() and mask[31, 0] == -1


# --- Layout ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("max_nodes", [0, 1, 33])
def test_empty_things(backend, batch, rows, max_nodes):
    """Rows without requests, requests without rows, trees without capacity."""
    cu_rows = torch.zeros(batch + 1, dtype=torch.int32)
    parents = torch.full((rows,), 3, dtype=torch.int32)
    out = check_links(backend, parents, cu_rows, max_nodes)
    assert out[0].shape == (rows, (max_nodes + 31) // 32) and out[4].shape == (batch,)
    if batch:  # all rows, in the last request
        cu_rows[-1] = rows
        check_links(backend, parents, cu_rows, max_nodes)


def test_offsets_are_clamped(backend):
    """Offsets outside 0..R: a shorter or an empty request, and no access outside."""
    parents = torch.tensor([-1, 0, 0, -1, 0], dtype=torch.int32)
    for cu in ([-5, 3, 5], [0, 3, 2**31 - 1], [7, 7, 7], [-(2**31), 0, 3], [5, 5, 9]):
        check_links(backend, parents, torch.tensor(cu, dtype=torch.int32), 8)


@pytest.mark.parametrize("step", [2, 5])
def test_strided_parents(backend, step):
    g = generator(8)
    parents, cu_rows = ragged([random_tree(g, 5, 40) for _ in range(4)], padding=2)
    spread = torch.full((len(parents), step), -9, dtype=torch.int32)
    spread[:, 0] = parents
    wanted = run_links(backend, parents, cu_rows, 40)
    spread, cu_rows = spread.to(backend.device), cu_rows.to(backend.device)
    assert spread[:, 0].stride() == (step,)
    for got, want in zip(backend.ops.tree_links(spread[:, 0], cu_rows, 40), wanted, strict=True):
        assert_same(got.cpu(), want)
    # One parent for all rows: a view with stride 0.
    alone = torch.zeros(1, dtype=torch.int32, device=backend.device).expand(6)
    rows = torch.tensor([0, 6], dtype=torch.int32, device=backend.device)
    depth = backend.ops.tree_links(alone, rows, 6)[1]
    assert depth.tolist() == [0, 1, 1, 1, 1, 1]


def test_request_alone_and_in_any_batch(backend):
    g = generator(9)
    trees = [damaged(g, random_tree(g, 1, 40)) for _ in range(6)]
    parents, cu_rows = ragged(trees, padding=5)
    together = run_links(backend, parents, cu_rows, 40)
    for b, tree in enumerate(trees):
        alone = run_links(backend, *ragged([tree]), 40)
        begin, end = cu_rows[b], cu_rows[b + 1]
        for got, want in zip(together[:4], alone[:4], strict=True):
            assert_same(got[begin:end], want)
        assert together[4][b] == alone[4][0]


def test_errors_name_op_argument_wanted_got(backend):
    parents, cu_rows = (t.to(backend.device) for t in ragged([[-1, 0, 1], [-1]]))
    call = backend.ops.tree_links
    bad = [
        ((parents[None], cu_rows, 4), r"tree_links: parents: wanted shape \[R\], got \[1, 4\]"),
        ((parents.long(), cu_rows, 4), r"parents: wanted dtype int32, got int64"),
        ((parents, cu_rows.long(), 4), r"cu_rows: wanted dtype int32, got int64"),
        ((parents, cu_rows[:0], 4), r"cu_rows: wanted at least 1 \(B \+ 1\)"),
        ((parents, cu_rows[None], 4), r"cu_rows: wanted shape \[B\+1\]"),
        ((parents, cu_rows.repeat(2)[::2], 4), r"cu_rows: wanted a contiguous tensor"),
        ((parents, cu_rows, -1), r"max_nodes: wanted a number from 0 to 2\^31 - 1, got -1"),
        ((parents, cu_rows, 2**31), r"max_nodes: wanted a number from 0 to 2\^31 - 1, got 2147"),
    ]
    for arguments, message in bad:
        with pytest.raises(RuntimeError, match=message):
            call(*arguments)


def test_opcheck_and_compile():
    parents, cu_rows = ragged([[-1, 0, 0, 1], [-1, 0]], padding=1)
    for case in ((parents, cu_rows, 40), (parents[:0], cu_rows[:1], 0)):
        torch.library.opcheck(torch.ops.specdec.tree_links.default, case)
    wanted = oracle.tree_links(parents, cu_rows, 40)
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(parents, cu_rows, max_nodes):
            return torch.ops.specdec.tree_links(parents, cu_rows, max_nodes)

        for got, want in zip(step(parents, cu_rows, 40), wanted, strict=True):
            assert_same(got, want)


# --- Fuzz -----------------------------------------------------------------------------------------
@st.composite
def batches(draw):
    """Requests of any parents near the range of node numbers, mostly well-formed."""
    requests = []
    for _ in range(draw(st.integers(0, 4))):
        nodes = draw(st.one_of(st.integers(0, 12), st.sampled_from([31, 32, 33, 64, 70])))
        valid = [draw(st.integers(0, max(i - 1, 0))) if i else -1 for i in range(nodes)]
        for _ in range(draw(st.integers(0, 3)) if nodes else 0):
            at = draw(st.integers(0, nodes - 1))
            valid[at] = draw(
                st.one_of(st.integers(-2, nodes + 1), st.integers(-(2**31), 2**31 - 1))
            )
        requests.append(valid)
    return ragged(requests, padding=draw(st.integers(0, 3)), leading=draw(st.integers(0, 2)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), max_nodes=st.one_of(st.integers(0, 100), st.sampled_from([32, 64, 1100])))
def test_fuzz(backend_name, batch, max_nodes):
    check_links(backends.get(backend_name), *batch, max_nodes)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
