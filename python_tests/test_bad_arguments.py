"""Bad arguments of sample, verify_chain, verify_tree, tree_links and tree_from_mask: always an error that names
op, argument, wanted and got; hypothesis chooses several that are wrong at once. Other devices: test_fakes.py."""

import re

import chains
import control_cases
import pytest
import torch
import trees
from hypothesis import given
from hypothesis import strategies as st
from test_fuzzed_inputs import fuzz
from test_strides import call

EXAMPLES = {"cpu": 1000, "emu": 100, "emu_hooks": 30, "emu_asan": 60, "cuda": 300}
FLOATS = {torch.float32, torch.float16, torch.bfloat16}
INTS = {torch.int32, torch.int64}
DTYPES = [*FLOATS, *INTS, torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64]
ALLOWED = {
    **dict.fromkeys(["logits", "target_logits", "draft_logits"], FLOATS),
    **dict.fromkeys(["input_ids", "positions", "bias_ids"], INTS),
}
# Lists that may have any stride; of matrices the last dimension is dense.
ANY_STRIDE = {"input_ids", "positions", "bias_ids", "seeds", "parents"}
# Its first size is its own choice: draft_logits beside draft_rows, a bitmask beside bitmask_rows, a map.
ANY_SIZE = {"d2t", "draft_logits", "token_bitmask"}
WORDS = {
    "filter_order": ["", "Joint", "both"],
    "logprobs_mode": ["", "log", "RAW"],
    "method": ["", "tokens", "greedy", "Block"],
    "children": ["", "topk", "sampled_without_replacement"],
}
NUMBERS = {
    "vocab_size": [0, -1, 2**31, 2**62, -(2**63)],
    "num_logprobs": [-2, 1025, 2**31, 2**63 - 1],
    "max_drafts": [-1, 2**31, 2**63 - 1],
    "max_depth": [-1, 2**31, 2**63 - 1],
    "max_nodes": [-1, 2**31, 2**63 - 1],
}
# What must not be without the other: argument taken away -> argument that the error names.
PAIRS = {
    "token_counts": "token_counts",
    "bias_offsets": "bias_offsets",
    "bias_ids": "bias_offsets",
    "bias_values": "bias_offsets",
    "token_bitmask": "bitmask_rows",
    "draft_logits": "d2t",
}


def good_case(op):
    """Every argument given, nothing wrong."""
    if op in ("tree_links", "tree_from_mask"):
        parents = torch.tensor([-1, 0, 0, -1, 0], dtype=torch.int32)
        cu_rows = torch.tensor([0, 3, 5], dtype=torch.int32)
        if op == "tree_links":
            return {"parents": parents, "cu_rows": cu_rows, "max_nodes": 3}
        return {
            "tree_mask": torch.tensor([[1, 0], [3, 0], [5, 0], [1, 0], [3, 0]]).int(),
            "cu_rows": cu_rows,
        }
    batch, vocab = 3, 40
    if op == "sample":
        g = torch.Generator().manual_seed(1)
        case, rows = {"logits": torch.randn(batch, vocab, generator=g)}, batch
        case |= {
            "seeds": torch.arange(batch),
            "positions": torch.arange(batch),
            "vocab_size": vocab,
        }
    elif op == "verify_chain":
        case = control_cases.with_d2t(chains.random_case(batch, vocab, 2, seed=3), 20)
        case["method"] = "token"
    else:
        case = trees.random_case(
            batch, vocab, 5, seed=5, children="sampled", reduced=True, with_controls=False
        )
    rows = batch if op == "sample" else case["target_logits"].shape[0]
    controls = control_cases.random_controls(batch, rows, vocab, seed=3)
    assert controls["bias_ids"].numel() > 0
    return case | controls | {"filter_order": "joint", "logprobs_mode": "raw", "num_logprobs": 2}


def spread(t):
    """The same values with every other element of the last dimension left out."""
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    view = wide[..., ::2]
    view.copy_(t)
    return view


def damages(op, case):
    """name -> (argument, bad value, arguments that the error may name; None: any)."""
    out = {}
    for name, value in case.items():
        own = {name}
        if torch.is_tensor(value):
            for dtype in DTYPES:
                if dtype not in ALLOWED.get(name, {value.dtype}):
                    out[f"{name} as {dtype}"] = name, value.to(dtype), own
            out[f"{name} with a dimension more"] = name, value[None], own
            out[f"{name} with a dimension less"] = name, value[0], own
            if name not in ANY_STRIDE:
                out[f"{name} with gaps"] = name, spread(value), own
            if name not in ANY_SIZE:
                out[f"{name} too short"] = name, value[:-1], None
                out[f"{name} too long"] = name, torch.cat([value, value[-1:]]), None
            if name in ("logits", "target_logits", "draft_logits", "token_counts"):
                out[f"{name} too narrow"] = name, value[..., : value.shape[-1] // 3], own
        if name in PAIRS:
            out[f"{name} missing"] = name, None, {PAIRS[name]}
        for bad in [*WORDS.get(name, []), *NUMBERS.get(name, [])]:
            out[f"{name} = {bad!r}"] = name, bad, own
        if name == "vocab_size":
            out["vocab_size wider than the rows"] = name, 41, None
    if op == "tree_from_mask" or op == "tree_links":  # sizes that other arguments do not fix
        out = {k: v for k, v in out.items() if not k.endswith(("too short", "too long"))}
        out["cu_rows without an element"] = "cu_rows", case["cu_rows"][:0], {"cu_rows"}
    return out


OPS = ["sample", "verify_chain", "verify_tree", "tree_links", "tree_from_mask"]


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments_raise(backend, op):
    case = good_case(op)
    call(backend, op, case)
    bad = damages(op, case)
    arguments = set(case)

    def assert_raises(what):
        name, value, named = bad[what]
        with pytest.raises(RuntimeError) as error:
            call(backend, op, case | {name: value})
        text = str(error.value)
        found = re.search(r"specdec::(\w+): (\w+): wanted .*got ", text)
        assert found, f"{what}: {text}"
        assert found[1] == op and found[2] in (named or arguments), f"{what}: {text}"

    for what in bad:  # each one alone
        assert_raises(what)

    @fuzz(EXAMPLES[backend.name])
    @given(st.lists(st.sampled_from(sorted(bad)), min_size=2, max_size=4))
    def several(whats):
        """Several at once: one of them is named, or what it made of another argument."""
        changed = {bad[what][0]: bad[what][1] for what in whats}
        with pytest.raises(RuntimeError, match=rf"specdec::{op}: \w+: wanted .*got "):
            call(backend, op, case | changed)

    several()
