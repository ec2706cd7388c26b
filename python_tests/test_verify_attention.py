"""verify_attention: out and lse against the oracle on every backend, and bitwise invariance."""

import backends
import pytest
import torch
from compare import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import OWN_BF16, results_by_isa
from oracles import verify_attention as oracle

import specdec_ext

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
# Of K and V: all that CUDA has kernels for.
CUDA_HEAD_DIMS = [*((d, d) for d in (64, 80, 96, 128, 192, 256)), (192, 128), (64, 128), (128, 64)]


def run(backend, case, **options):
    """out and lse on the CPU. Caches keep their strides (a view moves as a view)."""
    options.setdefault("max_rows", most_rows(case))
    for name, value in options.items():
        options[name] = value.to(backend.device) if isinstance(value, torch.Tensor) else value
    out, lse = backend.ops.verify_attention(*(move(t, backend.device) for t in case), **options)
    return out.cpu(), lse.cpu()


def move(t, device):
    if t.device == device or t.numel() == 0:
        return t.to(device)
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    storage = t.as_strided((span,), (1,)).to(device)
    return storage.as_strided(t.shape, t.stride())


def most_rows(case):
    cu_rows = case[4]
    return int((cu_rows[1:] - cu_rows[:-1]).max()) if len(cu_rows) > 1 else 0


def check(backend, case, **options):
    options.setdefault("max_rows", most_rows(case))
    out, lse = run(backend, case, **options)
    wanted_out, wanted_lse = oracle.verify_attention(*case, **options)
    peer_out, peer_lse = oracle.torch_peer(*case, **options)
    assert out.dtype == case[0].dtype and lse.dtype == torch.float32
    assert_close(out, wanted_out, peer_out, what="out")
    assert_close(lse, wanted_lse, peer_lse, what="lse", magnitude=score_size(case, options))
    return out, lse


def score_size(case, options):
    """What scores are sums of: the largest |scale * q . k| that could occur, at least 1."""
    q, k_cache = case[0], oracle.unscaled(case[1], options.get("k_scale"))
    scale = options.get("scale") or q.shape[2] ** -0.5
    norms = [t.double().nan_to_num(0).norm(dim=-1).max() if t.numel() else 0 for t in (q, k_cache)]
    return max(1.0, abs(scale) * float(norms[0]) * float(norms[1]))


def relayout(cache, layout):
    """The same values as a cache view of another memory layout."""
    pages, page_size, heads, head_dim = cache.shape
    if layout == "HND":
        return cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    if layout == "padded":
        padded = torch.full((pages + 1, page_size, heads, head_dim + 8), NAN, dtype=cache.dtype)
        view = padded[1:, :, :, :head_dim]
        view.copy_(cache)
        return view
    if layout == "odd":  # rows at no multiple of 16 bytes
        padded = torch.full((pages, page_size, heads, head_dim + 1), NAN, dtype=cache.dtype)
        view = padded[..., 1:]
        view.copy_(cache)
        return view
    assert layout == "NHD"
    return cache.clone()


