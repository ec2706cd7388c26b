"""append_kv: every element against the oracle, on every backend, bit for bit."""

import pytest
import torch
from compare import assert_same
from huge_strides import huge_caches
from oracles import append_kv as oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def layouts(cache, layout):
    """The same values as a cache view of another memory layout."""
    pages, page_size, heads, head_dim = cache.shape
    if layout == "NHD":
        return cache.clone()
    if layout == "HND":
        return cache.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    padded = torch.full((pages, page_size, heads, head_dim + 8), 3.0, dtype=torch.float32)
    padded = padded.to(cache.dtype)
    view = padded[..., :head_dim]
    view.copy_(cache)
    return view


def run(backend, k, v, k_cache, v_cache, slots, **scales):
    on = backend.device
    k_cache, v_cache = k_cache.to(on), v_cache.to(on)
    scales = {name: scale.to(on) for name, scale in scales.items()}
    backend.ops.append_kv(k.to(on), v.to(on), k_cache, v_cache, slots.to(on), **scales)
    return k_cache.cpu(), v_cache.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, v_dim", [(64, 64), (128, 128), (192, 128), (5, 3), (1, 1)])
@pytest.mark.parametrize("layout", ["NHD", "HND", "padded"])
def test_matches_oracle(backend, dtype, head_dim, v_dim, layout):
    g = torch.Generator().manual_seed(head_dim)
    k, v, k_cache, v_cache, slots = oracle.random_case(
        g, rows=7, head_dim=head_dim, v_dim=v_dim, dtype=dtype
    )
    wanted = oracle.append_kv(k, v, k_cache, v_cache, slots)
    got = run(backend, k, v, layouts(k_cache, layout), layouts(v_cache, layout), slots)
    assert_same(got[0], wanted[0], "k_cache")
    assert_same(got[1], wanted[1], "v_cache")


def test_interleaved_cache_and_int32_slots(backend):
    """K and V as two views of one tensor, as engines that interleave them have it."""
    g = torch.Generator().manual_seed(2)
    k, v, k_cache, v_cache, slots = oracle.random_case(g)
    wanted = oracle.append_kv(k, v, k_cache, v_cache, slots)
    both = torch.stack([k_cache, v_cache], dim=1).to(backend.device)
    on = backend.device
    backend.ops.append_kv(k.to(on), v.to(on), both[:, 0], both[:, 1], slots.int().to(on))
    assert_same(both[:, 0].cpu(), wanted[0], "k_cache")
    assert_same(both[:, 1].cpu(), wanted[1], "v_cache")


@pytest.mark.parametrize("which", ["k", "k_cache", "v_cache"])
def test_tensors_that_begin_off_16_bytes(backend, which):
    """All strides are multiples of 16 bytes, but the first element of one tensor is not."""
    g = torch.Generator().manual_seed(4)
    k, v, k_cache, v_cache, slots = oracle.random_case(g, dtype=torch.bfloat16)
    wanted = oracle.append_kv(k, v, k_cache, v_cache, slots)
    on = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    on = {name: t.clone().to(backend.device) for name, t in on.items()}
    flat = on[which].reshape(-1)
    on[which] = torch.cat([flat[:1], flat])[1:].view(on[which].shape)
    backend.ops.append_kv(*on.values(), slots.to(backend.device))
    assert_same(on["k_cache"].cpu(), wanted[0], "k_cache")
    assert_same(on["v_cache"].cpu(), wanted[1], "v_cache")


