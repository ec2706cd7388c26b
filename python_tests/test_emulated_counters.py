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


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_compact_kv_moves_each_byte_once(layout, dtype):
    """3 requests, 4 layers: one launch, no byte of the caches twice, bytes in all within 5 % of them."""
    backend = backends.get("emu_hooks")
    shape = (12, 16, 8, 128) if layout == "NHD" else (12, 8, 16, 128)
    caches = [torch.zeros(shape).to(dtype) for _ in range(8)]
    if layout == "HND":
        caches = [cache.transpose(1, 2) for cache in caches]
    cu_rows = torch.tensor([0, 32, 64, 96], dtype=torch.int32)
    path = torch.tensor([[0, 2, 5, 9], [0, 1, 2, 3], [0, 1, 30, -1]], dtype=torch.int32)
    num_accepted = torch.tensor([3, 3, 2], dtype=torch.int32)
    moved = (3 + 0 + 1) * 8 * 128 * caches[0].element_size() * 4  # of K or V in all layers
    slots = torch.randperm(192)[:96]
    stats = backend.stats(
        lambda: backend.ops.compact_kv(caches[:4], caches[4:], slots, cu_rows, path, num_accepted)
    )
    assert stats["launches"] == 1
    tensors = stats["tensors"]
    for name in ("k_caches", "v_caches"):
        assert tensors[name]["read_bytes"] == tensors[name]["written_bytes"] == moved
    total = sum(t["read_bytes"] + t["written_bytes"] for t in tensors.values())
    assert total <= 1.05 * 4 * moved, (total, 4 * moved)
    assert_full_sectors(stats)


def test_compact_kv_of_chains_touches_no_cache():
    backend = backends.get("emu_hooks")
    caches = [torch.zeros(4, 16, 2, 64) for _ in range(2)]
    cu_rows, path = (
        torch.tensor([0, 8], dtype=torch.int32),
        torch.arange(8, dtype=torch.int32)[None],
    )
    stats = backend.stats(
        lambda: backend.ops.compact_kv(
            caches[:1], caches[1:], torch.arange(8), cu_rows, path, torch.tensor([7]).int()
        )
    )
    for name in ("k_caches", "v_caches"):
        assert stats["tensors"][name]["read_bytes"] == stats["tensors"][name]["written_bytes"] == 0


def test_next_round_writes_each_element_once():
    backend = backends.get("emu_hooks")
    batch, block_len = 64, 16
    one = torch.ones(batch, dtype=torch.int32)
    stats = backend.stats(
        lambda: backend.ops.next_round(
            torch.full((batch, 8), 5), 6 * one, 90 * one, one[:, None].repeat(1, 16), page_size=16,
            block_len=block_len, mask_token_id=3, stop_token_ids=torch.tensor([2, 4]),
            max_len=200 * one,
        )
    )  # fmt: skip
    assert stats["launches"] == 1
    written = {name: t["written_bytes"] for name, t in stats["tensors"].items()}
    for name in ("input_ids", "positions", "slots"):
        assert written[name] == 8 * batch * block_len
    assert written["new_seq_lens"] == written["num_emitted"] == 4 * batch
    assert written["finished"] == batch
    for line in stats["lines"]:  # rows of 128 bytes by neighbouring threads
        if line["space"] == "global" and line["bytes"] == 8 * batch * block_len:
            assert line["sectors"] == line["ideal_sectors"], line


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


def _tree_case(vocab, dtype, sampled):
    """Nodes 1 and 2 below 0, 3 and 4 below 1, 5 outside the tree. Whatever the numbers, 1 is accepted
    (p = q, or p = 1) and 3 and 4 are not (p = 0)."""
    g = torch.Generator().manual_seed(0)
    target = torch.randn(6, vocab, generator=g).to(dtype)
    ids = torch.tensor([0, 5, 6, 7, 8, 9])
    draft = target.clone()
    target[1, 7:9] = -torch.inf
    if not sampled:
        target[0] = -torch.inf
        target[0, 5] = 0.0
    arguments = [
        target, ids, torch.tensor([-1, 0, 0, 1, 1, 5], dtype=torch.int32),
        torch.tensor([0, 6], dtype=torch.int32), torch.ones(1).long(), torch.ones(1).long(), 3,
    ]  # fmt: skip
    options = {"vocab_size": vocab}
    if sampled:
        options.update(draft_logits=draft, children="sampled")
    return arguments, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("end", ["two rejections", "one-hot rejection", "greedy"])
