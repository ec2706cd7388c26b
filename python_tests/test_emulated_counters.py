"""What the emulator counts: launches and bytes per op against the floor, sector efficiency.

The hooks build sees every access of the kernels' real source, so these are exact counts of what a GPU
would be asked for (docs/cuda_on_cpu.md), not estimates.
"""

import backends
import pytest
import torch

pytestmark = pytest.mark.skipif(
    "emu_hooks" not in backends.available(), reason="the hooks build is not among the backends"
)


def assert_full_sectors(stats):
    """Every line that streams data uses each 32-byte sector that it fetches."""
    for line in stats["lines"]:
        if line["space"] != "global" or line["bytes"] < 1024:
            continue
        assert line["sectors"] == line["ideal_sectors"], line


def test_append_kv_moves_each_byte_once():
    backend = backends.get("emu_hooks")
    rows, heads, head_dim = 12, 2, 128
    k, v = torch.randn(2, rows, heads, head_dim).bfloat16()
    k_cache, v_cache = torch.zeros(2, 4, 16, heads, head_dim).bfloat16()
    slots = torch.randperm(64)[:rows]
    stats = backend.stats(lambda: backend.ops.append_kv(k, v, k_cache, v_cache, slots))
    assert stats["launches"] == 1
    for name in ("k", "v"):
        assert stats["tensors"][name]["read_bytes"] == k.numel() * 2
        assert stats["tensors"][f"{name}_cache"]["written_bytes"] == k.numel() * 2
        assert stats["tensors"][f"{name}_cache"]["read_bytes"] == 0
    assert_full_sectors(stats)


TILE = 4096  # vocabulary entries, with 16 bytes of statistics each


def tiles_of(vocab):
    return -(-vocab // TILE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sample_reads_each_logit_once(dtype):
    backend = backends.get("emu_hooks")
    rows, vocab = 3, 5 * TILE + 384
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    seeds, positions = torch.arange(rows), torch.arange(rows)
    temperature = torch.tensor([1.0, 0.7, 0.0])
    stats = backend.stats(
        lambda: backend.ops.sample(
            logits, seeds, positions, vocab_size=vocab, temperature=temperature
        )
    )
    assert stats["launches"] == 2
    # Beyond one pass: for the two drawn rows the chosen tile and a strip of it, and one logit per row.
    once = logits.numel() * logits.element_size()
    again = stats["tensors"]["logits"]["read_bytes"] - once
    assert 0 < again <= (2 * (TILE + 128) + rows * 32) * logits.element_size()
    assert stats["tensors"]["logits"]["written_bytes"] == 0
    assert stats["tensors"]["scratch"]["written_bytes"] == rows * tiles_of(vocab) * 16
    assert_full_sectors(stats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("end", ["residual", "one-hot residual", "bonus", "greedy"])
def test_verify_chain_reads_rows_once_and_a_residual_twice(dtype, end):
    backend = backends.get("emu_hooks")
    drafts, vocab = 3, 3 * TILE + 384
    g = torch.Generator().manual_seed(0)
    target = torch.randn(drafts + 1, vocab, generator=g).to(dtype)
    draft = target[:drafts].clone()[None]
    ids = torch.tensor([0, 5, 6, 7])
    options = {"draft_logits": draft}
    if end == "residual":
        # Two drafts with p = q are accepted for any coin; the third one has p = 0.
        target[2, 7] = -torch.inf
    elif end == "one-hot residual":
        target[0, 5] = -torch.inf
        options = {}
    elif end == "greedy":
        target[torch.arange(drafts), ids[1:]] = 20.0
        options["temperature"] = torch.zeros(1)
    stats = backend.stats(
        lambda: backend.ops.verify_chain(
            target, ids, torch.tensor([0, drafts + 1], dtype=torch.int32), torch.ones(1).long(),
            torch.ones(1).long(), drafts, vocab_size=vocab, **options,
        )
    )  # fmt: skip
    assert stats["launches"] == 2
    size = target.element_size()
    blocks = tiles_of(vocab)  # of launch 2, at batch 1
    read = {name: stats["tensors"].get(name, {"read_bytes": 0})["read_bytes"] for name in
            ("target_logits", "draft_logits")}  # fmt: skip
    # Each block looks up p and q of every draft: 32 lanes, one logit.
    lookups = blocks * drafts * 32 * size
    tile = (TILE + 128) * size
    row = vocab * size
    passes = {"residual": (5, 4), "one-hot residual": (5, 0), "bonus": (4, 3), "greedy": (4, 0)}[
        end
    ]
    tiles_again = {
        "residual": (1, 1),
        "one-hot residual": (1, 0),
        "bonus": (1, 0),
        "greedy": (0, 0),
    }[end]
    for name, times, tiles in zip(read, passes, tiles_again, strict=True):
        assert times * row <= read[name] <= times * row + tiles * tile + (times > 0) * lookups, name
    assert_full_sectors(stats)


@pytest.mark.parametrize("nodes, words", [(60, 2), (20, 1), (250, 8)])
def test_trees_write_each_word_once(nodes, words):
    backend = backends.get("emu_hooks")
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32) // 2  # a binary tree
    parents[0] = -1
    parents = parents.repeat(2)
    cu_rows = torch.tensor([0, nodes, 2 * nodes], dtype=torch.int32)
    out = []
    stats = backend.stats(lambda: out.extend(backend.ops.tree_links(parents, cu_rows, nodes)))
    assert stats["launches"] == 1
    written = {name: t["written_bytes"] for name, t in stats["tensors"].items()}
    assert written["tree_mask"] == 4 * words * 2 * nodes
    for name in ("depth", "first_child", "next_sibling"):
        assert written[name] == 4 * 2 * nodes
    assert written["status"] == 4 * 2
    # Neighbouring threads write neighbouring words: as many sectors as the masks fill.
    stores = [line for line in stats["lines"] if line["bytes"] == written["tree_mask"]]
    assert stores
    for line in stores:
        assert line["sectors"] == line["ideal_sectors"], line
    stats = backend.stats(lambda: backend.ops.tree_from_mask(out[0], cu_rows))
    assert stats["launches"] == 1
    written = {name: t["written_bytes"] for name, t in stats["tensors"].items()}
    for name in ("parents", "depth", "first_child", "next_sibling"):
        assert written[name] == 4 * 2 * nodes
