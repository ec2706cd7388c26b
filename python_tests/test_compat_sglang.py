"""specdec_ext.compat.sgl_kernel: published cases, the peer's semantics node by node, the exact law, callers."""

import itertools
import json
import pathlib

import pytest
import torch
from compare import assert_same
from compat_callers import on, parameters, use_backend, with_import_changed, with_peer
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import compat_sgl_kernel as oracle

from specdec_ext.compat import sgl_kernel

CASES = pathlib.Path(__file__).parent / "cases"
LINKS = ["retrive_index", "retrive_next_token", "retrive_next_sibling"]
TREE = "candidates retrive_index retrive_next_token retrive_next_sibling"
OUT = "predicts accept_index accept_token_num"
BUILT = "verified_seq_len {}positions retrive_index retrive_next_token retrive_next_sibling"
SIGNATURES = {
    "verify_tree_greedy": f"{OUT} {TREE} target_predict",
    "tree_speculative_sampling_target_only": f"{OUT} {TREE} uniform_samples "
    "uniform_samples_for_final_sampling target_probs draft_probs threshold_single=1.0 threshold_acc=1.0 deterministic=True",
    "build_tree_kernel_efficient": "parent_list selected_index "
    + BUILT.format("tree_mask ")
    + " topk depth draft_token_num tree_mask_mode",
    "reconstruct_indices_from_tree_mask": "tree_mask " + BUILT.format("") + " batch_size draft_token_num",
    "segment_packbits": "x input_indptr output_indptr y batch_size",
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_peers(name):
    assert parameters(getattr(sgl_kernel, name)) == SIGNATURES[name].split()
    assert parameters(getattr(oracle, name)) == SIGNATURES[name].split()


@pytest.fixture
def compat(backend, monkeypatch):
    """The module under test, on a backend: called with CPU tensors, which are written back in place."""
    use_backend(monkeypatch, backend)

    class Module:
        def __getattr__(self, name):
            def call(**arguments):
                there = on(backend, arguments)
                getattr(sgl_kernel, name)(**there)
                for key, value in arguments.items():
                    if torch.is_tensor(value) and value is not there[key]:
                        value.copy_(there[key])

            return call

    return Module()


def outputs(batch, nodes, depth):
    return {
        "predicts": torch.full((batch * nodes,), -7, dtype=torch.int32),
        "accept_index": torch.full((batch, depth), -1, dtype=torch.int32),
        "accept_token_num": torch.full((batch,), -9, dtype=torch.int32),
    }


def links_of(trees, orders=None):
    """The three tensors of trees given as lists of parents; children in the order of `orders` (ascending)."""
    nodes = len(trees[0])
    first, sibling = (torch.full((len(trees), nodes), -1) for _ in range(2))
    for b, parents in enumerate(trees):
        for u in range(nodes):
            children = [c for c in range(1, nodes) if parents[c] == u]
            if orders:
                children.sort(key=lambda c, b=b: orders[b][c])
            for here, after in itertools.pairwise([*children, -1]):
                sibling[b, here] = after
            if children:
                first[b, u] = children[0]
    index = torch.arange(len(trees) * nodes).view(len(trees), nodes)
    return {"retrive_index": index, "retrive_next_token": first, "retrive_next_sibling": sibling}


def run_both(compat, name, arguments):
    """The function and its oracle on copies of the arguments; every tensor must end up the same."""
    mine, theirs = (
        {k: v.clone() if torch.is_tensor(v) else v for k, v in arguments.items()} for _ in range(2)
    )
    getattr(compat, name)(**mine)
    getattr(oracle, name)(**theirs)
    for key, value in theirs.items():
        if torch.is_tensor(value):
            assert_same(mine[key], value, f"{name}: {key}")
    return mine


# --- Published cases --------------------------------------------------------------------------------
def test_greedy_case_of_the_peer(compat):
    published = json.loads((CASES / "tree_verify_greedy_sglang.json").read_text())
    inputs = {k: v for k, v in published["inputs"].items() if isinstance(v, list)}
    inputs = {k.replace("retrieve", "retrive"): torch.tensor(v) for k, v in inputs.items()}
    inputs["target_predict"] = inputs.pop("target_argmax")
    out = outputs(2, 6, published["inputs"]["max_path"])
    out["predicts"].fill_(published["inputs"]["predicts_fill"])
    compat.verify_tree_greedy(**out, **inputs)
    for key, wanted in published["expected"].items():
        assert out[key].tolist() == wanted, key


def built(batch, nodes, mode, seq_lens=(), node_bytes=1):
    size = {
        0: sum(nodes * (s + nodes) for s in seq_lens),
        1: batch * nodes * nodes,
        2: batch * nodes * node_bytes,
    }[mode]
    mask = torch.ones(size, dtype=torch.uint8 if mode == 2 else torch.bool)
    return {
        "tree_mask": mask,
        "positions": torch.full((batch * nodes,), -5),
        "retrive_index": torch.full((batch, nodes), -5),
        "retrive_next_token": torch.full((batch, nodes), -1),
        "retrive_next_sibling": torch.full((batch, nodes), -1),
    }


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_build_case_of_the_peer(compat, mode):
    published = json.loads((CASES / "eagle_tree_build_sglang.json").read_text())
    given, wanted = published["inputs"], published["expected"]
    topk, depth, nodes = given["topk"], given["depth"], given["num_nodes"]
    scores = [torch.tensor(level).flatten(1) for level in given["scores_per_level"]]
    chosen = torch.cat(scores, 1).topk(nodes - 1).indices.sort().values
    assert chosen.tolist() == wanted["selected_index_derived"]
    arguments = {
        "parent_list": torch.cat([torch.tensor(x) for x in given["parents_per_level"][:-1]], 1),
        "selected_index": chosen,
        "verified_seq_len": torch.tensor(given["seq_lens"]),
        "topk": topk,
        "depth": depth,
        "draft_token_num": nodes,
        "tree_mask_mode": mode,
        **built(2, nodes, mode, given["seq_lens"]),
    }
    out = run_both(compat, "build_tree_kernel_efficient", arguments)
    assert out["positions"].tolist() == wanted["positions"]
    for key in LINKS:
        assert out[key].tolist() == wanted[key.replace("retrive", "retrieve")], key
    tree = torch.tensor(wanted["tree_mask_qlen_only_derived"])
    if mode == 1:
        assert out["tree_mask"].view(2, nodes, nodes).int().tolist() == tree.tolist()
    if mode == 0:  # the prefix keeps the caller's fill
        rows = out["tree_mask"].split([nodes * (s + nodes) for s in given["seq_lens"]])
        for row, s, mine in zip(rows, given["seq_lens"], tree, strict=True):
            row = row.view(nodes, s + nodes)
            assert row[:, :s].all() and row[:, s:].int().tolist() == mine.tolist()


# --- Against the peer's semantics -------------------------------------------------------------------
@st.composite
def forests(draw, most=12):
    nodes, batch = draw(st.integers(1, most)), draw(st.integers(1, 4))
    trees = [[-1, *(draw(st.integers(0, c - 1)) for c in range(1, nodes))] for _ in range(batch)]
    orders = [draw(st.permutations(range(nodes))) for _ in range(batch)]
    return trees, orders, draw(st.integers(1, nodes + 2)), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=25, deadline=None)