def test_verify_tree_reads_rows_once_and_a_rest_per_rejection(dtype, end):
    backend = backends.get("emu_hooks")
    vocab = 2 * TILE + 384
    arguments, options = _tree_case(vocab, dtype, end == "two rejections")
    if end == "greedy":
        options["temperature"] = torch.zeros(1)
    out = []
    stats = backend.stats(lambda: out.extend(backend.ops.verify_tree(*arguments, **options)))
    assert out[1][0].tolist() == [0, 1, -1, -1]
    assert stats["launches"] == 2
    size = arguments[0].element_size()
    # Five of the six rows are those of a tree, two of them have children.
    passes = {"two rejections": (5 + 2, 2 + 2), "one-hot rejection": (5 + 1, 0), "greedy": (5, 0)}[
        end
    ]
    tiles = {"two rejections": (1, 1), "one-hot rejection": (1, 0), "greedy": (0, 0)}[end]
    lookups = 3 * 32 * size  # p and q of three children
    for name, times, tiles_again in zip(
        ("target_logits", "draft_logits"), passes, tiles, strict=True
    ):
        read = stats["tensors"].get(name, {"read_bytes": 0})["read_bytes"]
        more = tiles_again * (TILE + 128) * size + (times > 0) * lookups
        assert times * vocab * size <= read <= times * vocab * size + more, name
    assert_full_sectors(stats)


@pytest.mark.parametrize("method", ["token", "traversal"])
def test_verify_tree_takes_three_launches_with_everything(method):
    backend = backends.get("emu_hooks")
    arguments, options = _tree_case(400, torch.float32, True)
    stats = backend.stats(
        lambda: backend.ops.verify_tree(
            *arguments,
            **options,
            method=method,
            top_p=torch.tensor([0.9]),
            d2t=torch.full((300,), 100),
            draft_controls=True,
            token_bitmask=torch.full((6, 13), -1, dtype=torch.int32),
            num_logprobs=5,
        )
    )
    assert stats["launches"] == 3


@pytest.mark.parametrize("sampled", [False, True])
def test_verify_tree_scratch_is_a_hundredth_of_the_logits(sampled):
    backend = backends.get("emu_hooks")
    nodes, vocab = 32, 151936
    logits = torch.zeros(nodes, vocab, dtype=torch.bfloat16)
    parents = torch.full((nodes,), -1, dtype=torch.int32)  # one row to read; room is made for all
    options = {"draft_logits": logits, "children": "sampled"} if sampled else {}
    one = torch.zeros(1).long()
    stats = backend.stats(
        lambda: backend.ops.verify_tree(
            logits, torch.zeros(nodes).long(), parents, torch.tensor([0, nodes]).int(), one, one, 5,
            vocab_size=vocab, temperature=torch.zeros(1), **options,
        )
    )  # fmt: skip
    assert 0 < stats["tensors"]["scratch"]["bytes"] <= 0.01 * logits.numel() * 2


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


VOCAB, DRAFTS = 151936, 7


@pytest.mark.parametrize("controls", ["none", "filters", "everything"])
def test_verify_chain_at_a_real_size(controls):
    """One request of 7 drafts at a vocabulary of 151936: bytes within 5 % of the floor (every row once,
    the residual's two rows twice), 2 launches, 3 with filters; scratch at most 1 % of the logits."""
    backend = backends.get("emu_hooks")
    g = torch.Generator().manual_seed(1)
    target = (torch.randn(DRAFTS + 1, VOCAB, generator=g) * 2).bfloat16()
    draft = target[:DRAFTS].clone()[None]
    ids = torch.cat([torch.zeros(1, dtype=torch.int64), target[:DRAFTS].float().argmax(-1)])
    target[3, ids[4]] = -torch.inf  # drafts 1 to 3 have p = q, the fourth has p = 0
    options = {}
    if controls != "none":
        options = {"top_k": torch.tensor([50], dtype=torch.int32), "top_p": torch.tensor([0.95])}
        options["draft_controls"] = True
    if controls == "everything":
        options |= {
            "repetition_penalty": torch.tensor([1.1]),
            "token_counts": torch.zeros(1, VOCAB, dtype=torch.int32),
            "num_logprobs": 20,
        }
    stats = backend.stats(
        lambda: backend.ops.verify_chain(
            target, ids, torch.tensor([0, DRAFTS + 1], dtype=torch.int32), torch.ones(1).long(),
            torch.ones(1).long(), DRAFTS, vocab_size=VOCAB, draft_logits=draft, **options,
        )
    )  # fmt: skip
    assert stats["launches"] == (2 if controls == "none" else 3)
    logits = (target.numel() + draft.numel()) * 2
    read = sum(stats["tensors"][name]["read_bytes"] for name in ("target_logits", "draft_logits"))
    if controls == "none":
        floor = logits + 2 * VOCAB * 2
        assert read <= 1.05 * floor, (read, floor)
    else:
        assert read <= 1.5 * logits, (read, logits)
    assert stats["tensors"]["scratch"]["bytes"] <= logits / 100
