"""inject_kv: float32 against the float64 oracle, everything else bit for bit from float32, on every backend."""

import backends
import pytest
import torch
from compare import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import append_kv as append_oracle
from oracles import inject_kv as oracle
from test_compact_kv import laid_out

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FP8 = torch.float8_e4m3fn
LAYOUTS = ["NHD", "HND", "padded"]


def run(backend, case, layout="NHD", to_device=True):
    """The op on copies, those of V in another layout than those of K; returns (k_caches, v_caches)."""
    on = backend.device
    case = dict(case)
    other = LAYOUTS[LAYOUTS.index(layout) - 1]
    lists = {
        name: [laid_out(c, how, on) for c in case.pop(name)] if to_device else case.pop(name)
        for name, how in (("k_caches", layout), ("v_caches", other))
    }
    case = {k: v.to(on) if torch.is_tensor(v) else v for k, v in case.items()}
    arguments = [lists.get(name, case.pop(name, None)) for name in oracle.NAMES]
    assert backend.ops.inject_kv(*arguments, **case) is None
    return tuple([c.cpu() for c in lists[name]] for name in ("k_caches", "v_caches"))


def as_float32(case):
    """The same call with all in float32."""
    lists = {name: [c.float() for c in case[name]] for name in ("k_caches", "v_caches")}
    plain = {k: v for k, v in case.items() if k not in ("k_scale", "v_scale")}
    return plain | {"kv": case["kv"].float()} | lists


