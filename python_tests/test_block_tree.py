"""block_tree: the best trees of a block drafter against all paths there are, and their bits, on every backend."""

import math

import backends
import pytest
import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import block_tree as oracle
from oracles import expand_tree as expansion
from test_build_tree import paths_of
from tree_cases import check_links, soil

POSITIONAL = ["logits", "anchor_ids", "positions", "num_nodes", "topk"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF, BAD_TREE, DRAFT_NAN = math.nan, math.inf, 16, 2


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def run(backend, case):
    batch, nodes = case["logits"].shape[0], case["num_nodes"]
    soil(*[batch * nodes] * 3, *[2 * batch * nodes] * 2, batch * nodes * -(-nodes // 32), batch)
    return backend.call("block_tree", POSITIONAL, case)


def check(backend, case):
    """The op against the oracle, which rounds as it does; returns the op's results by name. Where two scores are
    closer than the rounding of a log-probability the trees may differ: no case here has such."""
    out = run(backend, case)
    options = {k: v for k, v in case.items() if k not in POSITIONAL}
    wanted = oracle.block_tree(*[case[name] for name in POSITIONAL], **options)
    for name, mine, theirs in zip(oracle.NAMES, out, wanted, strict=True):
        assert_same(mine, theirs, name)
    return dict(zip(oracle.NAMES, out, strict=True))


# --- Against the oracle -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, topk, num_nodes", [(1, 1, 2), (3, 4, 12), (7, 3, 33), (5, 8, 64), (1, 32, 40)]
)
def test_matches_oracle(backend, dtype, rows, topk, num_nodes):
    case = oracle.random_case(seeded(rows), 2, rows, 300, topk, num_nodes)
    case["logits"] = case["logits"].to(dtype)
    if (
        dtype == torch.float32
    ):  # of 16 bits many logits tie, and sums of their paths do to the last bit only here
        check(backend, case)
    for mine, theirs in zip(run(backend, case), run(backends.get("cpu"), case), strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("rows, topk, num_nodes", [(3, 3, 10), (4, 2, 15), (2, 5, 14), (5, 3, 40)])
def test_no_other_tree_is_more_probable(backend, rows, topk, num_nodes):
    """The nodes are the best of all paths, whose parents are then among them; their order is that of the scores."""
    for seed in range(6):
        case = oracle.random_case(seeded(seed), 2, rows, 9, topk, num_nodes)
        out = check(backend, case)
        for b in range(2):
            laws = oracle.position_laws(case["logits"], b, topk, vocab_size=9)
            got = paths_of(out["input_ids"][b].tolist(), out["parents"][b].tolist())
            assert set(got) == oracle.best_paths(laws, num_nodes)
            score = [sum(dict(laws[g])[t] for g, t in enumerate(path)) for path in got]
            assert score == sorted(score, reverse=True)


def test_the_first_nodes_are_the_smaller_tree(backend):
    case = oracle.random_case(seeded(1), 3, 5, 40, 6, 64)
    whole = run(backend, case)
    for count in (1, 2, 7, 33, 50):
        ids, parents, mask, positions, *_ = run(backend, case | {"num_nodes": count})
        for small, large in ((ids, whole[0]), (parents, whole[1]), (positions, whole[3])):
            assert_same(small, large[:, :count].contiguous())
        assert_same(mask, whole[2][:, :count, : mask.shape[2]].contiguous())


def test_largest_sizes(backend):
    check(backend, oracle.random_case(seeded(2), 1, 64, 40, 1, 65))
    out = run(backend, oracle.random_case(seeded(3), 1, 16, 3000, 32, 256, torch.bfloat16))
    assert out[6].tolist() == [0] and (out[1][:, 1:] >= 0).all()


@pytest.mark.parametrize("batch, rows, num_nodes", [(0, 3, 5), (2, 0, 4), (2, 0, 1), (3, 2, 1)])
def test_sizes(backend, batch, rows, num_nodes):
    out = check(backend, oracle.random_case(seeded(4), batch, rows, 20, 3, num_nodes))
    assert (out["status"] == (BAD_TREE if rows == 0 and num_nodes > 1 else 0)).all()


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("places", [torch.int32, torch.int64])
def test_index_types(backend, ids, places):
    case = oracle.random_case(seeded(5))
    case["anchor_ids"], case["positions"] = case["anchor_ids"].to(ids), case["positions"].to(places)
    assert check(backend, case)["input_ids"].dtype == ids
    strided = case | {n: case[n].repeat_interleave(3)[::3] for n in ("anchor_ids", "positions")}
    for mine, theirs in zip(run(backend, strided), run(backend, case), strict=True):
        assert_same(mine, theirs)


# --- Laws -------------------------------------------------------------------------------------------
def test_temperature(backend):
    """Sharp laws make deep trees, flat ones wide trees; greedy is 1."""
    case = oracle.random_case(seeded(6), 5, 4, 30, 6, 20)
    case["logits"] = case["logits"][:1].repeat(5, 1, 1)
    case["temperature"] = torch.tensor([0.3, 4.0, 1.0, 0.0, NAN])
    out = check(backend, case)
    depth = (out["node_positions"] - out["node_positions"][:, :1]).float().mean(1)
    assert depth[0] > depth[2] > depth[1]
    plain = run(backend, {k: v for k, v in case.items() if k != "temperature"})
    for b in (2, 3, 4):
        assert_same(out["input_ids"][b, 1:], plain[0][b, 1:])
        assert_same(out["parents"][b], plain[1][b])


def test_ties_go_by_depth_then_parent_then_rank(backend):
    """Two tokens of one half at every position: all paths of a depth are equal."""
    case = oracle.random_case(seeded(7), 1, 3, 2, 2, 15)
    case["logits"] = torch.zeros(1, 3, 2)
    out = check(backend, case)
    assert out["parents"].tolist() == [[-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]]
    assert out["input_ids"][0, 1:].tolist() == [0, 1] * 7


def test_sure_tokens_come_in_order(backend):
    """Probability 1 at every position: equal scores from the root to the leaf."""
    case = oracle.random_case(seeded(8), 1, 5, 8, 4, 9)
    case["logits"][:] = -INF
    case["logits"][0, torch.arange(5), torch.arange(5)] = 3.0
    out = check(backend, case)
    assert out["input_ids"][0, 1:].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert out["parents"][0].tolist() == [-1, 0, 1, 2, 3, 4, -1, -1, -1]
    assert out["status"].tolist() == [BAD_TREE]


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_row_ends_the_tree(backend, value):
    case = oracle.random_case(seeded(9), 3, 4, 20, 3, 9)
    case["logits"][0, 2, 5] = value
    case["logits"][1, 0] = -INF
    out = check(backend, case)
    assert out["status"].tolist() == [DRAFT_NAN, DRAFT_NAN | BAD_TREE, 0]
    assert (out["node_positions"][0] - case["positions"][0]).max() == 2
    assert out["input_ids"][1].tolist() == [int(case["anchor_ids"][1])] + [-1] * 8
    alone = {k: v[2:] if torch.is_tensor(v) else v for k, v in case.items()}
    for mine, theirs in zip(run(backend, alone), out.values(), strict=True):
        assert_same(mine, theirs[2:])


def test_fewer_tokens_than_topk(backend):
    case = oracle.random_case(seeded(10), 1, 2, 12, 8, 30)
    case["logits"][0, 0, 3:] = -INF
    out = check(backend, case)
    assert (out["parents"][0] == 0).sum() == 3 and out["status"].tolist() == [BAD_TREE]


@pytest.mark.parametrize("offset", [True, False])
def test_d2t(backend, offset):
    g = seeded(11)
    case = oracle.random_case(g, 2, 3, 25, 5, 16) | {"vocab_size": 90}
    d2t = expansion.random_d2t(g, 25, 90, offset)
    d2t[int(case["logits"][0, 0].argmax())] = 1000
    out = check(backend, case | {"d2t": d2t, "d2t_is_offset": offset})
    assert (out["input_ids"] < 90).all() and (out["status"] == 0).all()


# --- Bits and consistency -----------------------------------------------------------------------------
def test_batch_and_threads_change_nothing(backend):
    case = oracle.random_case(seeded(12), 5, 4, 2500, 6, 40, torch.bfloat16)
    wanted = run(backend, case)
    for name, mine, theirs in zip(
        oracle.NAMES, wanted, run(backends.get("cpu"), case), strict=True
    ):
        assert_same(mine, theirs, name)
    order = [4, 0, 2]
    taken = {k: v[order] if torch.is_tensor(v) else v for k, v in case.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for mine, theirs in zip(run(backend, taken), wanted, strict=True):
            assert_same(mine, theirs[order])
    finally:
        torch.set_num_threads(threads)


def test_outputs_agree_with_tree_links(backend):
    case = oracle.random_case(seeded(13), 4, 6, 60, 5, 40)
    out = dict(zip(oracle.NAMES, run(backend, case), strict=True))
    mask, depth, first, following, status = check_links(
        backend, out["parents"].flatten(), (torch.arange(5) * 40).int(), 40
    )
    assert_same(mask.view(4, 40, -1), out["tree_mask"])
    assert_same(first.view(4, -1), out["first_child"])
    assert_same(following.view(4, -1), out["next_sibling"])
    assert_same(status, out["status"])
    assert torch.equal(out["node_positions"] - case["positions"][:, None], depth.view(4, -1).long())


def test_verification_accepts_what_the_target_likes(backend):
    """A target of the drafter's own laws, greedy: the path of the most probable tokens is accepted whole."""
    case = oracle.random_case(seeded(14), 2, 3, 20, 4, 16)
    ids, parents, _, positions, *_ = run(backend, case)
    depth = positions - case["positions"][:, None]
    rows = torch.cat([case["logits"], torch.zeros(2, 1, 20)], 1)
    target = rows.gather(1, depth[..., None].expand(-1, -1, 20)).flatten(0, 1)
    names = ["target_logits", "input_ids", "parents", "cu_rows", "seeds", "positions", "max_depth"]
    call = dict(zip(names, (
        target, ids.flatten(), parents.flatten(), torch.tensor([0, 16, 32]).int(),
        torch.zeros(2).long(), case["positions"], 3), strict=True))  # fmt: skip
    call |= {"vocab_size": 20, "temperature": torch.zeros(2)}
    tokens, _, num_accepted, status, *_ = backend.call("verify_tree", names, call)
    assert status.tolist() == [0, 0]
    best = case["logits"].argmax(-1)
    for b in range(2):
        reached = int(num_accepted[b])
        assert reached >= 1 and tokens[b, :reached].tolist() == best[b, :reached].tolist()


# --- Arguments ----------------------------------------------------------------------------------------
def test_errors_name_op_argument_wanted_got(backend):
    case = oracle.random_case(seeded(15), 3, 2, 20) | {"temperature": torch.ones(3)}
    bad = [
        ({"logits": case["logits"].double()}, r"block_tree: logits: wanted dtype float32 or float16 or bfloat16"),
        ({"logits": case["logits"][0]}, r"logits: wanted shape \[B, G, V'\], got \[2, 20\]"),
        ({"logits": torch.zeros(3, 65, 20)}, r"logits: wanted at most 64 positions, got 65"),
        ({"vocab_size": 21}, r"logits: wanted at least 21 \(vocab_size\)"),
        ({"topk": 33}, r"topk: wanted a number from 1 to 32, got 33"),
        ({"num_nodes": 0}, r"num_nodes: wanted a number from 1 to 256, got 0"),
        ({"num_nodes": 257}, r"num_nodes: wanted a number from 1 to 256, got 257"),
        ({"anchor_ids": case["anchor_ids"][1:]}, r"anchor_ids: wanted size 3 \(B of logits\)"),
        ({"positions": case["positions"].float()}, r"positions: wanted dtype int32 or int64"),
        ({"temperature": torch.ones(2)}, r"temperature: wanted size 3 \(B of logits\)"),
        ({"temperature": torch.ones(3).half()}, r"temperature: wanted dtype float32"),
        ({"d2t": torch.zeros(9).int()}, r"d2t: wanted dtype int64"),
    ]  # fmt: skip
    for change, message in bad:
        with pytest.raises(RuntimeError, match=message):
            run(backend, case | change)
    before = {k: v.clone() for k, v in case.items() if torch.is_tensor(v)}
    run(backend, case)
    for name, tensor in before.items():
        assert_same(case[name], tensor, name)


def test_opcheck_and_compile():
    case = oracle.random_case(seeded(16), 3, 2, 20)
    arguments = [case[name] for name in POSITIONAL]
    options = {"vocab_size": 20, "temperature": torch.ones(3)}
    torch.library.opcheck(torch.ops.specdec.block_tree.default, arguments, options)
    wanted = torch.ops.specdec.block_tree(*arguments, **options)
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(*arguments, **options):
            return torch.ops.specdec.block_tree(*arguments, **options)

        for mine, theirs in zip(step(*arguments, **options), wanted, strict=True):
            assert_same(mine, theirs)


# --- Fuzz -----------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzz(backend_name, data):
    """Anything in the logits: a valid tree of ids inside the vocabulary, the same on the CPU."""
    backend = backends.get(backend_name)
    number = st.one_of(st.sampled_from([0.0, 1.0, 1.0, 2.0, -INF]), st.sampled_from([NAN, INF, 3e38, -3e38]),
                       st.floats(-5, 5, width=32))  # fmt: skip
    batch, rows, vocab = (
        data.draw(st.integers(0, 2)),
        data.draw(st.integers(0, 4)),
        data.draw(st.integers(1, 6)),
    )
    count = batch * rows * vocab
    logits = torch.tensor(
        data.draw(st.lists(number, min_size=count, max_size=count)), dtype=torch.float32
    )
    case = oracle.random_case(
        seeded(0), batch, 0, vocab, data.draw(st.integers(1, 8)), data.draw(st.integers(1, 40))
    )
    case["logits"] = logits.view(batch, rows, vocab)
    if data.draw(st.booleans()):
        case["temperature"] = torch.tensor(
            data.draw(st.lists(number, min_size=batch, max_size=batch))
        )
    out = dict(zip(oracle.NAMES, run(backend, case), strict=True))
    wanted = run(backends.get("cpu"), case)
    for name, mine, theirs in zip(oracle.NAMES, out.values(), wanted, strict=True):
        assert_same(mine, theirs, name)
    nodes = case["num_nodes"]
    assert (out["input_ids"] < vocab).all()
    links = check_links(
        backend, out["parents"].flatten(), (torch.arange(batch + 1) * nodes).int(), nodes
    )
    assert_same(links[0], out["tree_mask"].flatten(0, 1))
    assert torch.equal(links[4] & BAD_TREE, out["status"] & BAD_TREE)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