@given(forests())
def test_greedy_of_any_tree(forest):
    trees, orders, depth, seed = forest
    g = torch.Generator().manual_seed(seed)
    shape = (len(trees), len(trees[0]))
    arguments = {
        **outputs(*shape, depth),
        **links_of(trees, orders),
        "candidates": torch.randint(0, 3, shape, generator=g),  # siblings often share their id
        "target_predict": torch.randint(0, 3, shape, generator=g),
    }
    run_both(ON_CPU, "verify_tree_greedy", arguments)


@pytest.mark.parametrize("nodes", [2, 3, 8, 33, 130])
@pytest.mark.parametrize("shape", ["star", "chain"])
def test_wide_and_deep_trees(nodes, shape):
    """The last of many children is reached, and so is the end of a long path."""
    trees = [[-1, *([0] * (nodes - 1) if shape == "star" else range(nodes - 1))]]
    arguments = {
        **outputs(1, nodes, nodes),
        **links_of(trees),
        "candidates": torch.full((1, nodes), 4),
        "target_predict": torch.full((1, nodes), 5),
    }
    arguments["candidates"][0, -1 if shape == "star" else slice(None)] = 5
    out = run_both(ON_CPU, "verify_tree_greedy", arguments)
    assert out["accept_token_num"].tolist() == [1 if shape == "star" else nodes - 1]


