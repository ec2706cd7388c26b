"""verify_attention over masks x groups x head dims x page sizes x types: a fixed core of 300 combinations in
which every two values meet, and a sample of all 14112.

In every case all that no row sees is NaN or garbage: unused pages and slots, unused entries of the block
table, rows of no request and their tree bits and positions.
"""

import itertools
import random

import backends
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import verify_attention as oracle
from test_verify_attention import check, make

FP8 = torch.float8_e4m3fn
MASKS = ["causal", "full", "tree", "causal, window", "full, window", "tree, window", "everything"]
GROUPS = [1, 2, 4, 5, 6, 7, 8, 16]
HEAD_DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
PAGE_SIZES = [1, 3, 16, 64, 100, 256]
TYPES = [  # of q, of the caches
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, FP8),
    (torch.float16, FP8),
    (torch.bfloat16, FP8),
]
FACTORS = [MASKS, GROUPS, HEAD_DIMS, PAGE_SIZES, TYPES]


def pairs(combination):
    return {
        (a, combination[a], b, combination[b])
        for a, b in itertools.combinations(range(len(combination)), 2)
    }


def choose_core(count):
    """Of some random combinations always the one with the most pairs that are new; as indices."""
    draw, met, core = random.Random(0), set(), []
    while len(core) < count:
        some = [tuple(draw.randrange(len(f)) for f in FACTORS) for _ in range(20)]
        best = max(some, key=lambda c: (c not in core, len(pairs(c) - met)))
        met |= pairs(best)
        core.append(best)
    return core


CORE = choose_core(300)


def run_combination(backend, mask, group, dims, page_size, types, seed):
    dtype, cache_dtype = types
    kv_heads = 2 if group <= 2 else 1
    rows, lens = [3, 0, 1], [23 + seed % 50, 5, 9]
    if mask == "full":
        rows = [2, 1, 2]
    q, k_cache, v_cache, *lists = make(
        rows,
        lens,
        seed=seed,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=dims[0],
        v_dim=dims[1],
        page_size=page_size,
        dtype=dtype,
        spare_rows=1,
        spare_pages=1,
    )
    options = {"mask": "tree" if mask == "everything" else mask.split(",")[0]}
    if options["mask"] == "tree" or "window" in mask:
        g = torch.Generator().manual_seed(seed)
        words, positions = oracle.random_trees(g, rows, lens)
        options["positions"] = torch.cat([positions, torch.tensor([-(2**63)])])
        if options["mask"] == "tree":
            options["tree_mask"] = torch.cat([words, torch.full_like(words[:1], -1)])
    if "window" in mask or mask == "everything":
        options["window"] = 1 + seed % 30
    if mask == "everything":
        options["softcap"] = 0.5 + seed % 3
        options["sinks"] = torch.linspace(-2, 2, group * kv_heads)
    if cache_dtype == FP8:
        options["k_scale"] = torch.tensor([0.6, 1.7])[:kv_heads]
        options["v_scale"] = torch.tensor([3.0, 0.2])[:kv_heads]
        k_cache, v_cache = (
            oracle.unscaled(cache, 1 / options[scale]).to(FP8)
            for cache, scale in ((k_cache, "k_scale"), (v_cache, "v_scale"))
        )
    check(backend, (q, k_cache, v_cache, *lists), **options)


def values_of(indices):
    return [factor[i] for factor, i in zip(FACTORS, indices, strict=True)]


def test_core_has_every_pair_once_at_least():
    assert len(set(CORE)) == 300
    met = set().union(*(pairs(c) for c in CORE))
    sizes = [len(f) for f in FACTORS]
    assert len(met) == sum(a * b for a, b in itertools.combinations(sizes, 2))


@pytest.mark.parametrize("number", range(0, 300, 10))
def test_core(backend, number):
    """Ten combinations of the core."""
    for i in range(number, number + 10):
        combination = values_of(CORE[i])
        try:
            run_combination(backend, *combination, seed=i)
        except AssertionError as error:
            raise AssertionError(f"combination {i}, {combination}: {error}") from error


@settings(max_examples=25, deadline=None, derandomize=True)
@given(combination=st.tuples(*map(st.sampled_from, FACTORS)), seed=st.integers(0, 10**6))
def test_sample(backend_name, combination, seed):
    run_combination(backends.get(backend_name), *combination, seed=seed)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