@pytest.mark.parametrize("head_dim, width", [(64, 65), (64, 68), (60, 64)])
def test_rows_between_16_byte_borders(backend, head_dim, width):
    """Rows that begin off a 16-byte border, or begin on one and do not end on one."""
    g = torch.Generator().manual_seed(6)
    case = oracle.random_case(g, head_dim=head_dim, v_dim=head_dim, dtype=torch.bfloat16)
    wanted = oracle.append_kv(*case)

    def widened(t):
        wide = torch.full((*t.shape[:-1], width), 7.0, dtype=t.dtype, device=backend.device)
        wide[..., :head_dim] = t.to(backend.device)
        return wide[..., :head_dim]

    k, v, k_cache, v_cache = (widened(t) for t in case[:4])
    backend.ops.append_kv(k, v, k_cache, v_cache, case[4].to(backend.device))
    assert_same(k_cache.cpu(), wanted[0], "k_cache")
    assert_same(v_cache.cpu(), wanted[1], "v_cache")
    for cache in (k_cache, v_cache):  # nothing beside the rows was touched
        wide = cache.as_strided((*cache.shape[:-1], width), cache.stride())
        assert (wide[..., head_dim:] == 7).all()


def test_bad_slots_write_nothing(backend):
    g = torch.Generator().manual_seed(3)
    k, v, k_cache, v_cache, _ = oracle.random_case(g, rows=6)
    slots = torch.tensor([-1, 20, 2**40, -(2**40), 2**31, 3])
    wanted = oracle.append_kv(k, v, k_cache, v_cache, slots)
    got = run(backend, k, v, k_cache.clone(), v_cache.clone(), slots)
    assert_same(got[0], wanted[0])
    assert_same(got[1], wanted[1])
    assert (wanted[0] != k_cache).any(dim=(2, 3)).sum() == 1  # only slot 3 changed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["none", "tensor", "head"])
def test_fp8_cache(backend, dtype, scales):
    g = torch.Generator().manual_seed(4)
    k, v, k_cache, v_cache, slots = oracle.random_case(g, dtype=dtype)
    k[0, 0, :6] = torch.tensor([float("nan"), float("inf"), -1e4, 448.0, 464.0, -0.0]).to(dtype)
    k = k * 100
    k_cache, v_cache = k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn)
    given = {}
    if scales != "none":
        n = 1 if scales == "tensor" else 3
        given = {
            "k_scale": torch.tensor([0.7, 3.0, 11.0])[:n],
            "v_scale": torch.tensor([0.1, 1.0, 9.0])[:n],
        }
    wanted = oracle.append_kv(k, v, k_cache, v_cache, slots, **given)
    got = run(backend, k, v, k_cache.clone(), v_cache.clone(), slots, **given)
    assert_same(got[0], wanted[0], "k_cache")
    assert_same(got[1], wanted[1], "v_cache")


@pytest.mark.parametrize("of_k, of_v", [(1, 3), (3, 1), (3, None), (None, 3), (1, None)])
def test_k_and_v_scales_of_different_kinds(backend, of_k, of_v):
    """One scale for the tensor on one side, one per head (or none) on the other."""
    g = torch.Generator().manual_seed(9)
    k, v, k_cache, v_cache, slots = oracle.random_case(g, rows=20, pages=11)
    k_cache, v_cache = k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn)
    given = {"k_scale": torch.tensor([0.3, 5.0, 21.0]), "v_scale": torch.tensor([0.02, 1.5, 7.0])}
    given = {
        name: scale[:n]
        for (name, scale), n in zip(given.items(), (of_k, of_v), strict=True)
        if n is not None
    }
    wanted = oracle.append_kv(k, v, k_cache, v_cache, slots, **given)
    got = run(backend, k, v, k_cache.clone(), v_cache.clone(), slots, **given)
    assert_same(got[0], wanted[0], "k_cache")
    assert_same(got[1], wanted[1], "v_cache")


