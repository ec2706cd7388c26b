"""What the emulator counts of the builders of draft trees: launches and bytes against the floor."""

import backends
import pytest
import torch
from test_emulated_counters import assert_full_sectors

pytestmark = pytest.mark.skipif(
    "emu_hooks" not in backends.available(), reason="the hooks build is not among the backends"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["random", "flat", "foreign columns"])
def test_expand_tree_reads_each_logit_once(dtype, kind):
    """EAGLE-3's size, two launches. All bytes together within 5 % of logits in and results out; without the
    map, which is looked at where columns come near the first ones."""
    backend = backends.get("emu_hooks")
    nodes, vocab, topk = 2, 32000, 10
    logits = torch.randn(1, nodes, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = {"vocab_size": vocab}
    if kind == "flat":
        logits[:] = 1.0
    elif kind == "foreign columns":
        options["d2t"] = torch.full((vocab,), vocab)
        options["d2t"][100:200] = 0
    stats = backend.stats(
        lambda: backend.ops.expand_tree(logits, torch.zeros(1, nodes), topk, **options)
    )
    assert stats["launches"] == 2
    tensors = stats["tensors"]
    assert tensors["logits"]["read_bytes"] == logits.numel() * logits.element_size()
    moved = sum(t["read_bytes"] + t["written_bytes"] for n, t in tensors.items() if n != "d2t")
    floor = logits.numel() * logits.element_size() + 12 * nodes * topk + 20 * topk + 4 * nodes
    assert moved <= 1.05 * floor, (moved, floor)
    assert tensors["scratch"]["bytes"] <= 0.02 * logits.numel() * 2
    if kind == "random":
        assert_full_sectors(stats)


def test_expand_tree_leaves_dead_rows_alone():
    backend = backends.get("emu_hooks")
    scores = torch.tensor([[0.0, -float("inf"), float("nan")]])
    logits = torch.randn(1, 3, 5000)
    stats = backend.stats(lambda: backend.ops.expand_tree(logits, scores, 4, vocab_size=5000))
    assert stats["tensors"]["logits"]["read_bytes"] == 5000 * 4


def test_expand_tree_looks_at_few_entries_of_the_map():
    backend = backends.get("emu_hooks")
    vocab = 32000
    logits = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(1)).bfloat16()
    d2t = torch.arange(vocab)
    stats = backend.stats(
        lambda: backend.ops.expand_tree(
            logits, torch.zeros(1, 1), 10, vocab_size=2 * vocab, d2t=d2t
        )
    )
    assert stats["tensors"]["d2t"]["read_bytes"] < 0.1 * vocab * 2


@pytest.mark.parametrize("count, num_nodes", [(610, 60), (40, 20), (2048, 256)])
def test_build_tree_writes_each_word_once(count, num_nodes):
    backend = backends.get("emu_hooks")
    batch, words = 2, -(-num_nodes // 32)
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 99, (batch, count), generator=g)
    scores, anchors = -torch.rand(batch, count, generator=g), torch.zeros(batch).long()
    parents = torch.full((batch, count), -1, dtype=torch.int32)
    stats = backend.stats(
        lambda: backend.ops.build_tree(tokens, scores, parents, anchors, anchors, num_nodes)
    )
    assert stats["launches"] == 1
    written = {name: t["written_bytes"] for name, t in stats["tensors"].items()}
    assert written["tree_mask"] == 4 * batch * num_nodes * words
    for name in ("parents", "first_child", "next_sibling"):
        assert written[name] == 4 * batch * num_nodes
    assert written["input_ids"] == written["node_positions"] == 8 * batch * num_nodes
    assert written["status"] == 4 * batch
    assert stats["tensors"]["candidate_scores"]["read_bytes"] == 4 * batch * count


@pytest.mark.parametrize("num_nodes", [16, 64])
def test_block_tree_reads_each_logit_once(num_nodes):
    backend = backends.get("emu_hooks")
    rows, vocab = 3, 32000
    logits = torch.randn(1, rows, vocab, generator=torch.Generator().manual_seed(3)).bfloat16()
    one = torch.zeros(1).long()
    stats = backend.stats(
        lambda: backend.ops.block_tree(logits, one, one, num_nodes, 8, vocab_size=vocab)
    )
    assert stats["launches"] == 2
    tensors = stats["tensors"]
    assert tensors["logits"]["read_bytes"] == logits.numel() * 2
    assert tensors["tree_mask"]["written_bytes"] == 4 * num_nodes * -(-num_nodes // 32)
    assert tensors["scratch"]["bytes"] <= 0.02 * logits.numel() * 2
