"""verify_attention over float8 e4m3 caches: the float64 oracle of what is stored times its scale, exact
conversion, the same promises about bits."""

import backends
import pytest
import torch
from compare import assert_close, assert_quantised, assert_same
from oracles import verify_attention as oracle
from test_verify_attention import CUDA_HEAD_DIMS, DTYPES, INF, NAN, check, make, relayout, run

import specdec_ext

E4M3 = torch.float8_e4m3fn
SCALES = {"k_scale": torch.tensor([2.0, 0.3]), "v_scale": torch.tensor([4.0, 0.17])}
ONE_EACH = {name: scale[:1] for name, scale in SCALES.items()}


def make_fp8(rows, seq_lens, scales=None, **options):
    """A case whose values are those of any other one, stored over the scales it will be called with."""
    q, k_cache, v_cache, *lists = make(rows, seq_lens, **options)
    scales = scales or {}
    stored = [
        oracle.unscaled(cache, None if scale is None else 1 / scale).to(E4M3)
        for cache, scale in ((k_cache, scales.get("k_scale")), (v_cache, scales.get("v_scale")))
    ]
    return (q, *stored, *lists)


def codes(*shape):
    """All codes of the format again and again."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.int32) % 256).to(torch.uint8).view(E4M3).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [{}, ONE_EACH, SCALES], ids=["none", "tensor", "head"])
@pytest.mark.parametrize("mask", ["causal", "full", "tree"])
def test_matches_oracle(backend, dtype, scales, mask):
    """Everything that no row sees is NaN. One request is cut into segments, one has no rows."""
    rows, lens = [1, 3, 0, 5, 2], [63, 64, 9, 129, 530]
    case = make_fp8(rows, lens, scales, heads=6, dtype=dtype, page_size=9, spare_rows=2)
    case[3][3, 1], case[3][3, 3] = -1, case[1].shape[0]
    options = {"mask": mask}
    if mask == "tree":
        g = torch.Generator().manual_seed(1)
        words, positions = oracle.random_trees(g, [*rows, 2], [*lens, 2])
        options.update(tree_mask=words, positions=positions, window=60, softcap=0.9)
        options.update(sinks=torch.linspace(-1, 1, 6))
    check(backend, case, **options, **scales)


@pytest.mark.parametrize("head_dim, v_dim", CUDA_HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 7, 15], ids=["16 rows", "32 rows", "more rows"])
def test_head_dims(backend, rows, head_dim, v_dim):
    dtype = DTYPES[rows % 3]
    dims = {"head_dim": head_dim, "v_dim": v_dim}
    case = make_fp8([rows, 1], [100, 20], SCALES, heads=6, dtype=dtype, **dims)
    check(backend, case, **SCALES)


@pytest.mark.parametrize(
    "kind", [dict.fromkeys(SCALES), ONE_EACH, SCALES], ids=["none", "one", "head"]
)
@pytest.mark.parametrize("k_too, v_too", [(True, False), (False, True)])
def test_each_side_has_its_own_scale(backend, kind, k_too, v_too):
    scales = {"k_scale": kind["k_scale"] if k_too else None}
    scales["v_scale"] = kind["v_scale"] if v_too else None
    case = make_fp8([2, 1], [30, 9], scales, dtype=torch.bfloat16)
    check(backend, case, **scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4], ids=["few rows", "many rows"])
def test_many_requests(backend, dtype, rows):
    """So many that one thread of the CPU takes both heads of a request at once."""
    case = make_fp8([rows] * 40, [9] * 40, SCALES, heads=4, dtype=dtype)
    check(backend, case, **SCALES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5], ids=["few rows", "many rows"])
def test_every_code_of_v_is_exact(backend, dtype, rows):
    """A row that sees one place gets its V: subnormal codes, both zeros, both NaN, times the scale."""
    q, k_cache, v_cache, table, cu_rows, seq_lens = make_fp8(
        [1] * rows, [1] * rows, heads=4, head_dim=128, page_size=1, dtype=dtype
    )
    v_cache.view(torch.uint8)[:] = codes(*v_cache.shape).view(torch.uint8)
    scale = torch.tensor([1.0, -8.0])
    out, _ = run(backend, (q, k_cache, v_cache, table, cu_rows, seq_lens), v_scale=scale)
    stored = v_cache[table[:, 0].long(), 0].double() * scale.double()[:, None]
    wanted = (stored.repeat_interleave(2, 1) + 0.0).to(dtype)  # a result has no -0
    nan = torch.isnan(wanted)
    assert nan.any() and (torch.isnan(out) == nan).all()
    assert_same(out.nan_to_num(0), wanted.nan_to_num(0) + 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_k_is_exact(backend, dtype):
    """Queries that pick one channel: lse is its K. NaN codes give NaN to the heads that meet them."""
    dim = 128
    q = torch.eye(dim, dtype=dtype).repeat(2, 1)[None]  # [1, 2 * dim heads, dim]
    k_cache = codes(1, 1, 2, dim)
    case = (q, k_cache, torch.zeros(1, 1, 2, dim).to(E4M3))
    lists = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, 1], [1])]
    bytes_of_k = k_cache.view(torch.uint8)
    bytes_of_k[bytes_of_k & 0x7F == 0x7F] = 0  # one NaN in K is NaN in every product with it
    _, lse = run(backend, (*case, *lists), scale=1.0)
    wanted = k_cache.double().reshape(1, -1)
    assert (lse[wanted == 0] == 0).all()
    ratio = (lse.double() / wanted)[wanted != 0].float()
    assert_close(ratio, torch.ones_like(ratio), what="lse over K")
    # NaN: of K of the second KV head.
    bytes_of_k[0, 0, 1, 127] = 0x7F
    out, lse = run(backend, (*case, *lists), scale=1.0)
    assert not torch.isnan(lse[:, :dim]).any() and not torch.isnan(out[:, :dim]).any()
    assert torch.isnan(lse[:, dim:]).all() and torch.isnan(out[:, dim:]).all()


def bits_of_plain_cache(case, dtype):
    """The same case with the values of the codes in caches of q's dtype, which hold them exactly."""
    q, k_cache, v_cache, *rest = case
    return (q, k_cache.to(dtype), v_cache.to(dtype), *rest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 192])
