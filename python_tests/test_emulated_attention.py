"""verify_attention's CUDA kernels: what only they have (tiles, splits, a second launch) changes no bit,
and they ask memory for no more than they need."""

import backends
import pytest
import torch
from compare import assert_close, assert_same
from oracles import verify_attention as oracle

EMULATED = [name for name in backends.available() if name in ("emu", "emu_hooks")]
HOOKS = [name for name in EMULATED if name == "emu_hooks"]


@pytest.fixture(params=EMULATED)
def emulated(request):
    backend = backends.get(request.param)
    yield backend
    backend.set("multiprocessors", 132)


@pytest.fixture(params=HOOKS)
def hooks(request):
    backend = backends.get(request.param)
    yield backend
    backend.set("multiprocessors", 132)


def case(rows, seq_lens, seed=0, dtype=torch.bfloat16, **shape):
    return oracle.random_case(
        torch.Generator().manual_seed(seed), rows, seq_lens, dtype=dtype, **shape
    )


def check(backend, arguments, max_rows):
    out, lse = backend.ops.verify_attention(*arguments, max_rows=max_rows)
    wanted = oracle.verify_attention(*arguments, max_rows=max_rows)
    peer = oracle.torch_peer(*arguments, max_rows=max_rows)
    assert_close(out, wanted[0], peer[0], what="out")
    assert_close(lse, wanted[1], peer[1], what="lse")


def assert_same_results(got, wanted):
    assert_same(got[0], wanted[0], "out")
    assert_same(got[1], wanted[1], "lse")


TILES = pytest.mark.parametrize(
    "heads, rows",
    [(2, [3, 1]), (6, [5, 2]), (8, [7, 0, 3])],
    ids=["16-row tile", "32-row tile", "64-row tile"],
)


@TILES
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_matches_oracle(emulated, heads, rows, multiprocessors):
    """Several segments, absent pages, rows of no request and rows that see nothing."""
    emulated.set("multiprocessors", multiprocessors)
    rows = [*rows, 3]
    seq_lens = [*[1100, 600, 30][: len(rows) - 1], 1]
    arguments = case(rows, seq_lens, heads=heads, kv_heads=1, spare_rows=2)
    num_pages, table = arguments[1].shape[0], arguments[3]
    table[0, 3], table[0, 40] = -1, num_pages
    check(emulated, arguments, max(rows))


def test_float32_matches_oracle(emulated):
    arguments = case([2, 3], [550, 1], dtype=torch.float32, heads=2, kv_heads=1, spare_rows=1)
    arguments[3][0, 3], arguments[3][0, 30] = -1, arguments[1].shape[0]
    check(emulated, arguments, 3)


@TILES
def test_size_of_the_gpu_changes_no_bit(emulated, heads, rows):
    """From whole sequences in one block to one segment per block, folded by the second launch."""
    arguments = case(rows, [1100, 600, 30][: len(rows)], heads=heads, kv_heads=1)
    results = []
    for multiprocessors in (1, 2, 132):
        emulated.set("multiprocessors", multiprocessors)
        results.append(emulated.ops.verify_attention(*arguments, max_rows=max(rows)))
    for other in results[1:]:
        assert_same_results(other, results[0])


def test_tile_size_changes_no_bit(emulated):
    """max_rows only picks the tile: 16, 32 or 64 packed rows."""
    arguments = case([2, 4], [90, 530], heads=4, kv_heads=2)
    wanted = emulated.ops.verify_attention(*arguments, max_rows=4)
    for max_rows in (16, 32, 200):
        assert_same_results(emulated.ops.verify_attention(*arguments, max_rows=max_rows), wanted)


def test_unaligned_rows_give_the_same_bits(emulated):
    """Rows that are not 16-byte aligned take the element path instead of cp.async."""
    q, k_cache, v_cache, *rest = case([3, 2], [70, 530], heads=4, kv_heads=2)
    wanted = emulated.ops.verify_attention(q, k_cache, v_cache, *rest, max_rows=3)
    odd = torch.full((*k_cache.shape[:3], 67), float("nan"), dtype=torch.bfloat16)[..., 1:65]
    odd.copy_(k_cache)
    assert_same_results(emulated.ops.verify_attention(q, odd, v_cache, *rest, max_rows=3), wanted)