class OnCpu:
    def __getattr__(self, name):
        return getattr(sgl_kernel, name)


ON_CPU = OnCpu()


def sampling_case(trees, orders, depth, seed, vocab=5, thresholds=(1.0, 1.0)):
    """Probabilities are multiples of 1/64 and coins lie between them, so that every sum is exact."""
    g = torch.Generator().manual_seed(seed)
    shape = (len(trees), len(trees[0]))
    cuts = torch.randint(0, 65, (*shape, vocab - 1), generator=g).sort(-1).values
    cuts = torch.nn.functional.pad(cuts, (1, 1))
    cuts[..., -1] = 64
    return {
        **outputs(*shape, depth),
        **links_of(trees, orders),
        "candidates": torch.randint(-1, vocab + 1, shape, generator=g),
        "uniform_samples": (torch.randint(0, 64, shape, generator=g) + 0.5) / 64,
        "uniform_samples_for_final_sampling": torch.rand(shape[0], generator=g),
        "target_probs": cuts.diff(dim=-1) / 64,
        "draft_probs": torch.zeros(*shape, vocab),
        "threshold_single": thresholds[0],
        "threshold_acc": thresholds[1],
    }


@settings(max_examples=40, deadline=None)
@given(
    forests(),
    st.sampled_from([(1.0, 1.0), (0.5, 1.0), (1.0, 0.75), (0.25, 0.5), (0.0, 0.0)]),
    st.booleans(),
)
def test_sampling_of_any_tree(forest, thresholds, filled):
    case = sampling_case(*forest, thresholds=thresholds)
    if filled:  # what is there already is subtracted, but for the last row of a longest path
        g = torch.Generator().manual_seed(forest[-1])
        shape = case["draft_probs"].shape
        case["draft_probs"] = torch.randint(0, 16, shape, generator=g) / 64
    run_both(ON_CPU, "tree_speculative_sampling_target_only", case)


def test_sampling_on_every_backend(compat):
    trees = [[-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 2, 0, 4, 4]] * 4
    run_both(compat, "tree_speculative_sampling_target_only", sampling_case(trees, None, 4, 3))


def test_sampling_edges(compat):
    """Coins 0 and just below 1; ids of probability 0 never come out; a residual of no mass is p again."""
    trees, p = [[-1, 0]] * 5, torch.tensor([0.0, 0.25, 0.75])
    case = {
        **outputs(5, 2, 2),
        **links_of(trees),
        "candidates": torch.tensor([[9, 0], [9, 0], [9, 0], [9, 1], [9, 2]]),
        "uniform_samples": torch.tensor([[0.0, 0.5]] * 3 + [[0.25, 0.5], [0.9999999, 0.5]]),
        "uniform_samples_for_final_sampling": torch.tensor([0.0, 0.25, 0.99999994, 0.0, 1.0]),
        "target_probs": p.expand(5, 2, 3).contiguous(),
        "draft_probs": torch.zeros(5, 2, 3),
    }
    case["target_probs"][4, 0] = torch.tensor(
        [0.0, 0.0, 0.5]
    )  # rounding lost what is above the coin
    out = run_both(compat, "tree_speculative_sampling_target_only", case)
    assert out["predicts"].view(5, 2)[:, 0].tolist() == [1, 2, 2, 2, 2]
    assert out["accept_token_num"].tolist() == [0] * 5