@pytest.mark.parametrize("rows", [[2, 1], [9, 3]], ids=["few rows", "many rows"])
def test_bits_of_a_plain_cache(backend, dtype, head_dim, rows):
    """On the CPU, and in float32 on CUDA, codes and their values give the same bits: conversion is exact and
    takes no part in the order of summation. (CUDA takes channels of 16-bit products in another order.)"""
    if backend.name != "cpu" and dtype != torch.float32:
        pytest.skip("the order of a product's channels differs")
    case = make_fp8(rows, [70, 530], heads=4, head_dim=head_dim, dtype=dtype)
    wanted = run(backend, bits_of_plain_cache(case, dtype))
    got = run(backend, case)
    assert_same(got[0], wanted[0], "out")
    assert_same(got[1], wanted[1], "lse")


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_two_are_exact(backend, dtype):
    """Scales that are powers of two give the bits of `scale` and of the result times them."""
    case = make_fp8([3, 2], [70, 530], heads=4, kv_heads=1, dtype=dtype)
    wanted = run(backend, case, scale=0.25)
    two, four = torch.tensor([2.0]), torch.tensor([4.0])
    got = run(backend, case, scale=0.125, k_scale=two, v_scale=four)
    assert_same(got[0], (wanted[0].double() * 4).to(dtype), "out")
    assert_same(got[1], wanted[1], "lse")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_a_one_row_call(backend, dtype):
    """Bitwise: alone, in any batch, on other pages, with other strides."""
    rows, lens = [4, 3], [66, 514]
    case = make_fp8(rows, lens, heads=6, dtype=dtype, page_size=16)
    out, lse = run(backend, case, **SCALES)
    q, k_cache, v_cache, table, cu_rows, seq_lens = case
    for b, begin in enumerate([0, 4]):
        for j in range(rows[b]):
            one = torch.tensor([0, 1], dtype=torch.int32)
            place = torch.tensor([lens[b] - rows[b] + j + 1], dtype=torch.int32)
            alone = (q[begin + j : begin + j + 1], k_cache, v_cache, table[b : b + 1], one, place)
            got = run(backend, alone, **SCALES)
            assert_same(got[0][0], out[begin + j], f"out of row {j} of request {b}")
            assert_same(got[1][0], lse[begin + j], f"lse of row {j} of request {b}")
    for layout in ("HND", "padded", "odd"):
        moved = (q, relayout(k_cache, layout), relayout(v_cache, layout), table, cu_rows, seq_lens)
        got = run(backend, moved, **SCALES)
        assert_same(got[0], out, layout)
        assert_same(got[1], lse, layout)


