"""Public faults of attention over paged KV, each as its smallest input: the docstrings say what went
wrong elsewhere."""

import itertools

import pytest
import torch
from compare import assert_close, assert_quantised, assert_same
from oracles import verify_attention as oracle


def i32(values, device=None):
    return torch.tensor(values, dtype=torch.int32, device=device)


def call(backend, q, k_cache, v_cache, table, cu_rows, seq_lens, **options):
    arguments = [q, k_cache, v_cache, i32(table), i32(cu_rows), i32(seq_lens)]
    out, lse = backend.ops.verify_attention(*(t.to(backend.device) for t in arguments), **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("mask", ["causal", "full", "tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_len, page_size", [(5, 4), (133, 64), (133, 256), (513, 256)])
@pytest.mark.parametrize("rows", [1, 4])
def test_F01_padding_lanes_take_no_part(backend, mask, dtype, kv_len, page_size, rows):
    """Lanes of the last tile behind the end were summed up when the mask was not causal: with q = 0
    and V = 1 the output fell to kv_len / lanes. It is 1, exactly."""
    pages = -(-kv_len // page_size)
    q = torch.zeros(rows, 2, 64, dtype=dtype)
    k_cache = torch.zeros(pages, page_size, 1, 64, dtype=dtype)
    v_cache = torch.zeros(pages, page_size, 1, 64, dtype=dtype)
    v_cache.view(-1, 64)[:kv_len] = 1.0
    out, lse = call(
        backend,
        q,
        k_cache,
        v_cache,
        [list(range(pages))],
        [0, rows],
        [kv_len],
        max_rows=rows,
        mask=mask,
        tree_mask=torch.full((rows, 1), -1).int().to(backend.device) if mask == "tree" else None,
    )
    assert_same(out, torch.ones_like(out))
    seen = [kv_len - rows + i + 1 if mask == "causal" else kv_len for i in range(rows)]
    wanted = torch.tensor(seen).double().log()[:, None].expand(rows, 2)
    assert_close(lse, wanted, what="lse")


@pytest.mark.parametrize(
    "heads, kv_heads", [(5, 1), (6, 1), (7, 1), (12, 2), (14, 2), (24, 4), (64, 4), (16, 1), (3, 3)]
)
@pytest.mark.parametrize("q_len", [1, 2, 3, 8])
def test_F04_any_group_size(backend, heads, kv_heads, q_len):
    """Dispatch tables of powers of two refused real models (groups of 5, 6, 7, 16)."""
    g = torch.Generator().manual_seed(heads)
    case = oracle.random_case(
        g, [q_len], [q_len + 20], heads=heads, kv_heads=kv_heads, dtype=torch.bfloat16
    )
    out, lse = backend.ops.verify_attention(*(t.to(backend.device) for t in case), max_rows=q_len)
    wanted = oracle.verify_attention(*case, max_rows=q_len)
    peer = oracle.torch_peer(*case, max_rows=q_len)
    assert_close(out, wanted[0], peer[0], what="out")
    assert_close(lse, wanted[1], peer[1], what="lse", magnitude=8.0)


@pytest.mark.parametrize(
    "q_len, head_dim",
    [
        *itertools.product([1, 4, 5, 8, 9, 16, 17, 32, 64], [64, 128]),
        *itertools.product([1, 4, 5, 9, 17], [80, 96, 192, 256]),
    ],
)
def test_F05_no_gap_in_row_counts(backend, head_dim, q_len):
    """Kernels chosen by q_len * group had gaps: 4 drafts worked, 5 crashed."""
    g = torch.Generator().manual_seed(q_len)
    case = oracle.random_case(
        g, [q_len], [q_len + 9], heads=4, kv_heads=1, head_dim=head_dim, dtype=torch.float16
    )
    out, lse = backend.ops.verify_attention(*(t.to(backend.device) for t in case), max_rows=q_len)
    wanted = oracle.verify_attention(*case, max_rows=q_len)
    peer = oracle.torch_peer(*case, max_rows=q_len)
    assert_close(out, wanted[0], peer[0], what="out")
    assert_close(lse, wanted[1], peer[1], what="lse", magnitude=8.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("path", ["chain", "tree", "empty prefix", "split"])
def test_F07_G04_scales_count_on_every_path(backend, dtype, path):
    """One path forgot the scales of an fp8 cache, read a scale per head as one, or took that of K for V.
    Written by append_kv, read with the same scales: that is the fp32 result within an fp8 step."""
    scales = {"k_scale": torch.tensor([2.0, 0.5]), "v_scale": torch.tensor([4.0, 0.25])}
    rows = 3
    length = {"split": 1100, "empty prefix": rows}.get(path, 40)
    g = torch.Generator().manual_seed(7)
    k, v = torch.randn(2, length, 2, 64, generator=g)
    q = torch.randn(rows, 4, 64, generator=g).to(dtype)
    pages = -(-length // 16)
    caches = [torch.zeros(pages, 16, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2)]
    caches = [cache.to(backend.device) for cache in caches]
    on = {name: scale.to(backend.device) for name, scale in scales.items()}
    slots = torch.arange(length, device=backend.device)
    rows_of_cache = [t.to(dtype).to(backend.device) for t in (k, v)]
    backend.ops.append_kv(*rows_of_cache, *caches, slots, **on)
    options = {"max_rows": rows, "mask": "tree" if path == "tree" else "causal"}
    if path == "tree":
        options["tree_mask"] = i32([[1], [3], [5]], backend.device)
    lists = [list(range(pages))], [0, rows], [length]
    out, lse = call(backend, q, *caches, *lists, **options, **on)
    if path == "tree":
        options["tree_mask"] = options["tree_mask"].cpu()
    case = (q, *(cache.cpu() for cache in caches), *(i32(x) for x in lists))
    wanted = oracle.verify_attention(*case, **options, **scales)
    peer = oracle.torch_peer(*case, **options, **scales)
    assert_close(out, wanted[0], peer[0], what="out")
    assert_close(lse, wanted[1], peer[1], what="lse", magnitude=8.0)
    full = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, pages * 16 - length)) for t in (k, v)]
    full = [t.reshape(pages, 16, 2, 64) for t in full]
    plain, _ = oracle.verify_attention(q, *full, *case[3:], **options)
    assert_quantised(
        out, plain, steps=5
    )  # values of up to 4; a scale lost is at least a factor of 2


def test_F08_B10_calls_share_no_state(backend):
    """A plan or mask of an earlier call was used by a later one: target, drafter, target again."""
    g = torch.Generator().manual_seed(8)
    target = oracle.random_case(g, [4], [70], heads=8, kv_heads=2)
    drafter = oracle.random_case(g, [3], [33], heads=2, kv_heads=1, page_size=4)

    def run(case, mask):
        on = [t.to(backend.device) for t in case]
        return [t.cpu() for t in backend.ops.verify_attention(*on, max_rows=4, mask=mask)]

    def windowed():
        on = [t.to(backend.device) for t in drafter]
        got = backend.ops.verify_attention(*on, max_rows=3, mask="full", window=4)
        return [t.cpu() for t in got]

    four = windowed()
    first = run(target, "causal")
    full = run(drafter, "full")
    for got, wanted in zip(run(target, "causal"), first, strict=True):
        assert_same(got, wanted)
    for got, wanted in zip(run(drafter, "full"), full, strict=True):
        assert_same(got, wanted)
    for got, wanted in zip(windowed(), four, strict=True):
        assert_same(got, wanted)
    causal = run(drafter, "causal")
    assert (causal[1][0] < full[1][0]).all()  # row 0 sees two places fewer
    assert_same(causal[0][2], full[0][2])  # the last row sees the same


def words_of(parents, num_words=1):
    words = torch.tensor(oracle.ancestor_words(parents, num_words), dtype=torch.int64)
    return (words - (words >> 31 << 32)).int()


def test_B10_causal_after_a_tree_is_causal(backend):
    """A causal call after a tree call still used the tree's mask."""
    case = oracle.random_case(torch.Generator().manual_seed(3), [4], [12])
    on = [t.to(backend.device) for t in case]
    first = backend.ops.verify_attention(*on, max_rows=4)
    words = words_of([-1, 0, 0, 2]).to(backend.device)
    tree = backend.ops.verify_attention(*on, max_rows=4, mask="tree", tree_mask=words)
    second = backend.ops.verify_attention(*on, max_rows=4, tree_mask=None)
    for got, wanted in zip(second, first, strict=True):
        assert_same(got.cpu(), wanted.cpu())
    assert (tree[0][3] != first[0][3]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scattered", [False, True])
def test_B06_B13_a_window_follows_positions(backend, dtype, scattered):
    """Siblings share a position (prefix + depth). With W = 4 node 3 sees places 5, 6, 8, 9, whose mean
    is 7; a window over places would show 6, 8, 9."""
    pages = [4, 0, 7, 2, 9, 1, 3, 8, 6, 5] if scattered else list(range(10))
    q = torch.zeros(4, 1, 64, dtype=dtype)
    k_cache = torch.zeros(10, 1, 1, 64, dtype=dtype)
    v_cache = torch.empty(10, 1, 1, 64, dtype=dtype)
    v_cache[pages] = torch.arange(10.0).to(dtype)[:, None, None, None].expand(10, 1, 1, 64)
    out, lse = call(
        backend,
        q,
        k_cache,
        v_cache,
        [pages],
        [0, 4],
        [10],
        max_rows=4,
        mask="tree",
        tree_mask=words_of([-1, 0, 0, 2]).to(backend.device),
        positions=torch.tensor([6, 7, 7, 8], device=backend.device),
        window=4,
    )
    wanted = torch.tensor([(3 + 4 + 5 + 6) / 4, (4 + 5 + 6 + 7) / 4, (4 + 5 + 6 + 8) / 4, 7.0])
    assert_same(out[:, 0, 0], wanted.to(dtype))
    assert_close(lse, torch.full_like(lse, 4.0).double().log(), what="lse")


@pytest.mark.parametrize("nodes", [1, 7, 8, 9, 31, 32, 33, 64, 65])
def test_B09_every_request_has_its_own_bits(backend, nodes):
    """Bits of the second request were looked up at the wrong offset: it comes after trees of every width."""
    g = torch.Generator().manual_seed(nodes)
    rows, lens = [nodes, 4], [nodes + 2, 6]
    case = oracle.random_case(g, rows, lens, heads=2, kv_heads=1)
    words = torch.cat([words_of([i // 2 - 1 for i in range(n)], 3) for n in rows])
    on = [t.to(backend.device) for t in case]
    options = {"max_rows": nodes + 4, "mask": "tree"}
    got = backend.ops.verify_attention(*on, tree_mask=words.to(backend.device), **options)
    wanted = oracle.verify_attention(*case, tree_mask=words, **options)
    peer = oracle.torch_peer(*case, tree_mask=words, **options)
    for name, ours, exact, torchs in zip(("out", "lse"), got, wanted, peer, strict=True):
        assert_close(ours, exact, torchs, what=name)


@pytest.mark.parametrize("max_rows, words", [(1, 0), (33, 1), (65, 2), (256, 7)])
def test_B08_F10_a_mask_that_is_too_narrow_is_an_error(backend, max_rows, words):
    """No broadcasting, no truncation, nothing read behind the mask."""
    case = oracle.random_case(torch.Generator().manual_seed(1), [1], [7])
    on = [t.to(backend.device) for t in case]
    narrow = torch.zeros(1, words, dtype=torch.int32, device=backend.device)
    message = rf"verify_attention: tree_mask: wanted at least {words + 1} \(ceil"
    with pytest.raises(RuntimeError, match=message):
        backend.ops.verify_attention(*on, max_rows=max_rows, mask="tree", tree_mask=narrow)
    with pytest.raises(RuntimeError, match=r"tree_mask: wanted size 1 \(R of q\)"):
        wide = torch.zeros(2, 8, dtype=torch.int32, device=backend.device)
        backend.ops.verify_attention(*on, max_rows=max_rows, mask="tree", tree_mask=wide)


def test_J08_padded_rows_and_requests(backend):
    """12 requests, inputs padded to 13 rows, cu_rows padded by its last value: padding changes no
    bit and reads nothing (its table and length are garbage)."""
    g = torch.Generator().manual_seed(9)
    lens = [3 + 7 * b for b in range(12)]
    case = oracle.random_case(g, [1] * 12, lens, spare_rows=1, dtype=torch.bfloat16)
    q, k_cache, v_cache, table, cu_rows, seq_lens = case
    on = backend.device
    wanted = backend.ops.verify_attention(q[:12].to(on), *(t.to(on) for t in case[1:]), max_rows=1)
    padded_table = torch.cat([table, torch.full_like(table[:1], 2**31 - 1)])
    padded = [q, k_cache, v_cache, padded_table, i32([*range(13), 12]), i32([*lens, 2**31 - 1])]
    out, lse = backend.ops.verify_attention(*(t.to(on) for t in padded), max_rows=1)
    assert_same(out[:12].cpu(), wanted[0].cpu(), "out")
    assert_same(lse[:12].cpu(), wanted[1].cpu(), "lse")
    assert (out[12] == 0).all() and torch.isneginf(lse[12]).all()


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unused_places_may_be_nan(backend, mask, dtype):
    """0 * NaN is NaN: stale values behind the end, in the same page and in others, must not meet even
    a zero weight. The same with +inf, and with zeros for comparison."""
    g = torch.Generator().manual_seed(10)
    case = oracle.random_case(g, [3, 1], [70, 17], dtype=dtype)
    results = []
    for junk in (float("nan"), float("inf"), 0.0):
        changed = [
            torch.where(torch.isnan(t), junk, t) if t.is_floating_point() else t for t in case
        ]
        results.append(
            backend.ops.verify_attention(
                *(t.to(backend.device) for t in changed), max_rows=3, mask=mask
            )
        )
    for got in results[:2]:
        assert_same(got[0].cpu(), results[2][0].cpu(), "out")
        assert_same(got[1].cpu(), results[2][1].cpu(), "lse")
    assert torch.isfinite(results[0][0]).all()


def test_future_rows_of_the_pass_do_not_leak(backend):
    """In a causal pass, row i must not see the K and V of rows i + 1.. that lie in the cache."""
    g = torch.Generator().manual_seed(11)
    case = oracle.random_case(g, [4], [40], page_size=8)
    q, k_cache, v_cache, table, cu_rows, seq_lens = case
    on = backend.device
    out, lse = (
        t.cpu() for t in backend.ops.verify_attention(*(t.to(on) for t in case), max_rows=4)
    )
    for i in range(3):
        changed = [k_cache.clone(), v_cache.clone()]
        for place in range(36 + i + 1, 40):
            for cache in changed:
                cache[int(table[0, place // 8]), place % 8] = 1000.0
        arguments = [q, *changed, table, cu_rows, seq_lens]
        got = backend.ops.verify_attention(*(t.to(on) for t in arguments), max_rows=4)
        assert_same(got[0][: i + 1].cpu(), out[: i + 1], f"out up to row {i}")
        assert_same(got[1][: i + 1].cpu(), lse[: i + 1], f"lse up to row {i}")
        assert (got[0][3].cpu() != out[3]).any()
