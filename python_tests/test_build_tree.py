"""build_tree: trees of scored candidates against the oracle, EAGLE-2's own words and tree_links, on every backend."""

import json
import math
import pathlib
import zlib

import backends
import pytest
import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import build_tree as oracle
from tree_cases import check_links, soil

POSITIONAL = [
    "candidate_tokens", "candidate_scores", "candidate_parents", "anchor_ids", "positions",
    "num_nodes",
]  # fmt: skip
CASES = pathlib.Path(__file__).parent / "cases"
NAN, INF, BAD_TREE = math.nan, math.inf, 16


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def run(backend, case):
    batch, nodes = case["candidate_tokens"].shape[0], case["num_nodes"]
    soil(*[batch * nodes] * 3, *[2 * batch * nodes] * 2, batch * nodes * -(-nodes // 32), batch)
    return backend.call("build_tree", POSITIONAL, case)


def check(backend, case):
    """The op against the oracle; returns the op's results by name."""
    out = run(backend, case)
    wanted = oracle.build_tree(*[case[name] for name in POSITIONAL])
    for name, mine, theirs in zip(oracle.NAMES, out, wanted, strict=True):
        assert_same(mine, theirs, name)
    return dict(zip(oracle.NAMES, out, strict=True))


def case_of(scores, parents, num_nodes, tokens=None):
    """One request; its candidates have the tokens 10, 11, .., its anchor is 5 at position 100."""
    count = len(scores)
    return {
        "candidate_tokens": torch.tensor(
            [tokens or list(range(10, 10 + count))], dtype=torch.int64
        ),
        "candidate_scores": torch.tensor([scores], dtype=torch.float32).view(1, count),
        "candidate_parents": torch.tensor([parents], dtype=torch.int32).view(1, count),
        "anchor_ids": torch.tensor([5]),
        "positions": torch.tensor([100]),
        "num_nodes": num_nodes,
    }


# --- Against the oracle -----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["tree", "any", "tied"])
@pytest.mark.parametrize(
    "count, num_nodes", [(1, 2), (20, 12), (9, 30), (63, 33), (130, 64), (300, 256)]
)
def test_matches_oracle(backend, kind, count, num_nodes):
    for seed in range(3):
        check(backend, oracle.random_case(seeded(seed + count), 3, count, num_nodes, kind))


@pytest.mark.parametrize("kind", ["tree", "any"])
def test_largest_sizes(backend, kind):
    check(backend, oracle.random_case(seeded(1), 2, 2048, 256, kind))
    if kind == "tree":
        check(backend, case_of([-float(i) for i in range(300)], list(range(-1, 299)), 256))


@pytest.mark.parametrize(
    "batch, count, num_nodes", [(0, 5, 4), (0, 0, 1), (3, 0, 5), (3, 4, 1), (2, 0, 1)]
)
def test_sizes(backend, batch, count, num_nodes):
    out = check(backend, oracle.random_case(seeded(2), batch, count, num_nodes))
    assert (out["status"] == (BAD_TREE if num_nodes - 1 > count else 0)).all()


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("other", [torch.int32, torch.int64])
def test_index_types_and_strides(backend, ids, other):
    case = oracle.random_case(seeded(3), 4, 30, 16, dtype=ids)
    case["anchor_ids"], case["positions"] = (
        case["anchor_ids"].to(other),
        case["positions"].to(other),
    )
    wanted = check(backend, case)
    assert wanted["input_ids"].dtype == ids
    strided = dict(case)
    for name in POSITIONAL[:3]:
        strided[name] = case[name].repeat_interleave(2, 1).t().contiguous().t()[:, ::2]
    for name in POSITIONAL[3:5]:
        strided[name] = case[name].repeat_interleave(3)[::3]
    for name, mine in zip(oracle.NAMES, run(backend, strided), strict=True):
        assert_same(mine, wanted[name], name)


def test_long_positions(backend):
    case = case_of([-1.0, -2.0], [-1, 0], 3) | {"positions": torch.tensor([2**40])}
    assert check(backend, case)["node_positions"].tolist() == [[2**40, 2**40 + 1, 2**40 + 2]]


# --- A published case ---------------------------------------------------------------------------------
def test_published_trees(backend):
    """Two trees of SGLang's test of its own builder: scores are products of probabilities there."""
    published = json.loads((CASES / "eagle_tree_build_sglang.json").read_text())
    inputs, wanted = published["inputs"], published["expected"]
    topk, count, batch = inputs["topk"], inputs["num_nodes"], 2
    flat = {
        name: torch.cat([torch.tensor(level).reshape(batch, -1) for level in inputs[f"{name}_per_level"]], 1)
        for name in ("scores", "tokens")
    }  # fmt: skip
    table = torch.cat(
        [torch.tensor(t).view(batch, -1) for t in inputs["parents_per_level"][:-1]], 1
    )
    slots = torch.arange(flat["tokens"].shape[1]) // topk
    case = {
        "candidate_tokens": flat["tokens"],
        "candidate_scores": flat["scores"],
        "candidate_parents": table[:, slots].int(),
        "anchor_ids": torch.tensor(inputs["bonus_tokens"]),
        "positions": torch.tensor(inputs["seq_lens"]),
        "num_nodes": count,
    }
    out = check(backend, case)
    assert out["status"].tolist() == [0, 0]
    assert out["input_ids"].flatten().tolist() == wanted["draft_tokens"]
    assert out["node_positions"].flatten().tolist() == wanted["positions"]
    assert out["first_child"].tolist() == wanted["retrieve_next_token"]
    assert out["next_sibling"].tolist() == wanted["retrieve_next_sibling"]
    bits = out["tree_mask"][..., 0, None] >> torch.arange(count) & 1
    assert bits.tolist() == wanted["tree_mask_qlen_only_derived"]


# --- EAGLE-2's words -----------------------------------------------------------------------------------
VOCAB = 6


class ToyDrafter:
    """Laws over six tokens: of each request and prefix its own."""

    def __init__(self, seed, batch, table=997):
        self.rows = 2 * torch.randn(table, VOCAB, generator=seeded(seed))
        self.batch = batch

    def row(self, b, prefix):
        return self.rows[zlib.crc32(bytes([b % 256, b // 256, *prefix])) % len(self.rows)]

    def __call__(self, prefixes):
        return torch.stack(
            [torch.stack([self.row(b, p) for p in prefixes[b]]) for b in range(self.batch)]
        )


def expand_on(backend, topk):
    def expand(logits, scores):
        case = {"logits": logits, "parent_scores": scores, "topk": topk, "vocab_size": VOCAB}
        return backend.call("expand_tree", ["logits", "parent_scores", "topk"], case)

    return expand


def paths_of(ids, parents):
    """{path of tokens} of the nodes but the root, of one request."""
    paths = [()]
    for token, parent in list(zip(ids, parents, strict=True))[1:]:
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("topk, depth, num_nodes", [(3, 3, 8), (2, 4, 7), (4, 2, 12), (1, 4, 5)])
def test_thousand_trees_are_eagles(backend, topk, depth, num_nodes):
    """The same nodes as by the definition: grow, take the best of all that grew."""
    batch = 250 if backend.name == "cpu" else 40
    drafter = ToyDrafter(topk, batch)
    tokens, scores, parents = oracle.grow(drafter, batch, topk, depth, expand_on(backend, topk))
    anchors = torch.arange(batch)
    out = check(backend, dict(zip(POSITIONAL, (tokens, scores, parents, anchors, anchors, num_nodes),
                                  strict=True)))  # fmt: skip
    assert (out["status"] == 0).all()
    for b in range(batch):
        law = lambda prefix, b=b: torch.log_softmax(drafter.row(b, prefix).double(), 0).tolist()  # noqa: E731
        wanted = oracle.eagle_paths(law, topk, depth, num_nodes)
        got = paths_of(out["input_ids"][b].tolist(), out["parents"][b].tolist())
        assert len(set(got)) == len(got) and set(got) == set(wanted)


# --- Consistency ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["tree", "any", "tied"])
def test_outputs_agree_with_tree_links(backend, kind):
    """Parents go through tree_links: masks, depths, links and status come back as they are."""
    for seed, (count, num_nodes) in enumerate([(40, 33), (12, 20), (200, 64)]):
        case = oracle.random_case(seeded(seed), 4, count, num_nodes, kind)
        out = dict(zip(oracle.NAMES, run(backend, case), strict=True))
        cu_rows = (torch.arange(5) * num_nodes).int()
        mask, depth, first, following, status = check_links(
            backend, out["parents"].flatten(), cu_rows, num_nodes
        )
        assert_same(mask.view(4, num_nodes, -1), out["tree_mask"])
        assert_same(first.view(4, -1), out["first_child"])
        assert_same(following.view(4, -1), out["next_sibling"])
        assert_same(status, out["status"])
        above = out["node_positions"] - case["positions"][:, None]
        assert torch.equal(above, depth.view(4, -1).clamp(min=0).long())


def test_feeds_verification(backend):
    """A greedy target whose argmax is a path of the tree accepts exactly that path."""
    batch, topk, depth, num_nodes = 3, 3, 3, 10
    drafter = ToyDrafter(9, batch)
    grown = oracle.grow(drafter, batch, topk, depth, expand_on(backend, topk))
    anchors = torch.zeros(batch, dtype=torch.int64)
    out = dict(zip(oracle.NAMES, run(backend, dict(zip(
        POSITIONAL, (*grown, anchors, torch.arange(batch), num_nodes), strict=True))), strict=True))  # fmt: skip
    ids, parents = out["input_ids"], out["parents"]
    target = torch.zeros(batch * num_nodes, VOCAB)
    for b in range(batch):
        node, path = num_nodes - 1, []
        while node > 0:
            path, node = [node, *path], int(parents[b, node])
        for above, below in zip([0, *path], path, strict=False):
            target[b * num_nodes + above, ids[b, below]] = 9.0
    case = {
        "target_logits": target, "input_ids": ids.flatten(), "parents": parents.flatten(),
        "cu_rows": (torch.arange(batch + 1) * num_nodes).int(), "seeds": anchors,
        "positions": torch.arange(batch), "max_depth": depth, "vocab_size": VOCAB,
        "temperature": torch.zeros(batch),
    }  # fmt: skip
    names = ["target_logits", "input_ids", "parents", "cu_rows", "seeds", "positions", "max_depth"]
    tokens, path, num_accepted, status, *_ = backend.call("verify_tree", names, case)
    assert (status == 0).all()
    for b in range(batch):
        reached = int(num_accepted[b])
        assert int(path[b, reached]) == num_nodes - 1
        assert tokens[b, :reached].tolist() == ids[b, path[b, 1 : reached + 1].long()].tolist()


# --- Odd candidates ---------------------------------------------------------------------------------------
def test_children_wait_for_their_parents(backend):
    """Candidates 0 and 1 hang on 3, which hangs on 4: numbers go up as soon as they can."""
    out = check(backend, case_of([-3, -4, -5, -2, -1, -6], [3, 3, -1, 4, -1, 0], 7))
    assert out["input_ids"].tolist() == [[5, 12, 14, 13, 10, 11, 15]]
    assert out["parents"].tolist() == [[-1, 0, 0, 2, 3, 3, 4]]


def test_cycles_and_lost_parents_are_dropped_not_replaced(backend):
    parents = [1, 0, 2, 99, -2, -1, -1]
    out = check(backend, case_of([-1, -1, -1, -1, -1, -1, -9], parents, 7))
    assert out["input_ids"].tolist() == [[5, 15, -1, -1, -1, -1, -1]]
    assert out["status"].tolist() == [BAD_TREE]
    assert out["node_positions"].tolist() == [[100, 101] + [100] * 5]
    assert out["tree_mask"].flatten().tolist() == [1, 3, 4, 8, 16, 32, 64]
    long = list(range(1, 250)) + [0]  # one cycle of 250
    assert check(backend, case_of([-1.0] * 250, long, 251))["status"].tolist() == [BAD_TREE]


def test_a_chosen_child_of_one_that_is_not(backend):
    """Scores that grow towards the leaves: the child comes without its parent."""
    out = check(backend, case_of([-5, -1, -2], [-1, 0, -1], 3))
    assert out["input_ids"].tolist() == [[5, 12, -1]] and out["status"].tolist() == [BAD_TREE]


def test_backward_chain(backend):
    """Each candidate hangs on the next one."""
    count = 200
    out = check(backend, case_of([-1.0] * count, [*range(1, count), -1], count + 1))
    assert out["input_ids"].tolist() == [[5, *range(9 + count, 9, -1)]]
    assert out["parents"].tolist() == [list(range(-1, count))]


def test_batch_order_changes_nothing(backend):
    case = oracle.random_case(seeded(4), 6, 70, 40, "any")
    wanted = run(backend, case)
    order = [5, 0, 3]
    taken = {k: v[order] if torch.is_tensor(v) else v for k, v in case.items()}
    for mine, theirs in zip(run(backend, taken), wanted, strict=True):
        assert_same(mine, theirs[order])


# --- Arguments ----------------------------------------------------------------------------------------
def test_arguments_are_not_written(backend):
    case = oracle.random_case(seeded(5))
    before = {k: v.clone() for k, v in case.items() if torch.is_tensor(v)}
    run(backend, case)
    for name, tensor in before.items():
        assert_same(case[name], tensor, name)


def test_errors_name_op_argument_wanted_got(backend):
    case = oracle.random_case(seeded(6), 3, 20, 8)
    many = oracle.random_case(seeded(6), 1, 1, 2)
    wide = {k: v.expand(1, 2049) if k in POSITIONAL[:3] else v for k, v in many.items()}
    bad = [
        ({"candidate_tokens": case["candidate_tokens"].float()}, r"build_tree: candidate_tokens: wanted dtype int32 or int64, got float32"),
        ({"candidate_tokens": case["candidate_tokens"][0]}, r"candidate_tokens: wanted shape \[B, C\], got \[20\]"),
        (wide, r"candidate_tokens: wanted at most 2048 candidates of a request, got 2049"),
        ({"candidate_scores": case["candidate_scores"].half()}, r"candidate_scores: wanted dtype float32"),
        ({"candidate_scores": case["candidate_scores"][:, 1:]}, r"candidate_scores: wanted size 20 \(C of candidate_tokens\)"),
        ({"candidate_parents": case["candidate_parents"].long()}, r"candidate_parents: wanted dtype int32, got int64"),
        ({"candidate_parents": case["candidate_parents"][1:]}, r"candidate_parents: wanted size 3 \(B of candidate_tokens\)"),
        ({"anchor_ids": case["anchor_ids"][1:]}, r"anchor_ids: wanted size 3"),
        ({"anchor_ids": case["anchor_ids"].float()}, r"anchor_ids: wanted dtype int32 or int64"),
        ({"positions": case["positions"][None]}, r"positions: wanted shape \[B\]"),
        ({"num_nodes": 0}, r"num_nodes: wanted a number from 1 to 256, got 0"),
        ({"num_nodes": 257}, r"num_nodes: wanted a number from 1 to 256, got 257"),
    ]  # fmt: skip
    for change, message in bad:
        with pytest.raises(RuntimeError, match=message):
            run(backend, case | change)


def test_opcheck_and_compile():
    case = oracle.random_case(seeded(7), 3, 20, 9)
    arguments = [case[name] for name in POSITIONAL]
    torch.library.opcheck(torch.ops.specdec.build_tree.default, arguments)
    wanted = oracle.build_tree(*arguments)
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(*arguments):
            return torch.ops.specdec.build_tree(*arguments)

        for mine, theirs in zip(step(*arguments), wanted, strict=True):
            assert_same(mine, theirs)


# --- Fuzz -----------------------------------------------------------------------------------------
@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzz(backend_name, data):
    score = st.one_of(
        st.sampled_from([-1.0, -2.0]), st.sampled_from([NAN, INF, -INF, 0.0, -0.0]),
        st.floats(-9, 0, width=32),
    )  # fmt: skip
    count = data.draw(st.integers(0, 40))
    parent = st.one_of(
        st.integers(-1, max(count - 1, 0)), st.sampled_from([-(2**31), 2**31 - 1, count])
    )
    token = st.one_of(st.integers(0, 9), st.sampled_from([-1, -(2**63), 2**63 - 1]))

    def some(kind):
        return data.draw(st.lists(kind, min_size=count, max_size=count))

    case = case_of(some(score), some(parent), data.draw(st.integers(1, 45)), some(token))
    check(backends.get(backend_name), case)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