def test_nan_and_empty_rows_stay_in_their_request(compat):
    case = sampling_case([[-1, 0, 0]] * 3, None, 3, 5)
    alone = run_both(compat, "tree_speculative_sampling_target_only", case)
    case["target_probs"][0] = float("nan")
    case["target_probs"][1] = 0
    compat.tree_speculative_sampling_target_only(**case)
    assert case["predicts"].view(3, 3)[:2, 0].tolist() == [4, 4]
    for key in ("predicts", "accept_index", "accept_token_num"):
        mine, before = (t[key].reshape(3, -1)[2].tolist() for t in (case, alone))
        assert mine == before, key


def test_exact_law_of_a_tree():
    """All coins, on grids that cut the unit interval where the law does: the first two tokens have the target's
    law as whole numbers."""
    # Probabilities in eighths of rows 0 .. 4; the candidates of the root are 1 and 3, of node 1: 0 and 2.
    p = torch.tensor([[1, 2, 2, 3], [3, 0, 4, 1], [2, 2, 2, 2], [8, 0, 0, 0], [1, 1, 1, 5]])
    trees, ids, ends = [-1, 0, 0, 1, 1], torch.tensor([9, 1, 3, 0, 2]), 840  # lcm of 1 .. 8
    coins = torch.cartesian_prod(torch.arange(8), torch.arange(8), torch.arange(ends))
    batch = len(coins)
    uniforms = torch.full((batch, 5), 0.5)
    uniforms[:, 0] = (coins[:, 0] + 0.5) / 8
    uniforms[:, 1] = (coins[:, 1] + 0.5) / 8
    case = {
        **outputs(batch, 5, 3),
        **{k: v.repeat(batch, 1) for k, v in links_of([trees]).items()},
        "candidates": ids.repeat(batch, 1),
        "uniform_samples": uniforms,
        "uniform_samples_for_final_sampling": (coins[:, 2] + 0.5) / ends,
        "target_probs": (p / 8).repeat(batch, 1, 1),
        "draft_probs": torch.zeros(batch, 5, 4),
    }
    case["retrive_index"] = torch.arange(batch * 5).view(batch, 5)
    sgl_kernel.tree_speculative_sampling_target_only(**case)
    predicts = case["predicts"].view(batch, 5)
    path = case["accept_index"] - 5 * torch.arange(batch)[:, None]
    law = torch.zeros(4, 4, dtype=torch.int64)  # of the first two tokens, in units of 1 / (8 batch)
    first = predicts[:, 0].long()
    one = case["accept_token_num"] == 0  # the second token is then drawn by plain sampling
    for token in range(4):
        behind = {1: p[1], 3: p[2]}.get(token, torch.tensor([2, 2, 2, 2]))
        law[token] += (one & (first == token)).sum() * behind
    more = ~one
    second = predicts[more, path[more, 1]].long()
    law.index_put_((first[more], second), torch.tensor(8), accumulate=True)
    behind = torch.stack([torch.full((4,), 2), p[1], torch.full((4,), 2), p[2]])
    assert law.tolist() == (batch // 8 * p[0][:, None] * behind).tolist()
    assert (case["accept_token_num"] == 2).any() and one.any()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5), st.sampled_from([0, 1, 2]))