def make(rows, seq_lens, seed=0, **options):
    return oracle.random_case(torch.Generator().manual_seed(seed), rows, seq_lens, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("head_dim, v_dim", [(64, 64), (128, 128), (64, 128), (128, 64)])
def test_matches_oracle(backend, dtype, mask, head_dim, v_dim):
    """Ragged requests around the ends of tiles: 1, 63, 64, 65, 129 places; one without rows."""
    case = make(
        [1, 3, 4, 0, 2, 5],
        [1, 63, 64, 9, 65, 129],
        heads=6,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=dtype,
        spare_rows=2,
    )
    check(backend, case, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_across_segments(backend, dtype, mask):
    """Contexts that end just before, at and behind segment ends (512, 1024)."""
    lens = [511, 513] if backend.emulated else [511, 512, 513, 1025, 1600]
    case = make([3] * len(lens), lens, heads=4, page_size=32, dtype=dtype)
    check(backend, case, mask=mask)


@pytest.mark.parametrize(
    "head_dim, v_dim", [(80, 80), (96, 96), (192, 128), (192, 192), (256, 256)]
)
@pytest.mark.parametrize("rows", [[1, 2], [3, 9], [12, 3]], ids=["16 rows", "32 rows", "more rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_head_dims(backend, dtype, rows, head_dim, v_dim):
    """Rows that fill no power of two, of one stage of the ring, of 16 rows a warp; also cut at 512."""
    case = make(
        rows,
        [70, 530],
        heads=3,
        kv_heads=1,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=dtype,
        spare_rows=1,
    )
    check(backend, case)


@pytest.mark.parametrize("head_dim, v_dim", [(16, 16), (48, 80), (112, 32), (96, 192), (240, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_head_dims_on_the_cpu(head_dim, v_dim, dtype):
    case = make([3, 5], [70, 33], heads=3, kv_heads=1, head_dim=head_dim, v_dim=v_dim, dtype=dtype)
    check(backends.get("cpu"), case)


@pytest.mark.parametrize("page_size", [1, 3, 16, 17, 64, 100, 256])
def test_page_sizes(backend, page_size):
    check(backend, make([2, 3], [130, 67], page_size=page_size, dtype=torch.bfloat16))


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 24, 33])
def test_row_counts(backend, rows):
    """More rows than a register block or a group of packed rows holds."""
    case = make([rows], [rows + 70], heads=10, kv_heads=2, dtype=torch.bfloat16)
    check(backend, case)


def test_a_prompt_is_one_pass(backend):
    """All rows of a sequence at once, as prefill: row i sees i + 1 places."""
    rows = 40 if backend.emulated else 200
    check(backend, make([rows], [rows], heads=3, kv_heads=1))


@pytest.mark.parametrize("layout", ["NHD", "HND", "padded", "odd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_give_the_same_bits(backend, layout, dtype):
    q, k_cache, v_cache, *rest = make([3, 2], [100, 40], dtype=dtype)
    wanted = check(backend, (q, k_cache, v_cache, *rest))
    got = run(backend, (q, relayout(k_cache, layout), relayout(v_cache, layout), *rest))
    assert_same(got[0], wanted[0], "out")
    assert_same(got[1], wanted[1], "lse")


def test_interleaved_caches_and_strided_q(backend):
    """K and V as two views of one tensor; q as a slice of a fused qkv projection."""
    q, k_cache, v_cache, *rest = make([3, 2], [100, 40], dtype=torch.float16)
    wanted = run(backend, (q, k_cache, v_cache, *rest))
    both = torch.stack([k_cache, v_cache], 1).to(backend.device)
    side_by_side = torch.cat([k_cache, v_cache], -1).to(backend.device)
    qkv = torch.full((q.shape[0], q.shape[1] + 4, q.shape[2]), NAN, dtype=q.dtype)
    qkv[:, 2:-2] = q
    fused = qkv.to(backend.device)[:, 2:-2]
    rest = [t.to(backend.device) for t in rest]
    dim = k_cache.shape[3]
    for k_view, v_view in (
        (both[:, 0], both[:, 1]),
        (side_by_side[..., :dim], side_by_side[..., dim:]),
    ):
        got = backend.ops.verify_attention(fused, k_view, v_view, *rest, max_rows=3)
        assert_same(got[0].cpu(), wanted[0], "out")
        assert_same(got[1].cpu(), wanted[1], "lse")


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_of_a_pass_is_a_one_row_call(backend, dtype):
    """Row j of K rows, bit for bit the call with that row alone at its prefix."""
    lens = [70] if backend.emulated else [12, 70, 515, 1030]
    rows = [6] * len(lens)
    case = make(rows, lens, heads=6, dtype=dtype)
    q, k_cache, v_cache, table, cu_rows, _ = case
    out, lse = run(backend, case)
    for b, seq_len in enumerate(lens):
        for j in range(rows[b]):
            row = int(cu_rows[b]) + j
            alone = run(
                backend,
                (
                    q[row : row + 1],
                    k_cache,
                    v_cache,
                    table[b : b + 1],
                    torch.tensor([0, 1], dtype=torch.int32),
                    torch.tensor([seq_len - rows[b] + j + 1], dtype=torch.int32),
                ),
            )
            assert_same(alone[0][0], out[row], f"out of row {j} at {seq_len}")
            assert_same(alone[1][0], lse[row], f"lse of row {j} at {seq_len}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_batch_pages_and_padding_change_no_bit(backend, dtype, mask):
    """Each request alone, on other pages of another size, against the whole batch."""
    rows, lens = ([3, 1, 2], [66, 5, 40]) if backend.emulated else ([3, 1, 9, 2], [560, 5, 140, 64])
    case = make(rows, lens, heads=6, page_size=16, dtype=dtype, spare_rows=3)
    q, k_cache, v_cache, table, cu_rows, seq_lens = case
    out, lse = run(backend, case, mask=mask, max_rows=16)
    for b, seq_len in enumerate(lens):
        begin, end = int(cu_rows[b]), int(cu_rows[b + 1])
        for page_size in (7, 64):
            # The same keys on fresh pages, in descending order of pages.
            columns = -(-seq_len // page_size)
            fresh = [
                torch.full((columns + 3, page_size, *c.shape[2:]), NAN) for c in (k_cache, v_cache)
            ]
            fresh = [f.to(dtype) for f in fresh]
            pages = list(range(columns + 2, 2, -1))
            for place in range(seq_len):
                old = (int(table[b, place // 16]), place % 16)
                new = (pages[place // page_size], place % page_size)
                fresh[0][new], fresh[1][new] = k_cache[old], v_cache[old]
            alone = run(
                backend,
                (
                    q[begin:end],
                    *fresh,
                    torch.tensor([pages], dtype=torch.int32),
                    torch.tensor([0, end - begin], dtype=torch.int32),
                    seq_lens[b : b + 1],
                ),
                mask=mask,
            )
            assert_same(alone[0], out[begin:end], f"out of request {b}")
            assert_same(alone[1], lse[begin:end], f"lse of request {b}")


def test_permuted_batch(backend):
    case = make([3, 0, 1, 4], [70, 10, 33, 129], heads=6, dtype=torch.bfloat16)
    q, k_cache, v_cache, table, cu_rows, seq_lens = case
    out, lse = run(backend, case)
    order = [2, 3, 1, 0]
    spans = [range(int(cu_rows[b]), int(cu_rows[b + 1])) for b in order]
    rows = [row for span in spans for row in span]
    new_cu = torch.tensor([0, *(len(s) for s in spans)]).cumsum(0).int()
    got = run(backend, (q[rows], k_cache, v_cache, table[order], new_cu, seq_lens[order]))
    assert_same(got[0], out[rows], "out")
    assert_same(got[1], lse[rows], "lse")


@pytest.mark.parametrize(
    "rows, lens, kv_heads",
    [([8], [1500], 1), ([1], [3000], 2), ([3, 1, 2], [1100, 30, 700], 3), ([120], [700], 1)],
)
def test_threads_change_no_bit(rows, lens, kv_heads):
    """Work that is split between threads in the middle of a sequence."""
    case = make(rows, lens, heads=2 * kv_heads, kv_heads=kv_heads, head_dim=128)
    threads = torch.get_num_threads()
    results = {}
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results[count] = run(backends.get("cpu"), case)
    finally:
        torch.set_num_threads(threads)
    for count in (2, 3):
        assert_same(results[count][0], results[1][0], f"out with {count} threads")
        assert_same(results[count][1], results[1][1], f"lse with {count} threads")


def test_instruction_sets_give_the_same_bits():
    """Every instruction set this CPU has, each in its own process; bf16 on AMX has bits of its own."""
    saved = results_by_isa("isa_attention")
    for isa, results in saved.items():
        for name, wanted in saved["baseline"].items():
            # Tiles of bf16 round products and weights in their own way; the oracle judges those.
            if isa not in OWN_BF16 or "bfloat16" not in name:
                assert_same(results[name], wanted, f"{name} on {isa}")


def test_rows_that_see_nothing(backend):
    """No key, places below 0, rows of no request: out 0 and lse -inf, in every row."""
    case = make([2, 4, 0, 3], [0, 2, 7, 3], dtype=torch.bfloat16, spare_rows=2)
    out, lse = check(backend, case)
    blind = [0, 1, 2, 3, 9, 10]  # request 0; places -2, -1 of request 1; padding
    assert (out[blind] == 0).all() and not torch.signbit(out[blind]).any()
    assert torch.isneginf(lse[blind]).all()
    assert torch.isfinite(lse[[4, 5, 6, 7, 8]]).all()
    # With mask "full" every row of request 1 sees its two places.
    _, full = check(backend, case, mask="full")
    assert torch.isfinite(full[2:6]).all() and torch.isneginf(full[[0, 1, 9, 10]]).all()


def test_negative_length(backend):
    case = list(make([2, 2], [0, 5]))
    case[5] = torch.tensor([-7, 5], dtype=torch.int32)
    out, lse = check(backend, case)
    assert torch.isneginf(lse[:2]).all() and (out[:2] == 0).all()


def test_pages_outside_the_cache_are_not_visible(backend):
    """Negative and too large page numbers hide their places, and are not used as an index."""
    case = make([2, 3], [90, 70], page_size=16)
    table = case[3].clone()
    table[0, 1] = -1
    table[0, 3] = case[1].shape[0]
    table[1, 0] = 2**31 - 1
    table[1, 2] = -(2**31)
    changed = (*case[:3], table, *case[4:])
    for mask in ("causal", "full"):
        check(backend, changed, mask=mask)
    table[1] = -1
    out, lse = check(backend, changed)
    assert torch.isneginf(lse[2:]).all() and (out[2:] == 0).all()


def test_lengths_beyond_the_block_table(backend):
    """Places behind the last column are not visible."""
    q, k_cache, v_cache, table, cu_rows, _ = make([2], [64], page_size=16)
    case = (q, k_cache, v_cache, table[:, :3], cu_rows)
    for seq_len in (49, 64, 2**31 - 1):
        shown = run(backend, (*case, torch.tensor([seq_len], dtype=torch.int32)), mask="full")
        wanted = run(backend, (*case, torch.tensor([48], dtype=torch.int32)), mask="full")
        assert_same(shown[0], wanted[0], "out")
        assert_same(shown[1], wanted[1], "lse")


@pytest.mark.parametrize("cu_rows", [[0, 9, 3], [-4, 2, 5], [3, 1, 99], [5, 5, 5], [2, 4, 5]])
def test_wrong_cu_rows_stay_inside(backend, cu_rows):
    """Offsets outside 0 .. R or decreasing: some result for every row, and no access outside."""
    case = list(make([2, 3], [40, 20]))
    case[4] = torch.tensor(cu_rows, dtype=torch.int32)
    out, lse = run(backend, tuple(case), max_rows=5)
    assert torch.isfinite(out).all() and not torch.isnan(lse).any()
    owned = set()
    for b in range(2):
        owned |= set(range(*oracle.rows_of(cu_rows, b, 5)))
    for row in set(range(5)) - owned:
        assert (out[row] == 0).all() and torch.isneginf(lse[row]).all(), row


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -1.0, 4.0])
def test_scales(backend, scale):
    check(backend, make([3], [80]), scale=scale)


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(backend, dtype, rows):
    """A later tile raises the maximum by far: earlier sums are scaled down, to 0 where they must."""
    q, k_cache, v_cache, table, cu_rows, seq_lens = make([rows], [200], page_size=8, dtype=dtype)
    for place, size in ((5, 10.0), (70, 40.0), (150, 90.0), (190, -90.0)):
        page = int(table[0, place // 8])
        k_cache[page, place % 8] = (q[:, ::2].float().mean(0) * size).to(dtype)
    case = (q, k_cache, v_cache, table, cu_rows, seq_lens)
    for scale in (0.125, 3.0) if rows == 2 else (0.125,):
        check(backend, case, scale=scale)
        check(backend, case, scale=-scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("score", [5e9, 3e30])
def test_scores_beyond_the_range_of_exponents(backend, score, rows, dtype):
    """Half a unit in the last place of such a score is many powers of two: the largest is itself all the same."""
    case = make([rows], [70], dtype=dtype)
    q, k_cache, v_cache, table = case[:4]
    q.zero_(), k_cache.zero_(), v_cache.fill_(1.0)
    q[..., 0] = 1.0
    k_cache[int(table[0, 3 // k_cache.shape[1]]), 3 % k_cache.shape[1], :, 0] = score
    out, _ = check(backend, case, scale=1.0)
    assert (out == 1.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 3, 20])
def test_later_rows_may_be_nan(backend, rows, dtype):
    """A row with NaN in its K and V is seen by itself and those after it, and by nobody before it."""
    q, k_cache, v_cache, table, cu_rows, seq_lens = make([rows], [70], page_size=8, dtype=dtype)
    clean = run(backend, (q, k_cache, v_cache, table, cu_rows, seq_lens))
    place = 70 - rows // 2
    page, offset = int(table[0, place // 8]), place % 8
    first = rows - (70 - place)
    for junk, k_too in ((NAN, True), (INF, True), (NAN, False), (INF, False)):
        k_bad, v_bad = k_cache.clone(), v_cache.clone()
        v_bad[page, offset] = junk
        if k_too:
            k_bad[page, offset] = junk
        out, lse = run(backend, (q, k_bad, v_bad, table, cu_rows, seq_lens))
        assert_same(out[:first], clean[0][:first], "out of the rows before")
        assert_same(lse[:first], clean[1][:first], "lse of the rows before")
        assert not torch.isfinite(out[first:].float()).any(), "the bad row is seen, whole"


def test_values_of_one(backend):
    """With V = 1 every output is a sum of weights over itself: exactly 1."""
    q, k_cache, v_cache, *rest = make([4, 3], [133, 70], page_size=4)
    v_cache = torch.where(torch.isnan(v_cache), v_cache, torch.ones(()))
    out, _ = run(backend, (q, k_cache, v_cache, *rest))
    assert_close(out, torch.ones_like(out), what="out")


def test_E01_strides_behind_2_to_31_elements(backend):
    """Products of page and stride, and of row and stride, beyond int32."""
    if backend.name == "emu_asan":
        pytest.skip("a view of 8 GB of address space does not fit the sanitizer's shadow memory")
    stride, pages = 2**20, 2100
    on = backend.device
    base = torch.empty(pages * stride, dtype=torch.bfloat16, device=on)
    caches = [base[i * 4096 :].as_strided((pages, 1, 1, 64), (stride, 64, 64, 1)) for i in (0, 1)]
    rows = base[2 * 4096 :].as_strided((pages, 1, 64), (stride, 64, 1))
    g = torch.Generator().manual_seed(1)
    used = [0, 2047, 2048, 2099]
    for t in caches:
        t[used] = torch.randn(4, 1, 1, 64, generator=g).bfloat16().to(on)
    rows[used] = torch.randn(4, 1, 64, generator=g).bfloat16().to(on)
    table = torch.tensor([used[::-1]] * 4, dtype=torch.int32)
    lens = torch.tensor([4] * 4, dtype=torch.int32)
    # Only the four used rows belong to a request; the others are never read.
    for b, row in enumerate(used):
        cu_rows = torch.tensor([row, row + 1], dtype=torch.int32)
        case = (rows, *caches, table[b : b + 1].to(on), cu_rows.to(on), lens[:1].to(on))
        out, lse = backend.ops.verify_attention(*case, max_rows=1)
        small = (
            rows[row : row + 1].cpu(),
            *(t[used].cpu() for t in caches),
            torch.tensor([[3, 2, 1, 0]], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            lens[:1],
        )
        wanted = run(backend, tuple(t.to(on) for t in small))
        assert_same(out[row : row + 1].cpu(), wanted[0], "out")
        assert_same(lse[row : row + 1].cpu(), wanted[1], "lse")
        assert torch.isneginf(lse[:row].cpu()).all() and (out[row + 1 :] == 0).all()


def test_empty(backend):
    q, k_cache, v_cache, table, cu_rows, seq_lens = make([2], [20])
    none = torch.zeros(1, dtype=torch.int32)
    out, lse = run(backend, (q, k_cache, v_cache, table[:0], none, seq_lens[:0]), max_rows=0)
    assert (out == 0).all() and torch.isneginf(lse).all()
    out, lse = run(backend, (q[:0], k_cache, v_cache, table, none.repeat(2), seq_lens), max_rows=0)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    out, lse = run(backend, (q, k_cache[:0], v_cache[:0], table, cu_rows, seq_lens))
    assert (out == 0).all() and torch.isneginf(lse).all()
    out, lse = run(backend, (q, k_cache, v_cache, table[:, :0], cu_rows, seq_lens))
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_errors_name_op_argument_wanted_got(backend):
    case = [t.to(backend.device) for t in make([2, 1], [20, 9], heads=4, kv_heads=2)]
    q, k, v, table, cu_rows, seq_lens = range(6)

    def wrong(index, value, message, **options):
        changed = list(case)
        if index is not None:
            changed[index] = value(case[index])
        with pytest.raises(RuntimeError, match="specdec::verify_attention: " + message):
            backend.ops.verify_attention(*changed, **{"max_rows": 2, **options})

    wrong(q, lambda t: t[0], r"q: wanted shape \[R, Hq, D\], got \[4, 64\]")
    wrong(q, lambda t: t.double(), "q: wanted dtype float32 or float16 or bfloat16, got float64")
    wrong(q, lambda t: t[:, :3], "q: wanted Hq a multiple of Hkv of k_cache, got 3 and 2")
    wrong(q, lambda t: t.half(), "k_cache: wanted dtype float16 or float8_e4m3fn, got float32")
    wrong(
        q,
        lambda t: t.mT.contiguous().mT,
        r"q: wanted stride 1 in the last dimension, got strides \[256, 1, 4\]",
    )
    wrong(k, lambda t: t[0], r"k_cache: wanted shape \[num_pages, page_size, Hkv, D\]")
    wrong(k, lambda t: t[..., :32], r"k_cache: wanted size 64 \(D of q\) in dimension 3")
    wrong(v, lambda t: t[1:], "v_cache: wanted size . .num_pages of k_cache.")
    wrong(v, lambda t: t[:, 1:], r"v_cache: wanted size 16 \(page_size of k_cache\)")
    wrong(v, lambda t: t[:, :, 1:], r"v_cache: wanted size 2 \(Hkv of k_cache\)")
    wrong(v, lambda t: t[..., :40], "v_cache: wanted .*head_dim.*, got 40")
    wrong(v, lambda t: t[..., :50], "v_cache: wanted .*head_dim.*, got 50")
    wrong(table, lambda t: t.long(), "block_table: wanted dtype int32, got int64")
    wrong(table, lambda t: t[:1], r"block_table: wanted size 2 \(B of seq_lens\)")
    wrong(cu_rows, lambda t: t[:2], r"cu_rows: wanted size 3 \(B of seq_lens, plus 1\)")
    wrong(cu_rows, lambda t: t.long(), "cu_rows: wanted dtype int32, got int64")
    wrong(seq_lens, lambda t: t.float(), "seq_lens: wanted dtype int32, got float32")
    wrong(seq_lens, lambda t: t[:, None], r"seq_lens: wanted shape \[B\]")
    wrong(None, None, "max_rows: wanted a number from 0 to 2.31 - 1, got -1", max_rows=-1)
    for absurd in (2**31, 2**40, 2**62, 2**63 - 1):
        wrong(None, None, f"max_rows: wanted a number .*, got {absurd}", max_rows=absurd)
    wrong(None, None, 'mask: wanted "causal", "full" or "tree", got "none"', mask="none")
    words = torch.zeros(3, 1, dtype=torch.int32, device=backend.device)
    wrong(None, None, 'tree_mask: wanted a tensor with mask "tree", got None', mask="tree")
    wrong(None, None, 'tree_mask: wanted None unless mask is "tree", got a tensor', tree_mask=words)
    for changed, message in (
        (words.long(), "dtype int32, got int64"),
        (words[0], r"shape \[R, W\], got \[1\]"),
        (words[1:], r"size 3 \(R of q\) in dimension 0"),
        (words[:, :0], r"at least 1 \(ceil\(max_rows / 32\)\) in dimension 1"),
    ):
        wrong(None, None, "tree_mask: wanted " + message, mask="tree", tree_mask=changed)
    message = r"tree_mask: wanted at least 2 \(ceil\(max_rows / 32\)\) in dimension 1"
    wrong(None, None, message, mask="tree", tree_mask=words, max_rows=33)
    wrong(None, None, "positions: wanted dtype int32 or int64", positions=torch.zeros(3))
    wrong(None, None, r"positions: wanted size 3 \(R of q\)", positions=words[1:, 0])
    for window in (0, -2):
        wrong(None, None, f"window: wanted -1 or .* above 0, got {window}", window=window)
    message = 'positions: wanted a tensor with mask "tree" and a window, got None'
    wrong(None, None, message, mask="tree", tree_mask=words, window=4)
    wrong(None, None, "scale: wanted a number that is finite in float32, got inf", scale=INF)
    wrong(None, None, r"scale: wanted .* finite in float32, got 1e\+39", scale=1e39)
    wrong(None, None, r"scale: wanted .* finite in float32, got nan", scale=float("nan"))
    big = torch.zeros(1, 257, 2, 64, device=backend.device)
    with pytest.raises(RuntimeError, match="k_cache: wanted a page_size of 1 .. 256, got 257"):
        backend.ops.verify_attention(case[0], big, big, *case[3:], max_rows=2)


@pytest.mark.parametrize("head_dim", [8, 40, 56, 72, 272, 512])
def test_unsupported_head_dims_are_named(backend, head_dim):
    q = torch.zeros(1, 1, head_dim, device=backend.device)
    cache = torch.zeros(1, 16, 1, head_dim, device=backend.device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=backend.device)
    cu_rows = torch.tensor([0, 1], dtype=torch.int32, device=backend.device)
    with pytest.raises(RuntimeError, match=f"k_cache: wanted .*head_dim.*, got {head_dim}"):
        backend.ops.verify_attention(q, cache, cache, table, cu_rows, cu_rows[1:], max_rows=1)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_past_max_rows_are_not_computed(backend, mask, dtype):
    rows = [5, 0, 3, 1]
    case = make(rows, [600, 0, 20, 9], dtype=dtype, spare_rows=1)
    whole = run(backend, case, mask=mask, max_rows=5)
    places = [place for n in rows for place in range(n)] + [10**9]  # row's number in its request
    for max_rows in range(5):
        out, lse = run(backend, case, mask=mask, max_rows=max_rows)
        computed = torch.tensor([place < max_rows for place in places])
        assert_same(out[computed], whole[0][computed], f"max_rows {max_rows}")
        assert_same(lse[computed], whole[1][computed], f"max_rows {max_rows}")
        assert (out[~computed] == 0).all() and (lse[~computed] == -INF).all()


def test_inputs_stay_as_they_are(backend):
    case = make([3, 2], [70, 20], dtype=torch.float16, spare_rows=1)
    copies = [t.clone() for t in case]
    run(backend, case)
    for t, copy in zip(case, copies, strict=True):
        assert_same(t, copy)


def test_wrapper_and_defaults():
    case = make([3], [70])
    wanted = torch.ops.specdec.verify_attention(*case, max_rows=3, scale=64**-0.5, mask="causal")
    got = specdec_ext.verify_attention(*case, max_rows=3)
    assert_same(got[0], wanted[0])
    assert_same(got[1], wanted[1])


def test_opcheck_and_compile():
    case = make([3, 0, 2], [70, 0, 20], spare_rows=1, head_dim=64, v_dim=128)
    # NaN in unused places would fail opcheck's own comparison of inputs.
    case = tuple(t.nan_to_num(0) if t.is_floating_point() else t for t in case)
    op = torch.ops.specdec.verify_attention.default
    torch.library.opcheck(op, case, {"max_rows": 3})
    torch.library.opcheck(op, case, {"max_rows": 3, "scale": 0.5, "mask": "full"})

    def step(q, k_cache, v_cache, table, cu_rows, seq_lens):
        out, lse = torch.ops.specdec.verify_attention(
            q * 2, k_cache, v_cache, table, cu_rows, seq_lens, max_rows=3
        )
        return out.flatten(1) + 1, lse

    wanted = step(*case)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        got = compiled(*case)
        assert_same(got[0], wanted[0])
        assert_same(got[1], wanted[1])


@st.composite
def cases(draw):
    """Ragged batches with contexts around the ends of pages, tiles and segments."""
    page_size = draw(st.sampled_from([1, 2, 5, 16, 33, 64, 256]))
    edges = st.sampled_from([0, 1, 2, 15, 16, 63, 64, 65, 127, 128, 191, 511, 512, 513, 577, 1024])
    rows, lens = [], []
    for _ in range(draw(st.integers(1, 4))):
        rows.append(draw(st.integers(0, 9)))
        lens.append(draw(st.one_of(st.integers(0, 140), edges)))
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 9))
    dims = st.sampled_from([16, 32, 64, 80, 128])
    return {
        "rows": rows,
        "seq_lens": lens,
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": draw(dims),
        "v_dim": draw(dims),
        "page_size": page_size,
        "dtype": draw(st.sampled_from(DTYPES)),
        "spare_rows": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**32)),
    }


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    options=cases(),
    mask=st.sampled_from(["causal", "full"]),
    layout=st.sampled_from(["NHD", "HND", "padded", "odd"]),
    hidden=st.lists(st.integers(0, 10**6), max_size=3),
)
def test_fuzz_cpu(options, mask, layout, hidden):
    q, k_cache, v_cache, table, cu_rows, seq_lens = make(**options)
    for i in hidden:  # some pages of some requests do not exist
        table.view(-1)[i % table.numel()] = -1
    case = (q, relayout(k_cache, layout), relayout(v_cache, layout), table, cu_rows, seq_lens)
    check(backends.get("cpu"), case, mask=mask)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    options=cases(),
    mask=st.sampled_from(["causal", "full"]),
    dims=st.sampled_from(CUDA_HEAD_DIMS),
)
def test_fuzz_small(backend_name, options, mask, dims):
    options = {**options, "head_dim": dims[0], "v_dim": dims[1]}
    options["seq_lens"] = [n % 150 for n in options["seq_lens"]]
    options["rows"] = [n % 4 for n in options["rows"]]
    options["heads"] = options["heads"] // options["kv_heads"] % 5 + 1
    options["kv_heads"] = 1
    check(backends.get(backend_name), make(**options), mask=mask)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
