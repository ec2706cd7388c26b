"""Fake kernels and autograd: a tensor without data never gives a result that looks like one."""

import chains
import pytest
import torch
import trees
from compare import assert_same
from oracles import append_kv as append_oracle
from oracles import block_tree as block_oracle
from oracles import build_tree as build_oracle
from oracles import compact_kv as compact_oracle
from oracles import expand_tree as expand_oracle
from oracles import fuse_features as fuse_oracle
from oracles import inject_kv as inject_oracle
from oracles import markov_draft as markov_oracle
from oracles import next_round as round_oracle
from oracles import schedule_prefix as schedule_oracle
from oracles import verify_attention as attention_oracle
from test_sample import random_case as sample_case
from tree_cases import ragged

import specdec_ext

G = torch.Generator().manual_seed(1)
LINKS = dict(zip(("parents", "cu_rows"), ragged([[-1, 0, 0], [-1]]), strict=True))
CASES = {
    "append_kv": dict(
        zip(("k", "v", "k_cache", "v_cache", "slots"), append_oracle.random_case(G), strict=True)
    ),
    "compact_kv": dict(
        zip(
            ("slots", "cu_rows", "path", "num_accepted"), compact_oracle.random_case(G), strict=True
        ),
        k_caches=[torch.zeros(10, 4, 2, 8)],
        v_caches=[],
    ),
    "fuse_features": dict(
        zip(("hiddens", "fc_weight", "norm_weight"), fuse_oracle.random_case(G), strict=True),
        eps=1e-6,
    ),
    "inject_kv": inject_oracle.random_case(G, head_dim=8, cache_dtype=torch.float8_e4m3fn)
    | {
        "cu_rows": torch.tensor([0, 7], dtype=torch.int32),
        "commit_rows": torch.tensor([7], dtype=torch.int32),
        "k_scale": torch.ones(3),
        "v_scale": torch.ones(3, 3),
    },
    "next_round": round_oracle.random_case(G),
    "verify_attention": dict(
        zip(
            ("q", "k_cache", "v_cache", "block_table", "cu_rows", "seq_lens"),
            attention_oracle.random_case(G, [2, 1], [30, 9]),
            strict=True,
        ),
        max_rows=2,
    ),
    "row_linear": {
        "x": torch.randn(3, 20, generator=G),
        "weight": torch.randn(5, 20, generator=G),
        "bias": torch.randn(5, generator=G),
    },
    "sample": dict(
        zip(("logits", "seeds", "positions"), sample_case(3, 50), strict=True),
        vocab_size=50,
        temperature=torch.ones(3),
        token_bitmask=torch.full((3, 2), -1, dtype=torch.int32),
    ),
    "markov_draft": markov_oracle.random_case(G, columns=20, head="gated"),
    "schedule_prefix": schedule_oracle.random_case(G, budget=True)
    | {"active": torch.ones(5, dtype=torch.bool)},
    "expand_tree": expand_oracle.random_case(G) | {"d2t": torch.zeros(50, dtype=torch.int64)},
    "build_tree": build_oracle.random_case(G),
    "block_tree": block_oracle.random_case(G)
    | {"d2t": torch.zeros(30, dtype=torch.int64), "temperature": torch.ones(2)},
    "verify_chain": chains.random_case(5, 40, 3, seed=1),
    "verify_tree": trees.random_case(4, 40, 6, seed=2, children="sampled", method="token"),
    "tree_links": LINKS | {"max_nodes": 3},
    "tree_from_mask": {
        "tree_mask": torch.ops.specdec.tree_links(*LINKS.values(), 3)[0],
        "cu_rows": LINKS["cu_rows"],
    },
}
TENSORS = [
    (op, name) for op, case in CASES.items() for name, v in case.items() if torch.is_tensor(v)
]


def call(op, case):
    case = dict(case)
    entry = getattr(torch.ops.specdec, op)
    positional = [case.pop(a.name) for a in entry.default._schema.arguments if not a.kwarg_only]
    return entry(*positional, **case)


def moved(value, device):
    if isinstance(value, list):
        return [t.to(device) for t in value]
    return value.to(device) if torch.is_tensor(value) else value


def results(returned):
    """Of an op that returns nothing, one tensor or several."""
    return [returned] if torch.is_tensor(returned) else list(returned or ())


def test_every_op_has_a_case():
    assert set(CASES) == set(specdec_ext.op_names())


@pytest.mark.parametrize("op, name", TENSORS)
def test_one_meta_tensor_among_others_raises(op, name):
    case = CASES[op]
    with pytest.raises(RuntimeError, match=f"specdec::{op}: .*wanted the device of .*, got"):
        call(op, case | {name: case[name].to("meta")})


def required(op):
    """Names of the tensors that an op cannot do without."""
    schema = getattr(torch.ops.specdec, op).default._schema
    return [a.name for a in schema.arguments if str(a.type) == "Tensor"]


@pytest.mark.parametrize("op, name", [(op, name) for op in CASES for name in required(op)])
def test_none_in_place_of_a_tensor(op, name):
    with pytest.raises(RuntimeError, match=f"specdec::{op}: {name}: wanted a tensor, got None"):
        call(op, CASES[op] | {name: None})