def test_build_of_any_selection(seed, topk, depth, mode):
    """Trees as the peer's drafting makes them: every level's parents are the best of the level above."""
    g = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 4, (1,), generator=g))
    width = topk + topk * topk * (depth - 1)  # candidates
    nodes = min(int(torch.randint(1, width + 2, (1,), generator=g)), 32)
    parents, selected = [], []
    for _ in range(batch):
        table, parent_of, level = [-1, *range(topk)], dict.fromkeys(range(topk)), list(range(topk))
        for d in range(1, depth):
            level = list(range(topk + topk * topk * (d - 1), topk + topk * topk * d))
            for i, c in enumerate(level):
                parent_of[c] = table[topk * (d - 1) + 1 + i // topk]
            best = torch.randperm(len(level), generator=g)[:topk].sort().values
            table += [level[i] for i in best.tolist()]
        chosen = []
        while len(chosen) < nodes - 1:  # ancestors first
            free = [
                c for c, p in parent_of.items() if c not in chosen and (p is None or p in chosen)
            ]
            chosen.append(free[int(torch.randint(len(free), (1,), generator=g))])
        parents.append(table[: topk * (depth - 1) + 1])
        selected.append(sorted(chosen))
    seq_lens = torch.randint(0, 9, (batch,), generator=g)
    arguments = {
        "parent_list": torch.tensor(parents),
        "selected_index": torch.tensor(selected, dtype=torch.int64).view(batch, nodes - 1),
        "verified_seq_len": seq_lens,
        "topk": topk, "depth": depth, "draft_token_num": nodes, "tree_mask_mode": mode,
        **built(batch, nodes, mode, seq_lens.tolist(), 4 if nodes > 16 else 2 if nodes > 8 else 1),
    }  # fmt: skip
    run_both(ON_CPU, "build_tree_kernel_efficient", arguments)


def test_a_candidate_without_its_parent_is_left_out(compat):
    """The peer reads on past the selection; here the node is not linked and sees the root and itself."""
    arguments = {
        "parent_list": torch.tensor([[-1, 0, 1]]),
        "selected_index": torch.tensor([[0, 5]]),  # 5 continues candidate 1, which is not selected
        "verified_seq_len": torch.tensor([7]),
        "topk": 2, "depth": 2, "draft_token_num": 3, "tree_mask_mode": 1,
        **built(1, 3, 1),
    }  # fmt: skip
    compat.build_tree_kernel_efficient(**arguments)
    assert arguments["retrive_next_token"].tolist() == [[1, -1, -1]]
    assert arguments["retrive_next_sibling"].tolist() == [[-1, -1, -1]]
    assert arguments["positions"].tolist() == [7, 8, 7]
    assert arguments["tree_mask"].view(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


@settings(max_examples=25, deadline=None)
@given(forests(), st.booleans(), st.booleans())
def test_reconstruct_of_any_mask(forest, own, arbitrary):
    trees, _, _, seed = forest
    g = torch.Generator().manual_seed(seed)
    batch, nodes = len(trees), len(trees[0])
    mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    for b, parents in enumerate(trees):
        for i in range(nodes):
            mask[b, i, i] = own
            up = parents[i]
            while up >= 0:
                mask[b, i, up] = True
                up = parents[up]
    if arbitrary:
        mask = torch.rand(mask.shape, generator=g) < 0.5
    arguments = {
        "tree_mask": mask.flatten(),
        "verified_seq_len": torch.randint(0, 99, (batch,), generator=g),
        "batch_size": batch,
        "draft_token_num": nodes,
        **built(batch, nodes, 1),
    } | {"tree_mask": mask.flatten()}
    out = run_both(ON_CPU, "reconstruct_indices_from_tree_mask", arguments)
    if not arbitrary:
        for key, wanted in links_of(trees).items():
            assert_same(out[key], wanted, key)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(0, 2**32 - 1),
    st.integers(0, 3),
)
def test_packbits_of_any_segments(lengths, seed, gap):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(sum(lengths), generator=g) < 0.5
    sizes = [(n + 7) // 8 + gap for n in lengths]
    arguments = {
        "x": x if seed % 2 else x.to(torch.uint8) * 3,
        "input_indptr": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "output_indptr": torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32),
        "y": torch.full((sum(sizes) + 2,), 0xA5, dtype=torch.uint8),
        "batch_size": len(lengths),
    }
    run_both(ON_CPU, "segment_packbits", arguments)


# --- Callers ----------------------------------------------------------------------------------------
CALLER = '''
import torch
from sgl_kernel import (
    build_tree_kernel_efficient, reconstruct_indices_from_tree_mask, segment_packbits,
    tree_speculative_sampling_target_only, verify_tree_greedy,
)

def step(parents, selected, seq_lens, tokens, probs, coins, final, topk, depth, nodes):
    """One EAGLE step: the tree, its packed mask, greedy and sampled verification."""
    bs = len(seq_lens)
    links = [torch.full((bs, nodes), -1, dtype=torch.long) for _ in range(3)]
    mask = torch.full((bs * nodes * nodes,), True)
    positions = torch.empty((bs * nodes,), dtype=torch.long)
    build_tree_kernel_efficient(
        parents, selected, seq_lens, mask, positions, *links, topk, depth, nodes, 1
    )
    again = [torch.empty_like(t) for t in (positions, *links)]
    reconstruct_indices_from_tree_mask(mask, seq_lens, *again, bs, nodes)
    indptr = torch.arange(bs + 1, dtype=torch.int32) * nodes * nodes
    packed_indptr = torch.arange(bs + 1, dtype=torch.int32) * ((nodes * nodes + 7) // 8)
    packed = torch.zeros(int(packed_indptr[-1]), dtype=torch.uint8)
    segment_packbits(mask, indptr, packed_indptr, packed, bs)
    results = [positions, *links, mask, *again, packed]
    for sampled in (False, True):
        predict = torch.zeros((bs * nodes,), dtype=torch.int32)
        accept_index = torch.full((bs, depth + 1), -1, dtype=torch.int32)
        accept_length = torch.empty((bs,), dtype=torch.int32)
        if sampled:
            tree_speculative_sampling_target_only(
                predicts=predict, accept_index=accept_index, accept_token_num=accept_length,
                candidates=tokens, retrive_index=links[0], retrive_next_token=links[1],
                retrive_next_sibling=links[2], uniform_samples=coins,
                uniform_samples_for_final_sampling=final, target_probs=probs,
                draft_probs=torch.zeros_like(probs), threshold_single=1.0, threshold_acc=1.0,
                deterministic=True,
            )
        else:
            verify_tree_greedy(
                predicts=predict, accept_index=accept_index, accept_token_num=accept_length,
                candidates=tokens, retrive_index=links[0], retrive_next_token=links[1],
                retrive_next_sibling=links[2], target_predict=probs.argmax(-1),
            )
        results += [predict, accept_index, accept_length]
    return results
'''  # fmt: skip


def test_a_caller_with_the_import_changed(monkeypatch):
    published = json.loads((CASES / "eagle_tree_build_sglang.json").read_text())
    given, g = published["inputs"], torch.Generator().manual_seed(7)
    parents = torch.cat([torch.tensor(x) for x in given["parents_per_level"][:-1]], 1)
    selected = torch.tensor(published["expected"]["selected_index_derived"])
    probs = torch.rand(2, 8, 6, generator=g).softmax(-1)
    tokens = torch.randint(0, 6, (2, 8), generator=g)
    tokens[0, 1] = probs[0, 0].argmax()  # so that something is accepted
    args = (
        parents, selected, torch.tensor(given["seq_lens"]), tokens, probs,
        torch.rand(2, 8, generator=g), torch.rand(2, generator=g), 4, 4, 8,
    )  # fmt: skip
    wanted = with_peer(monkeypatch, "sgl_kernel", oracle, CALLER, "step", *args)
    got = with_import_changed(CALLER, "sgl_kernel", "specdec_ext.compat.sgl_kernel", "step", *args)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert_same(mine, theirs, f"result {i}")


# --- No waiting for the device, graphs, bad arguments -----------------------------------------------
def test_traces_without_a_value_on_the_host():
    """Fake tensors have no values: a function that looked at one would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = sampling_case([[-1, 0, 0, 1]] * 2, None, 3, 1)
    greedy = {k: case[k] for k in (*OUT.split(), *TREE.split())}
    greedy["target_predict"] = case["candidates"].clone()
    tree = {
        "parent_list": torch.tensor([[-1, 0, 1]] * 2),
        "selected_index": torch.tensor([[0, 1, 2]] * 2),
        "verified_seq_len": torch.tensor([3, 4]),
        "topk": 2, "depth": 2, "draft_token_num": 4, "tree_mask_mode": 0,
        **built(2, 4, 0, [3, 4]),
    }  # fmt: skip
    mask = {k: tree[k] for k in ("verified_seq_len", "positions", *LINKS)}
    mask |= {"tree_mask": built(2, 4, 1)["tree_mask"], "batch_size": 2, "draft_token_num": 4}
    offsets = torch.tensor([0, 8, 16], dtype=torch.int32)
    packed = dict(x=mask["tree_mask"], input_indptr=offsets, output_indptr=offsets // 8,
                  y=torch.zeros(2, dtype=torch.uint8), batch_size=2)  # fmt: skip
    for name, arguments in (
        ("tree_speculative_sampling_target_only", case),
        ("verify_tree_greedy", greedy),
        ("build_tree_kernel_efficient", tree),
        ("reconstruct_indices_from_tree_mask", mask),
        ("segment_packbits", packed),
    ):
        with FakeTensorMode() as mode:
            fake = {
                k: mode.from_tensor(v) if torch.is_tensor(v) else v for k, v in arguments.items()
            }
            getattr(sgl_kernel, name)(**fake)


def test_compiles_as_one_graph():
    case = sampling_case([[-1, 0, 0, 1]] * 2, None, 3, 1)
    wanted = run_both(ON_CPU, "tree_speculative_sampling_target_only", case)
    function = sgl_kernel.tree_speculative_sampling_target_only
    torch.compile(function, fullgraph=True, backend="aot_eager")(**case)
    for key in (*OUT.split(), "draft_probs"):
        assert_same(case[key], wanted[key], key)


def test_empty_batches():
    case = sampling_case([[-1, 0, 0]], None, 3, 1)
    empty = {k: v[:0] if torch.is_tensor(v) else v for k, v in case.items()}
    sgl_kernel.tree_speculative_sampling_target_only(**empty)
    greedy = {k: empty[k] for k in (*OUT.split(), *TREE.split())}
    sgl_kernel.verify_tree_greedy(**greedy, target_predict=empty["candidates"])


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("candidates", torch.zeros(2, 4), "dtype int32 or int64, got float32"),
        ("retrive_next_token", torch.zeros(2, 5, dtype=torch.int64), "size 4 (N of candidates), got 5"),
        ("predicts", torch.zeros(7, dtype=torch.int32), "at least 8 elements (B * N), got 7"),
        ("accept_index", torch.zeros(2, 0, dtype=torch.int32), "at least one column"),
        ("uniform_samples", torch.zeros(2, 4, dtype=torch.float64), "dtype float32, got float64"),
        ("target_probs", torch.zeros(2, 4), "shape [B, N, V]"),
        ("draft_probs", torch.zeros(2, 4, 6), "size 5 (V of target_probs), got 6"),
        ("threshold_acc", 1.5, "0 to 1, got 1.5"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(argument, value, words):
    case = sampling_case([[-1, 0, 0, 1]] * 2, None, 3, 1) | {argument: value}
    with pytest.raises(RuntimeError) as error:
        sgl_kernel.tree_speculative_sampling_target_only(**case)
    name = "specdec_ext.compat.sgl_kernel.tree_speculative_sampling_target_only"
    assert str(error.value).startswith(f"{name}: {argument}: wanted ") and words in str(error.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("topk", 0), ("draft_token_num", 5), ("tree_mask_mode", 3),
        ("parent_list", torch.zeros(2, 4, dtype=torch.int64)),
        ("tree_mask", torch.ones(31, dtype=torch.bool)),
        ("positions", torch.zeros(7, dtype=torch.int64)),
    ],
)  # fmt: skip
def test_bad_trees_are_named(argument, value):
    tree = {
        "parent_list": torch.tensor([[-1, 0, 1]] * 2),
        "selected_index": torch.tensor([[0, 1, 2]] * 2),
        "verified_seq_len": torch.tensor([3, 4]),
        "topk": 2, "depth": 2, "draft_token_num": 4, "tree_mask_mode": 1,
        **built(2, 4, 1),
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="specdec_ext.compat.sgl_kernel.build_tree") as error:
        sgl_kernel.build_tree_kernel_efficient(**tree | {argument: value})
    assert f": {argument}: " in str(error.value) or "selected_index" in str(error.value)