def test_two_launches_only_where_a_sequence_can_be_cut(hooks):
    short = case([2], [300], heads=2, kv_heads=1)
    long = case([2], [700], heads=2, kv_heads=1)
    for arguments, launches in ((short, 1), (long, 2)):
        stats = hooks.stats(lambda a=arguments: hooks.ops.verify_attention(*a, max_rows=2))
        assert stats["launches"] == launches


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "heads, max_rows, head_dim, v_dim",
    [
        (2, 3, 64, 64),
        (2, 3, 80, 80),
        (4, 7, 96, 96),
        (2, 3, 128, 128),
        (8, 3, 128, 128),
        (8, 5, 128, 128),
        (4, 2, 192, 128),
        (4, 2, 256, 256),
        (8, 4, 256, 256),
    ],
)
def test_streams_each_key_and_value_once(hooks, heads, max_rows, head_dim, v_dim, cache_dtype):
    """K and V of every place once per KV head, whole sectors, no bank conflicts; in all no more than 3 %
    above them, q and out."""
    seq_lens, kv_heads = [450, 60], 1
    dims = {"head_dim": head_dim, "v_dim": v_dim, "cache_dtype": cache_dtype}
    arguments = case([max_rows, 2], seq_lens, heads=heads, kv_heads=kv_heads, **dims)
    stats = hooks.stats(lambda: hooks.ops.verify_attention(*arguments, max_rows=max_rows))
    tensors = stats["tensors"]
    for name, dim in (("k_cache", head_dim), ("v_cache", v_dim)):
        wanted = sum(seq_lens) * kv_heads * dim * cache_dtype.itemsize
        assert tensors[name]["read_bytes"] == wanted
    rows = arguments[0].shape[0]
    assert tensors["q"]["read_bytes"] == rows * heads * head_dim * 2
    assert tensors["out"]["written_bytes"] == rows * heads * v_dim * 2
    assert tensors["out"]["read_bytes"] == 0
    floor = sum(seq_lens) * kv_heads * (head_dim + v_dim) * cache_dtype.itemsize
    floor += rows * heads * (head_dim + v_dim) * 2
    # The lists are read by every warp, from its caches: memory gives them once.
    lists = ("block_table", "cu_rows", "seq_lens")
    streamed = [t for name, t in tensors.items() if name not in lists]
    total = sum(t["read_bytes"] + t["written_bytes"] for t in streamed)
    total += sum(t.numel() * 4 for t in arguments[3:])
    assert total <= 1.03 * floor
    for line in stats["lines"]:
        if line["space"] == "global" and line["bytes"] >= 1024:
            assert line["sectors"] == line["ideal_sectors"], line
        if line["space"] == "shared":
            assert line["wavefronts"] == line["ideal_wavefronts"], line


def test_B15_a_tree_mask_costs_nothing_per_place_of_the_prefix(hooks):
    """Only tiles with rows of the pass ask for bits, and those of a row are read by its own lanes."""
    words = torch.tensor([[1], [3], [5]], dtype=torch.int32)
    read = []
    for seq_len in (150, 150 + 512):
        arguments = case([3], [seq_len], heads=2, kv_heads=1)
        stats = hooks.stats(
            lambda a=arguments: hooks.ops.verify_attention(
                *a, max_rows=3, mask="tree", tree_mask=words
            )
        )
        read.append(stats["tensors"]["tree_mask"]["read_bytes"])
    assert read[0] == read[1] > 0


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_window_reads_nothing_before_it(hooks, mask):
    """Keys of the window's places only, once."""
    seq_len, rows, window = 900, 3, 100
    arguments = case([rows], [seq_len], heads=2, kv_heads=1)
    stats = hooks.stats(
        lambda: hooks.ops.verify_attention(*arguments, max_rows=rows, mask=mask, window=window)
    )
    for name in ("k_cache", "v_cache"):
        read = stats["tensors"][name]["read_bytes"]
        assert read == (rows + window - 1) * 64 * 2, name


def test_masks_over_splits(emulated):
    """Trees, windows, caps and sinks through the second launch: the bits of one block."""
    rows, seq_lens = [5, 3], [1100, 600]
    arguments = case(rows, seq_lens, heads=6, kv_heads=1)
    tree_mask, positions = oracle.random_trees(torch.Generator().manual_seed(2), rows, seq_lens)
    options = {
        "max_rows": 5,
        "mask": "tree",
        "tree_mask": tree_mask,
        "positions": positions,
        "softcap": 2.0,
        "sinks": torch.linspace(-3, 3, 6),
    }
    for window in (-1, 696):  # whose first place, 400, begins the tokens of a warp
        results = []
        for multiprocessors in (1, 2, 132):
            emulated.set("multiprocessors", multiprocessors)
            got = emulated.ops.verify_attention(*arguments, window=window, **options)
            results.append(got)
        for other in results[1:]:
            assert_same_results(other, results[0])
        wanted = oracle.verify_attention(*arguments, window=window, **options)
        peer = oracle.torch_peer(*arguments, window=window, **options)
        assert_close(results[0][0], wanted[0], peer[0], what="out")
        assert_close(results[0][1], wanted[1], peer[1], what="lse")