@pytest.mark.parametrize("op", CASES)
def test_on_meta_alone_shapes_and_dtypes_are_the_real_ones(op):
    case = CASES[op]
    real = call(op, {k: v.clone() if torch.is_tensor(v) else v for k, v in case.items()})
    meta = call(op, {k: moved(v, "meta") for k, v in case.items()})
    for mine, theirs in zip(results(meta), results(real), strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (
            theirs.shape,
            theirs.dtype,
            theirs.stride(),
        )


@pytest.mark.parametrize("op, name", TENSORS)
def test_on_meta_bad_arguments_raise_as_on_data(op, name):
    """A wrong dtype or number of dimensions: the same words from the fake and from the real kernel."""
    for change in (lambda t: t.to(torch.float64), lambda t: t[None]):
        case = CASES[op] | {name: change(CASES[op][name])}
        meta = {k: moved(v, "meta") for k, v in case.items()}
        words = []
        for arguments in (case, meta):
            with pytest.raises(RuntimeError, match=f"specdec::{op}: ") as error:
                call(op, arguments)
            words.append(str(error.value).splitlines()[0].split("got")[0].split(": ")[1:3])
        if change(torch.zeros(1)).dim() == 1:  # another dtype may be blamed on a later argument
            assert words[0][1].split()[:2] == words[1][1].split()[:2] == ["wanted", "dtype"]
        else:
            assert words[0][0] == words[1][0]


@pytest.mark.parametrize(
    "op, name, shorter",
    [
        ("append_kv", "slots", 0),
        ("append_kv", "v_cache", 1),
        ("verify_attention", "cu_rows", 0),
        ("verify_attention", "v_cache", 2),
        ("row_linear", "weight", 1),
        ("row_linear", "bias", 0),
        ("schedule_prefix", "active", 0),
        ("expand_tree", "parent_scores", 1),
        ("build_tree", "candidate_parents", 1),
        ("build_tree", "positions", 0),
        ("block_tree", "anchor_ids", 0),
        ("block_tree", "temperature", 0),
        ("markov_draft", "anchor_ids", 0),
        ("markov_draft", "w2", 1),
        ("markov_draft", "hidden", 1),
        ("sample", "positions", 0),
        ("sample", "temperature", 0),
        ("verify_chain", "seeds", 0),
        ("verify_chain", "input_ids", 0),
        ("verify_chain", "draft_logits", 1),
        ("verify_tree", "parents", 0),
        ("compact_kv", "path", 0),
        ("compact_kv", "num_accepted", 0),
        ("fuse_features", "norm_weight", 0),
        ("inject_kv", "kv", 2),
        ("inject_kv", "k_norm_weight", 0),
        ("inject_kv", "sin", 1),
        ("inject_kv", "slots", 0),
        ("inject_kv", "commit_rows", 0),
        ("next_round", "seq_lens", 0),
        ("next_round", "block_table", 0),
        ("next_round", "max_len", 0),
    ],
)
def test_on_meta_sizes_that_do_not_match_raise(op, name, shorter):
    case = {k: moved(v, "meta") for k, v in CASES[op].items()}
    case[name] = case[name].narrow(shorter, 0, case[name].shape[shorter] - 1)
    with pytest.raises(RuntimeError, match=f"specdec::{op}: .*wanted size"):
        call(op, case)


def test_lists_are_checked_one_by_one():
    """A cache on another device, or with too few dimensions, is named by its place in the list."""
    case = CASES["compact_kv"]
    cache = case["k_caches"][0]
    meta = {k: moved(v, "meta") for k, v in case.items()}
    for name in ("k_caches", "v_caches"):
        with pytest.raises(
            RuntimeError, match=rf"{name}\[1\]: wanted the device of slots, got meta"
        ):
            call("compact_kv", case | {name: [cache, cache.to("meta")]})
        for arguments, caches in ((case, [cache, cache[0]]), (meta, [cache, cache[0]])):
            caches = [c.to(arguments["slots"].device) for c in caches]
            with pytest.raises(RuntimeError, match=rf"{name}\[1\]: wanted shape \[num_pages, page"):
                call("compact_kv", arguments | {name: caches})


def test_a_list_that_comes_first():
    """Its first tensor sets device and dtype; an empty one has none."""
    case = CASES["fuse_features"]
    meta = {k: moved(v, "meta") for k, v in case.items()}
    first, *others = case["hiddens"]
    with pytest.raises(RuntimeError, match=r"hiddens\[1\]: wanted the device of hiddens\[0\]"):
        call("fuse_features", case | {"hiddens": [first, others[0].to("meta"), others[1]]})
    for arguments in (case, meta):
        with pytest.raises(RuntimeError, match="fuse_features: hiddens: wanted"):
            call("fuse_features", arguments | {"hiddens": []})
        with pytest.raises(RuntimeError, match="fc_weight: wanted dtype float32, got float16"):
            call("fuse_features", arguments | {"fc_weight": arguments["fc_weight"].half()})


@pytest.mark.parametrize("op", CASES)
def test_results_never_require_grad(op):
    case = {k: v.clone() if torch.is_tensor(v) else v for k, v in CASES[op].items()}
    for value in case.values():
        if torch.is_tensor(value) and value.is_floating_point():
            value.requires_grad_()
    wanted = call(op, {k: v.detach() if torch.is_tensor(v) else v for k, v in case.items()})
    got = call(op, case)
    for mine, theirs in zip(results(got), results(wanted), strict=True):
        assert not mine.requires_grad
        assert_same(mine, theirs)


def test_absurd_capacities_are_refused():
    for absurd in (2**31, 2**40, 2**62, 2**63 - 1, -1):
        for op, name in [
            ("verify_chain", "max_drafts"),
            ("verify_tree", "max_depth"),
            ("tree_links", "max_nodes"),
            ("build_tree", "num_nodes"),
            ("block_tree", "num_nodes"),
            ("block_tree", "topk"),
            ("expand_tree", "topk"),
            ("next_round", "page_size"),
            ("next_round", "block_len"),
        ]:
            with pytest.raises(RuntimeError, match=f"{op}: {name}: wanted .*, got {absurd}"):
                call(op, CASES[op] | {name: absurd})