@pytest.mark.parametrize("page_size", [1, 3, 64, 256])
def test_page_sizes_change_no_bit(backend, page_size):
    q, k_cache, v_cache, table, cu_rows, seq_lens = make_fp8([3], [150], page_size=16)
    wanted = run(backend, (q, k_cache, v_cache, table, cu_rows, seq_lens), **SCALES)
    pages = -(-150 // page_size)
    places = torch.arange(150)
    caches = []
    for cache in (k_cache, v_cache):
        flat = cache[table[0, places // 16].long(), places % 16].view(torch.uint8)
        paged = torch.full((pages * page_size, *flat.shape[1:]), 0x7F, dtype=torch.uint8)
        paged[:150] = flat
        caches.append(paged.view(E4M3).unflatten(0, (pages, page_size)))
    new_table = torch.arange(pages, dtype=torch.int32)[None]
    got = run(backend, (q, *caches, new_table, cu_rows, seq_lens), **SCALES)
    assert_same(got[0], wanted[0])
    assert_same(got[1], wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_of_later_rows_stays_there(backend, dtype, code):
    """A code of NaN in K and V of the last row is seen by it alone, whole."""
    case = make_fp8([5], [70], heads=4, head_dim=80, dtype=dtype)
    before = run(backend, case, **SCALES)
    q, k_cache, v_cache, table, *rest = case
    page, place = int(table[0, 69 // 16]), 69 % 16
    for channel in (0, 1, 2, 3, 17, 79):
        k, v = k_cache.clone(), v_cache.clone()
        v.view(torch.uint8)[page, place, 1, channel] = code
        out, lse = run(backend, (q, k, v, table, *rest), **SCALES)
        assert_same(out[:4], before[0][:4], f"earlier rows, channel {channel}")
        assert_same(lse, before[1])
        wanted = torch.zeros(4, 80, dtype=torch.bool)
        wanted[2:, channel] = True
        assert (torch.isnan(out[4]) == wanted).all(), f"channel {channel}"
    k.view(torch.uint8)[page, place] = code
    out, lse = run(backend, (q, k, v_cache, table, *rest), **SCALES)
    assert_same(out[:4], before[0][:4])
    assert_same(lse[:4], before[1][:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -1.5, NAN])
def test_scales_are_data(backend, dtype, value):
    """0 and negative ones are what they say; NaN makes NaN of the rows of its head and of no other."""
    case = make_fp8([3], [70], heads=4, dtype=dtype)
    scales = {"k_scale": torch.tensor([1.5, value]), "v_scale": torch.tensor([value, 0.75])}
    if value == value:
        check(backend, case, **scales)
        return
    out, _ = run(backend, case, v_scale=scales["v_scale"])
    assert torch.isnan(out[:, :2]).all() and not torch.isnan(out[:, 2:]).any()
    plain = run(backend, case)
    out, lse = run(backend, case, k_scale=torch.tensor([1.0, value]))
    assert_same(out[:, :2], plain[0][:, :2])
    assert_same(lse[:, :2], plain[1][:, :2])


def test_reads_what_append_kv_wrote(backend):
    """One pass after the other through both ops, with the same scales."""
    g = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 20, 2, 64, generator=g) * 3
    caches = [torch.full((7, 4, 2, 64), NAN).to(E4M3).to(backend.device) for _ in range(2)]
    slots = torch.randperm(28, generator=g)[:20]
    table = torch.full((1, 20), -1, dtype=torch.int32)
    scales = {name: scale.to(backend.device) for name, scale in SCALES.items()}
    on = [t.to(backend.device) for t in (k, v, *caches, slots)]
    backend.ops.append_kv(*on, **scales)
    # Pages of one place, so that any slots make a sequence.
    single = [cache.cpu().reshape(28, 1, 2, 64) for cache in on[2:4]]
    table[0] = slots.int()
    lists = (table, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([20], dtype=torch.int32))
    q = torch.randn(2, 4, 64, generator=g)
    check(backend, (q, *single, *lists), **SCALES)
    out, _ = run(backend, (q, *single, *lists), **SCALES)
    exact, _ = oracle.verify_attention(
        q,
        k[None].transpose(0, 1),
        v[None].transpose(0, 1),
        torch.arange(20)[None],
        *lists[1:],
        max_rows=2,
    )
    assert_quantised(out, exact, steps=8)  # values of about 3


def test_flushed_subnormals_count(backend):
    """Threads that flush subnormal numbers still read subnormal codes (2^-9 to 7 * 2^-9)."""
    case = list(make_fp8([1], [1], heads=2, dtype=torch.float32))
    case[2] = (case[2].view(torch.uint8) & 0x87).view(E4M3)
    wanted = run(backend, case)
    assert (wanted[0] != 0).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush")
    try:
        got = run(backend, case)
    finally:
        torch.set_flush_denormal(False)
    assert_same(got[0], wanted[0])


def test_errors_name_op_argument_wanted_got(backend):
    case = [t.to(backend.device) for t in make_fp8([2, 1], [20, 9])]
    q, k, v, *rest = case

    def wrong(message, q=q, k=k, v=v, **options):
        options = {
            name: t.to(backend.device) if torch.is_tensor(t) else t for name, t in options.items()
        }
        with pytest.raises(RuntimeError, match="verify_attention: " + message):
            backend.ops.verify_attention(q, k, v, *rest, max_rows=2, **options)

    wrong("k_cache: wanted dtype float32 or float8_e4m3fn, got float16", k=k.half())
    wrong("v_cache: wanted dtype float8_e4m3fn, got float32", v=v.float())
    wrong("v_cache: wanted dtype float32, got float8_e4m3fn", k=k.float())
    wrong("k_cache: wanted dtype float32 or float8_e4m3fn", k=k.view(torch.float8_e5m2))
    for name in SCALES:
        scale = torch.ones(2)
        wrong(f"{name}: wanted dtype float32, got float64", **{name: scale.double()})
        wrong(rf"{name}: wanted shape \[1\] or \[Hkv\], got \[\]", **{name: scale[0]})
        wrong(f"{name}: wanted size 2 .1, or Hkv", **{name: torch.ones(3)})
        plain = {"k": k.float(), "v": v.float(), name: scale}
        wrong(f"{name}: wanted None unless the cache is float8_e4m3fn, got a tensor", **plain)


def test_wrapper_fake_and_compile():
    case = make_fp8([3], [70])
    wanted = torch.ops.specdec.verify_attention(*case, max_rows=3, **SCALES)
    got = specdec_ext.verify_attention(*case, max_rows=3, **SCALES)
    assert_same(got[0], wanted[0])

    def step(q, *rest):
        return specdec_ext.verify_attention(q * 1, *rest, max_rows=3, **SCALES)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*case)
    assert_same(compiled[0], wanted[0])
    assert_same(compiled[1], wanted[1])
    meta = [t.to("meta") for t in case]
    meta[2] = meta[2].to(torch.float32)
    with pytest.raises(RuntimeError, match="v_cache: wanted dtype float8_e4m3fn, got float32"):
        torch.ops.specdec.verify_attention(*meta, max_rows=3)
    meta[1], meta[2] = (t.to("meta").half() for t in case[1:3])
    with pytest.raises(RuntimeError, match="k_cache: wanted dtype float32 or float8_e4m3fn, got"):
        torch.ops.specdec.verify_attention(*meta, max_rows=3)


def test_empty_rows_have_no_scale(backend):
    """0 and -inf whatever the scales are."""
    case = make_fp8([2, 1], [0, 0], dtype=torch.bfloat16)
    out, lse = run(backend, case, v_scale=torch.tensor([NAN]), k_scale=torch.tensor([INF]))
    assert (out == 0).all() and (lse == -INF).all()


def test_backends_agree():
    """Emulated CUDA and CPU differ by rounding only."""
    names = [name for name in backends.available() if name in ("cpu", "emu")]
    case = make_fp8([3, 2], [70, 530], heads=4, dtype=torch.bfloat16)
    results = [run(backends.get(name), case, **SCALES)[0] for name in names]
    for other in results[1:]:
        assert_close(other, results[0], what="out")