def test_every_fp8_rounding(backend):
    """All fp16 values, so every code, every tie and both saturations."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    k = values.reshape(64, 1, 1024)
    cache = torch.zeros(4, 16, 1, 1024, dtype=torch.float8_e4m3fn)
    slots = torch.arange(64)
    wanted = oracle.append_kv(k, k, cache, cache, slots)
    got = run(backend, k, k, cache.clone(), cache.clone(), slots)
    finite = ~torch.isnan(wanted[0].float())
    assert_same(got[0].float()[finite], wanted[0].float()[finite])
    assert torch.isnan(got[0].float()[~finite]).all()


def test_E01_slots_behind_2_to_31_elements(backend):
    """Products of slot and stride beyond int32. Untouched pages of the view cost no memory."""
    k_cache, v_cache, slots = huge_caches(backend)
    k = torch.arange(32, dtype=torch.bfloat16).reshape(4, 1, 8)
    backend.ops.append_kv(k.to(slots.device), -k.to(slots.device), k_cache, v_cache, slots)
    assert_same(k_cache[slots, 0].cpu(), k)
    assert_same(v_cache[slots, 0].cpu(), -k)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_row_counts(backend, rows):
    g = torch.Generator().manual_seed(rows)
    k, v, k_cache, v_cache, slots = oracle.random_case(g, rows=rows, pages=11)
    wanted = oracle.append_kv(k, v, k_cache, v_cache, slots)
    got = run(backend, k, v, k_cache.clone(), v_cache.clone(), slots)
    assert_same(got[0], wanted[0])
    assert_same(got[1], wanted[1])


def test_errors_name_op_argument_wanted_got(backend):
    g = torch.Generator().manual_seed(5)
    k, v, k_cache, v_cache, slots = (t.to(backend.device) for t in oracle.random_case(g))
    call = backend.ops.append_kv
    bad = [
        (
            (k[0], v, k_cache, v_cache, slots),
            r"append_kv: k: wanted shape \[R, Hkv, D\], got \[3, 64\]",
        ),
        (
            (k, v.double(), k_cache, v_cache, slots),
            r"append_kv: v: wanted dtype float32, got float64",
        ),
        ((k.to(torch.complex64), v, k_cache, v_cache, slots), r"k: wanted .*, got complex64"),
        ((k, v, k_cache, v_cache, slots.short()), r"slots: wanted .*, got int16"),
        ((k, v[:-1], k_cache, v_cache, slots), r"append_kv: v: wanted size 7 \(R of k\)"),
        (
            (k, v, k_cache.half(), v_cache, slots),
            r"k_cache: wanted dtype float32 or float8_e4m3fn, got float16",
        ),
        (
            (k, v, k_cache, v_cache[:, :-1], slots),
            r"v_cache: wanted size 4 \(page_size of k_cache\)",
        ),
        ((k, v, k_cache[:, :, :-1], v_cache, slots), r"k_cache: wanted size 3 \(Hkv of k\)"),
        (
            (k, v, k_cache, v_cache, slots.float()),
            r"slots: wanted dtype int32 or int64, got float32",
        ),
        ((k, v, k_cache, v_cache, slots[:-1]), r"slots: wanted size 7 \(R of k\)"),
        (
            (k.transpose(1, 2).contiguous().transpose(1, 2), v, k_cache, v_cache, slots),
            r"k: wanted stride 1 in the last dimension, got strides \[192, 1, 3\] of shape \[7, 3, 64\]",
        ),
    ]
    for arguments, message in bad:
        with pytest.raises(RuntimeError, match=message):
            call(*arguments)
    with pytest.raises(
        RuntimeError, match=r"k_scale: wanted None unless the cache is float8_e4m3fn"
    ):
        call(k, v, k_cache, v_cache, slots, k_scale=torch.ones(1, device=backend.device))


def test_opcheck_and_compile():
    g = torch.Generator().manual_seed(6)
    case = oracle.random_case(g)
    torch.library.opcheck(torch.ops.specdec.append_kv.default, case)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(k, v, k_cache, v_cache, slots):
        torch.ops.specdec.append_kv(k, v, k_cache, v_cache, slots)
        return k_cache.sum()

    k, v, k_cache, v_cache, slots = case
    wanted = oracle.append_kv(*case)
    total = step(k, v, k_cache, v_cache, slots)
    assert_same(k_cache, wanted[0])
    assert_same(total, wanted[0].sum())