def rounded(case, exact):
    """Caches of the case's dtype, from those of a call in float32: append_kv of what was written."""
    out = []
    for name, caches, scale in zip(
        ("k_caches", "v_caches"), exact, ("k_scale", "v_scale"), strict=True
    ):
        mine = []
        for layer, (old, new) in enumerate(zip(case[name], caches, strict=True)):
            places, page_size = old.shape[0] * old.shape[1], old.shape[1]
            rows = oracle.written_rows(
                case["positions"], case["slots"], len(case["cos"]), places,
                case.get("cu_rows"), case.get("commit_rows"),
            )  # fmt: skip
            slots = case["slots"][rows].long()
            values = new[slots // page_size, slots % page_size]
            if old.dtype != FP8:
                values = values.to(old.dtype)
            heads = [oracle.scale_of(case.get(scale), layer, h) for h in range(old.shape[2])]
            mine.append(
                append_oracle.append_kv(
                    values, values[..., :0], old, old[..., :0], slots, torch.tensor(heads)
                )[0]
            )
        out.append(mine)
    return tuple(out)


def check(backend, case, layout="NHD"):
    """float32 by the oracle, the case's own dtype by that; CPU and CUDA have the same bits."""
    plain = as_float32(case)
    exact = run(backend, plain)
    wanted = oracle.inject_kv(**plain)
    for name, mine, theirs in zip("kv", exact, wanted, strict=True):
        for layer, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_close(a, b, what=f"{name} of layer {layer}")
    got = run(backend, case, layout)
    for name, mine, theirs in zip("kv", got, rounded(case, exact), strict=True):
        for layer, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{name} of layer {layer}")
    return got


def assert_cpu_has_these_bits(case, got):
    for mine, theirs in zip(got, run(backends.get("cpu"), case), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b, "CPU against this backend")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "head_dim, rotary_dim", [(64, 64), (128, 64), (256, 256), (80, 20), (7, 6)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_matches_oracle(backend, dtype, head_dim, rotary_dim, interleaved):
    g = torch.Generator().manual_seed(head_dim)
    case = oracle.random_case(
        g, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, layers=2, rows=5
    )
    case["interleaved"] = interleaved
    got = check(backend, case, LAYOUTS[head_dim % 3])
    assert_cpu_has_these_bits(case, got)


@pytest.mark.parametrize("layers, heads", [(1, 1), (1, 5), (9, 1), (41, 1), (2, 33)])
def test_layers_and_heads(backend, layers, heads):
    """More layers than a block takes, and more than a launch takes; several heads per warp."""
    if backend.name in ("emu_hooks", "emu_asan") and layers > 9:
        pytest.skip(
            "the table is the same in the plain build; copying it per thread takes long here"
        )
    g = torch.Generator().manual_seed(layers)
    case = oracle.random_case(g, rows=4, layers=layers, heads=heads, head_dim=8)
    check(backend, case, "HND")


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pages_and_index_types(backend, page_size, index):
    g = torch.Generator().manual_seed(page_size)
    case = oracle.random_case(g, pages=48 // page_size, page_size=page_size, head_dim=8)
    wanted = run(backend, case)
    for name in ("positions", "slots"):
        wide = torch.full((7, 3), 2, dtype=index)
        wide[:, 1] = case[name]
        case[name] = wide[:, 1]
    got = check(backend, case)
    for mine, theirs in zip(got, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["none", "[1]", "[L]", "[L, Hkv]", "[1] and [L, Hkv]"])
def test_fp8_caches(backend, dtype, shape):
    g = torch.Generator().manual_seed(4)
    case = oracle.random_case(g, dtype=dtype, cache_dtype=FP8, head_dim=32)
    case["kv"][0, 0, :, 0, :4] = torch.tensor([float("nan"), 0.0, -1.0, 2.0]).to(dtype)
    case["kv"][3, 1, 1, 2, :4] = torch.tensor([float("inf"), -6e4, 448.0, 464.0]).to(dtype)
    scales = 0.01 + 3 * torch.rand(2, 3, 3, generator=g)
    sizes = {"[1]": (1,), "[L]": (3,), "[L, Hkv]": (3, 3)}
    if shape != "none":
        for name, scale, kind in zip(
            ("k_scale", "v_scale"), scales, shape.split(" and ") * 2, strict=False
        ):
            size = sizes[kind]
            case[name] = (scale if len(size) == 2 else scale.flatten()[: size[0]]).contiguous()
    check(backend, case, "HND")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_norm_weights(backend, dtype):
    case = oracle.random_case(torch.Generator().manual_seed(6), dtype=dtype, head_dim=24)
    case["k_norm_weight"] = None
    got = check(backend, case)
    assert_cpu_has_these_bits(case, got)


@pytest.mark.parametrize(
    "weights, tables", [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)]
)
def test_weights_and_tables_of_other_dtypes(backend, weights, tables):
    g = torch.Generator().manual_seed(7)
    case = oracle.random_case(g, dtype=torch.bfloat16, head_dim=16)
    case["k_norm_weight"] = case["k_norm_weight"].to(weights)
    case["cos"] = case["cos"].to(tables)
    wide = torch.zeros(50, 11)
    wide[:, 3:] = case["sin"]
    case["sin"] = wide[:, 3:]
    got = check(backend, case)
    assert_cpu_has_these_bits(case, got)


def test_no_channel_is_turned(backend):
    """Tables without columns still say which positions there are."""
    case = oracle.random_case(torch.Generator().manual_seed(8), rotary_dim=0, head_dim=16)
    check(backend, case)


@pytest.mark.parametrize(
    "commit",
    [None, [0, 0, 0, 0], [2, 9, 9, 1], [-1, -(2**31), 2**31 - 1, 3], [7, 1, 1, 4]],
)
def test_commit_rows(backend, commit):
    """Requests of 3, 0, 1 and 4 rows and two rows of none: too many, none, negative counts."""
    g = torch.Generator().manual_seed(9)
    case = oracle.random_case(g, rows=10, head_dim=8)
    case["slots"], case["positions"] = torch.randperm(24, generator=g)[:10], torch.arange(10)
    case["cu_rows"] = torch.tensor([0, 3, 3, 4, 8], dtype=torch.int32)
    if commit is not None:
        case["commit_rows"] = torch.tensor(commit, dtype=torch.int32)
    check(backend, case)


@pytest.mark.parametrize("batch", [1, 255, 256, 300, 600])
def test_many_requests(backend, batch):
    """Around the number of threads that look for a row's request."""
    g = torch.Generator().manual_seed(10)
    sizes = (torch.arange(batch) % 97 == 3).int()
    sizes[-1] += 2
    cu_rows = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    case = oracle.random_case(g, rows=int(cu_rows[-1]) + 1, layers=1, heads=1, head_dim=4)
    commit = torch.arange(batch, dtype=torch.int32) % 3
    commit[-1] = 1
    check(backend, case | {"cu_rows": cu_rows, "commit_rows": commit})


def test_offsets_are_clamped(backend):
    g = torch.Generator().manual_seed(11)
    case = oracle.random_case(g, rows=6, head_dim=4, layers=1)
    for cu in ([-5, 3, 9], [0, 2, 2**31 - 1], [7, 7, 7], [-(2**31), 0, 3], [6, 6, 7], [2, 2, 5]):
        check(backend, case | {"cu_rows": torch.tensor(cu, dtype=torch.int32)})
    decreasing = case | {"cu_rows": torch.tensor([5, 2, 4], dtype=torch.int32)}
    assert_cpu_has_these_bits(decreasing, run(backend, decreasing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_alone_and_in_any_batch(backend, dtype):
    """One row, all rows, and so many that a block takes several layers: the same bits."""
    g = torch.Generator().manual_seed(14)
    case = oracle.random_case(g, rows=40, pages=10, head_dim=16, dtype=dtype)
    together = run(backend, case)
    for r in (0, 5, 39):
        alone = case | {name: case[name][r : r + 1] for name in ("kv", "positions", "slots")}
        got, slot = run(backend, alone), int(case["slots"][r])
        for mine, theirs, before in zip(
            got, together, (case["k_caches"], case["v_caches"]), strict=True
        ):
            for a, b, old in zip(mine, theirs, before, strict=True):
                assert_same(a[slot // 4, slot % 4], b[slot // 4, slot % 4])
                a[slot // 4, slot % 4] = old[slot // 4, slot % 4]
                assert_same(a, old)


@pytest.mark.parametrize("which", ["kv", "k_caches", "v_caches", "odd stride", "turned"])
def test_tensors_that_four_channels_do_not_fit(backend, which):
    """Values off the borders of four channels; strides in any order; caches interleaved page by page."""
    g = torch.Generator().manual_seed(15)
    case = oracle.random_case(g, head_dim=16, dtype=torch.bfloat16)
    wanted = run(backend, case)
    on = backend.device
    ours = {name: [c.clone().to(on) for c in case[name]] for name in ("k_caches", "v_caches")}
    kv = case["kv"].to(on)
    if which == "kv":
        flat = kv.reshape(-1)
        kv = torch.cat([flat[:1], flat])[1:].view(kv.shape)
    elif which == "odd stride":
        wide = torch.zeros(*kv.shape[:-1], 17, dtype=kv.dtype, device=on)
        wide[..., :16] = kv
        kv = wide[..., :16]
    elif which == "turned":
        kv = kv.permute(3, 2, 1, 0, 4).contiguous().permute(3, 2, 1, 0, 4)
        both = torch.stack([torch.stack(caches) for caches in ours.values()])  # [2, L, pages, ..]
        both = both.permute(2, 1, 0, 3, 4, 5).contiguous()
        for side, name in enumerate(ours):
            ours[name] = [both[:, layer, side] for layer in range(3)]
    else:
        flat = ours[which][1].reshape(-1)
        ours[which][1] = torch.cat([flat[:1], flat])[1:].view(ours[which][1].shape)
    got = run(backend, case | ours | {"kv": kv}, to_device=False)
    for mine, theirs in zip(got, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b)


def test_caches_of_different_sizes(backend):
    """Each layer has pages, page size and strides of its own; a slot may be outside one of them alone."""
    g = torch.Generator().manual_seed(16)
    case = oracle.random_case(g, head_dim=8)
    for layer, shape in enumerate([(6, 4), (3, 4), (5, 1)]):
        for name in ("k_caches", "v_caches"):
            case[name][layer] = torch.randn(*shape, 3, 8, generator=g)
    check(backend, case, "padded")


@pytest.mark.parametrize(
    "rows, layers, heads, places", [(0, 2, 2, 4), (3, 0, 2, 4), (3, 2, 0, 4), (3, 2, 2, 0)]
)
def test_empty_things(backend, rows, layers, heads, places):
    g = torch.Generator().manual_seed(17)
    case = oracle.random_case(g, rows=rows, layers=layers, heads=heads, head_dim=4, pages=places)
    case["slots"] = torch.arange(rows)
    check(backend, case | {"cu_rows": torch.tensor([0, rows], dtype=torch.int32)})
    check(backend, case | {"cu_rows": torch.zeros(1, dtype=torch.int32)})
    case["cos"], case["sin"] = torch.ones(0, 2), torch.ones(0, 2)
    check(backend, case)


def test_rows_of_nan_and_zeros(backend):
    """A head of NaN is NaN, one of zeros stays zero (also with eps = 0: 0 / 0), neighbours know nothing."""
    g = torch.Generator().manual_seed(18)
    case = oracle.random_case(g, rows=3, layers=1, head_dim=8)
    wanted = run(backend, case)
    case["kv"][0, 0, 0, 0] = float("nan")
    case["kv"][0, 0, 0, 1] = 0.0
    got = check(backend, case)
    slot = int(case["slots"][0])
    head = got[0][0][slot // 4, slot % 4]
    assert head[0].isnan().all() and (head[1] == 0).all()
    assert_same(head[2], wanted[0][0][slot // 4, slot % 4, 2])
    assert_same(got[1][0][slot // 4, slot % 4, 2], wanted[1][0][slot // 4, slot % 4, 2])
    got = run(backend, case | {"eps": 0.0})[0][0][slot // 4, slot % 4]
    assert got[:2].isnan().all() and got[2].isfinite().all()


def test_errors_name_op_argument_wanted_got(backend):
    on = backend.device
    case = oracle.random_case(torch.Generator().manual_seed(19), head_dim=8)
    case = {
        k: [c.to(on) for c in v] if isinstance(v, list) else v.to(on) if torch.is_tensor(v) else v
        for k, v in case.items()
    }
    before = [c.clone() for c in case["k_caches"] + case["v_caches"]]
    kv, k, v = case["kv"], case["k_caches"], case["v_caches"]
    cu, commit = torch.tensor([0, 7], dtype=torch.int32, device=on), torch.ones(1, device=on).int()
    fp8 = {name: [c.to(FP8) for c in case[name]] for name in ("k_caches", "v_caches")}
    one = torch.ones(1, device=on)
    bad = [
        ({"kv": kv[0]}, r"inject_kv: kv: wanted shape \[R, L, 2, Hkv, D\], got \[3, 2, 3, 8\]"),
        ({"kv": kv[:, :, :1]}, r"kv: wanted size 2 \(K and V\) in dimension 2"),
        ({"kv": kv.double()}, r"kv: wanted dtype .*, got float64"),
        ({"kv": kv.transpose(3, 4)}, r"kv: wanted stride 1 in the last dimension"),
        ({"kv": kv.repeat(1, 1, 1, 1, 129)}, r"kv: wanted a head_dim of at most 1024, got 1032"),
        ({"k_norm_weight": case["k_norm_weight"][1:]}, r"k_norm_weight: wanted size 3 \(L of kv\)"),
        ({"k_norm_weight": case["k_norm_weight"][:, 1:]}, r"k_norm_weight: wanted size 8 \(D of kv\)"),
        ({"k_norm_weight": case["k_norm_weight"].long()}, r"k_norm_weight: wanted dtype .*, got int64"),
        ({"cos": case["cos"].repeat(1, 2)}, r"cos: wanted at most head_dim / 2 columns, got 8"),
        ({"cos": case["cos"][0]}, r"cos: wanted shape \[max_position, rotary_dim / 2\]"),
        ({"sin": case["sin"][1:]}, r"sin: wanted size 50 \(max_position of cos\)"),
        ({"sin": case["sin"][:, 1:]}, r"sin: wanted size 4 \(rotary_dim / 2 of cos\)"),
        ({"positions": case["positions"].float()}, r"positions: wanted dtype int32 or int64, got float32"),
        ({"positions": case["positions"][1:]}, r"positions: wanted size 7 \(R of kv\)"),
        ({"slots": case["slots"][1:]}, r"slots: wanted size 7 \(R of kv\)"),
        ({"slots": case["slots"].short()}, r"slots: wanted .*, got int16"),
        ({"k_caches": k[1:]}, r"k_caches: wanted L caches, got 2"),
        ({"v_caches": v + v}, r"v_caches: wanted L caches, got 6"),
        ({"k_caches": [*k[:2], k[2].half()]}, r"k_caches\[2\]: wanted dtype float32 or float8_e4m3fn, got float16"),
        ({"k_caches": [*k[:2], k[2].to(FP8)]}, r"k_caches\[2\]: wanted dtype float32, got float8_e4m3fn"),
        ({"v_caches": [*v[:2], v[2].to(FP8)]}, r"v_caches\[2\]: wanted dtype float32, got float8_e4m3fn"),
        ({"v_caches": [v[0][:, 1:], *v[1:]]}, r"v_caches\[0\]: wanted size 4 \(page_size of k_caches\[0\]\)"),
        ({"v_caches": [v[0][1:], *v[1:]]}, r"v_caches\[0\]: wanted size 6 \(num_pages of k_caches\[0\]\)"),
        ({"v_caches": [v[0], v[1][:, :, 1:], v[2]]}, r"v_caches\[1\]: wanted size 3 \(Hkv of kv\)"),
        ({"k_caches": [k[0], k[1][..., 1:], k[2]]}, r"k_caches\[1\]: wanted size 8 \(head_dim of its rows\)"),
        ({"eps": -1.0}, r"eps: wanted a number >= 0, got -1"),
        ({"eps": float("nan")}, r"eps: wanted a number >= 0, got nan"),
        ({"cu_rows": cu.long()}, r"cu_rows: wanted dtype int32, got int64"),
        ({"commit_rows": commit}, r"cu_rows: wanted a tensor beside commit_rows, got None"),
        ({"cu_rows": cu, "commit_rows": commit.repeat(2)}, r"commit_rows: wanted size 1 \(B of cu_rows\)"),
        ({"cu_rows": cu, "commit_rows": commit.long()}, r"commit_rows: wanted dtype int32, got int64"),
        ({"k_scale": one}, r"k_scale: wanted None unless the cache is float8_e4m3fn"),
        (fp8 | {"k_scale": one.repeat(2)}, r"k_scale: wanted size 3 \(1, or L\)"),
        (fp8 | {"v_scale": one.repeat(3, 2)}, r"v_scale: wanted size 3 \(Hkv of the caches\)"),
        (fp8 | {"v_scale": one.repeat(2, 3)}, r"v_scale: wanted size 3 \(L\)"),
        (fp8 | {"v_scale": one[None, None]}, r"v_scale: wanted shape \[1\], \[L\] or \[L, Hkv\]"),
        (fp8 | {"v_scale": one.double()}, r"v_scale: wanted dtype float32, got float64"),
    ]  # fmt: skip
    for changed, message in bad:
        with pytest.raises(RuntimeError, match=message):
            run(backend, case | changed, to_device=False)
    for mine, old in zip(k + v, before, strict=True):
        assert_same(mine, old)


def test_opcheck_and_compile():
    g = torch.Generator().manual_seed(20)
    case = oracle.random_case(g, head_dim=8)
    case["cu_rows"], case["commit_rows"] = torch.tensor([0, 7]).int(), torch.tensor([6]).int()
    wanted = run(backends.get("cpu"), case)
    options = {k: v for k, v in case.items() if k not in oracle.NAMES}
    torch.library.opcheck(
        torch.ops.specdec.inject_kv.default,
        [
            [c.clone() for c in case[name]] if name.endswith("caches") else case[name]
            for name in oracle.NAMES
        ],
        options,
    )
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(kv, weight, cos, sin, positions, slots, k, v, cu_rows, commit_rows):
            torch.ops.specdec.inject_kv(
                kv, weight, cos, sin, positions, slots, k, v, eps=1e-6, cu_rows=cu_rows,
                commit_rows=commit_rows,
            )  # fmt: skip
            return k[0].sum()

        k, v = ([c.clone() for c in case[name]] for name in ("k_caches", "v_caches"))
        arguments = [case[name] for name in oracle.NAMES[:6]]
        got = step(*arguments, k, v, case["cu_rows"], case["commit_rows"])
        assert_same(got, wanted[0][0].sum())
        for mine, theirs in zip(k + v, wanted[0] + wanted[1], strict=True):
            assert_same(mine, theirs)


# --- Fuzz -----------------------------------------------------------------------------------------
EXAMPLES = {"cpu": 60, "emu": 25, "emu_hooks": 8, "emu_asan": 8, "cuda": 60}


@pytest.mark.parametrize("backend_name", backends.available())
def test_random_calls(backend_name):
    """Any shape, dtype, layout, slots, positions and counts."""
    index = st.sampled_from([-(2**31), -1, 0, 1, 5, 7, 8, 11, 12, 13, 2**31 - 1])

    @settings(max_examples=EXAMPLES[backend_name], deadline=None, database=None, derandomize=True)
    @given(st.data())
    def fuzz(data):
        draw = data.draw
        rows, batch = draw(st.integers(0, 6)), draw(st.integers(0, 4))
        head_dim = draw(st.sampled_from([1, 2, 8, 12, 33, 64, 96]))
        g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        case = oracle.random_case(
            g, rows=rows, layers=draw(st.integers(1, 3)), heads=draw(st.integers(1, 5)),
            head_dim=head_dim, rotary_dim=2 * draw(st.integers(0, head_dim // 2)),
            pages=8, page_size=draw(st.integers(1, 4)), dtype=draw(st.sampled_from(DTYPES)),
            cache_dtype=draw(st.sampled_from([None, FP8])), max_position=12,
        )  # fmt: skip
        case["interleaved"] = draw(st.booleans())
        for name in ("positions", "slots"):
            for r in range(rows):
                value = draw(index) if draw(st.integers(0, 4)) == 0 else int(case[name][r])
                others = [s for i, s in enumerate(case["slots"].tolist()) if i != r]
                if name == "positions" or value not in others:
                    case[name][r] = value
        if draw(st.booleans()):
            offsets = [draw(st.integers(-2, 8)) for _ in range(batch + 1)]
            case["cu_rows"] = torch.tensor(sorted(offsets), dtype=torch.int32)
            if draw(st.booleans()):
                case["commit_rows"] = torch.tensor(
                    [draw(st.integers(-2, 5)) for _ in range(batch)], dtype=torch.int32
                )
        got = check(backends.get(backend_name), case, draw(st.sampled_from(LAYOUTS)))
        assert_cpu_has_these_bits(case, got)

    fuzz()
