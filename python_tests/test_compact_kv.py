"""compact_kv: every byte of every cache against the oracle, on every backend."""

import backends
import pytest
import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import compact_kv as oracle

LAYOUTS = ["NHD", "HND", "padded"]


def random_cache(generator, shape, dtype=torch.bfloat16):
    """Random bytes, so every bit pattern (NaN too) must travel as it is."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def laid_out(cache, layout, device="cpu"):
    """The same values as a view of another memory layout."""
    if layout == "HND":
        return cache.to(device).permute(0, 2, 1, 3).clone().contiguous().permute(0, 2, 1, 3)
    if layout == "padded":
        wide = torch.zeros(*cache.shape[:-1], cache.shape[-1] + 8, dtype=cache.dtype, device=device)
        view = wide[..., : cache.shape[-1]]
        view.copy_(cache)
        return view
    return cache.clone().to(device)


def check(backend, k_caches, v_caches, slots, cu_rows, path, num_accepted, layout="NHD"):
    """The op against the oracle; returns the new caches."""
    on = backend.device
    ours = [[laid_out(c, layout, on) for c in caches] for caches in (k_caches, v_caches)]
    lists = [t.to(on) for t in (slots, cu_rows, path, num_accepted)]
    assert backend.ops.compact_kv(*ours, *lists) is None
    got = [c.cpu() for caches in ours for c in caches]
    wanted = oracle.compact_kv([*k_caches, *v_caches], slots, cu_rows, path, num_accepted)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert_same(mine, theirs, f"cache {i}")
    return got


def one_request(rows, path, num_accepted=None):
    """cu_rows, path and num_accepted of one request."""
    count = len(path) - 1 if num_accepted is None else num_accepted
    lists = [0, rows], [path], [count]
    return [torch.tensor(t, dtype=torch.int32) for t in lists]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64, torch.bool]
)
@pytest.mark.parametrize("heads, head_dim", [(2, 64), (3, 5), (1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matches_oracle(backend, dtype, heads, head_dim, layout):
    g = torch.Generator().manual_seed(head_dim)
    case = oracle.random_case(g)
    shape = (10, 4, heads, head_dim)
    caches = [random_cache(g, shape, dtype) for _ in range(4)]
    if dtype == torch.bool:
        caches = [cache.view(torch.uint8).ne(7) for cache in caches]
    got = check(backend, caches[:2], caches[2:], *case, layout=layout)
    assert any(
        (a.view(torch.uint8) != b.view(torch.uint8)).any() for a, b in zip(got, caches, strict=True)
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_paths(backend, seed, page_size):
    """Ascending paths of trees, and any other numbers in a path."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 14, (6,), generator=g).tolist()
    case = list(oracle.random_case(g, rows=rows, pages=100 // page_size + 1, page_size=page_size))
    if seed % 2:
        case[2] = torch.randint(-2, 15, case[2].shape, generator=g).int()
        case[3] = torch.randint(-3, 9, case[3].shape, generator=g).int()
        case[0][torch.rand(case[0].shape, generator=g) < 0.1] = -1
    caches = [random_cache(g, (100 // page_size + 1, page_size, 2, 8)) for _ in range(3)]
    check(backend, caches[:1], caches[1:], *case, layout=LAYOUTS[seed % 3])


def test_interleaved_caches_and_int32_slots(backend):
    """K and V of a layer as two views of one tensor."""
    g = torch.Generator().manual_seed(2)
    slots, *lists = oracle.random_case(g)
    k, v = (random_cache(g, (10, 4, 2, 16)) for _ in range(2))
    both = torch.stack([k, v], dim=1).to(backend.device)
    lists = [t.to(backend.device) for t in lists]
    backend.ops.compact_kv([both[:, 0]], [both[:, 1]], slots.int().to(backend.device), *lists)
    wanted = oracle.compact_kv([k, v], slots, *[t.cpu() for t in lists])
    assert_same(both[:, 0].cpu(), wanted[0], "k_cache")
    assert_same(both[:, 1].cpu(), wanted[1], "v_cache")


def test_caches_of_different_kinds_in_one_call(backend):
    """Other types, heads, head sizes, page sizes and numbers of pages; scale planes; hidden rows."""
    g = torch.Generator().manual_seed(3)
    case = oracle.random_case(g)
    kinds = [
        ((10, 4, 2, 64), torch.float8_e4m3fn),
        ((10, 4, 2, 1), torch.float32),  # a scale per head of each place
        ((10, 4, 1, 1), torch.float16),  # a scale per place
        ((1, 40, 1, 48), torch.bfloat16),  # hidden rows, one per slot
        ((7, 4, 3, 6), torch.bfloat16),  # fewer pages: slots outside move nothing
        ((0, 4, 3, 6), torch.bfloat16),
        ((10, 4, 2, 0), torch.float32),
    ]
    caches = [random_cache(g, shape, dtype) for shape, dtype in kinds]
    check(backend, caches, [], *case)
    check(backend, caches[:1], caches[1:], *case)
    check(backend, [], caches, *case, layout="HND")
    check(backend, [], [], *case)


@pytest.mark.parametrize("count", [79, 80, 81, 384, 385])
def test_many_caches(backend, count):
    """Around the two sizes of the table of caches, and more caches than one launch takes."""
    if backend.name in ("emu_hooks", "emu_asan") and count > 81:
        pytest.skip(
            "the table is the same in the plain build; copying it per thread takes long here"
        )
    g = torch.Generator().manual_seed(4)
    caches = [random_cache(g, (2, 4, 1, 4)) for _ in range(count)]
    lists = one_request(6, [0, 2, 5])
    check(backend, caches[: count // 2], caches[count // 2 :], torch.arange(1, 7), *lists)


@pytest.mark.parametrize("head_dim", [300, 5000])
def test_rows_longer_than_a_block_holds(backend, head_dim):
    """More units than fit the registers of a block: several rounds, in units of 16 bytes and of one."""
    g = torch.Generator().manual_seed(5)
    lists = one_request(14, [0, *range(3, 14)])
    for dtype in (torch.float32, torch.uint8):
        cache = random_cache(g, (4, 4, 1, head_dim), dtype)
        check(backend, [cache], [], torch.arange(14), *lists)
        check(backend, [cache[..., 1:]], [], torch.arange(14), *lists, layout="padded")


@pytest.mark.parametrize("length", [2047, 2048, 2049, 4500])
def test_paths_longer_than_a_block_holds(backend, length):
    """Every second row of a chain, so each step of the path reads what a later one writes over."""
    if backend.name in ("emu_hooks", "emu_asan") and length > 2049:
        pytest.skip("two steps are as many as three")
    g = torch.Generator().manual_seed(6)
    rows = 2 * length
    cache = random_cache(g, (rows, 1, 1, 2))
    check(
        backend,
        [cache],
        [],
        torch.randperm(rows, generator=g),
        *one_request(rows, range(0, rows, 2)),
    )


def test_tensors_that_begin_off_16_bytes(backend):
    g = torch.Generator().manual_seed(7)
    slots, *lists = oracle.random_case(g)
    for skip in (1, 2, 8):  # 2, 4 and 16 bytes
        cache = random_cache(g, (10, 4, 2, 16))
        flat = cache.reshape(-1).to(backend.device)
        view = torch.cat([flat[:skip], flat])[skip:].view(cache.shape)
        backend.ops.compact_kv(
            [view], [], slots.to(backend.device), *[t.to(backend.device) for t in lists]
        )
        assert_same(view.cpu(), oracle.compact_kv([cache], slots, *lists)[0])


@pytest.mark.parametrize("head_dim, width", [(64, 65), (64, 66), (60, 64), (61, 64)])
def test_rows_between_16_byte_borders(backend, head_dim, width):
    """Heads that begin off a 16-byte border, or begin on one and do not end on one."""
    g = torch.Generator().manual_seed(16)
    slots, *lists = oracle.random_case(g)
    wide = random_cache(g, (10, 4, 2, width)).to(backend.device)
    before = wide.clone()
    inner = [t.to(backend.device) for t in (slots, *lists)]
    backend.ops.compact_kv([wide[..., :head_dim]], [], *inner)
    wanted = oracle.compact_kv([before[..., :head_dim].cpu()], slots, *lists)[0]
    assert_same(wide[..., :head_dim].cpu(), wanted)
    assert_same(wide[..., head_dim:], before[..., head_dim:])


def test_bytes_beside_the_rows_stay(backend):
    g = torch.Generator().manual_seed(8)
    slots, *lists = oracle.random_case(g)
    wide = random_cache(g, (10, 4, 3, 24)).to(backend.device)
    before = wide.clone()
    inner = [t.to(backend.device) for t in (slots, *lists)]
    backend.ops.compact_kv([wide[:, :, 1:2, 4:20]], [], *inner)
    assert_same(wide[:, :, ::2], before[:, :, ::2])
    assert_same(wide[..., :4], before[..., :4])
    assert_same(wide[..., 20:], before[..., 20:])
    wanted = oracle.compact_kv([before[:, :, 1:2, 4:20].cpu()], slots, *lists)[0]
    assert_same(wide[:, :, 1:2, 4:20].cpu(), wanted)


@pytest.mark.parametrize(
    "path, num_accepted",
    [
        ([0, 1, 2, 3], 3),  # a chain
        ([0, -1, -1, -1], 0),
        ([0, 3, -1, -1], 0),  # behind the accepted ones
        ([3, 2, 1, 0], -1),
        ([3, 2, 1, 0], -(2**31)),
        ([-1, -1, -1, -1], 3),
        ([5, 2**31 - 1, -(2**31), 6], 3),  # no rows of the request
    ],
)
def test_nothing_moves(backend, path, num_accepted):
    g = torch.Generator().manual_seed(9)
    cache = random_cache(g, (5, 1, 1, 8))
    got = check(backend, [cache], [], torch.arange(5), *one_request(5, path, num_accepted))
    assert_same(got[0], cache)


def test_num_accepted_is_clamped(backend):
    """To W - 1, and to the rows of the request: the neighbour's first row is not written."""
    g = torch.Generator().manual_seed(10)
    cache = random_cache(g, (8, 1, 1, 8))
    cu_rows = torch.tensor([0, 3, 8], dtype=torch.int32)
    path = torch.tensor([[1, 2, 2, 2], [4, 3, 2, 1]], dtype=torch.int32)
    for count in (3, 4, 2**31 - 1):
        num_accepted = torch.tensor([count, count], dtype=torch.int32)
        check(backend, [cache], [], torch.arange(8), cu_rows, path, num_accepted)


def test_offsets_are_clamped(backend):
    g = torch.Generator().manual_seed(11)
    cache = random_cache(g, (8, 1, 1, 8))
    path, num_accepted = torch.tensor([[1, 2], [2, 1]]).int(), torch.tensor([1, 1]).int()
    for cu in ([-5, 3, 8], [0, 3, 2**31 - 1], [9, 9, 9], [-(2**31), 0, 3], [5, 2, 8], [8, 8, 9]):
        cu_rows = torch.tensor(cu, dtype=torch.int32)
        check(backend, [cache], [], torch.arange(8), cu_rows, path, num_accepted)


def test_request_alone_and_in_any_batch(backend):
    g = torch.Generator().manual_seed(12)
    slots, cu_rows, path, num_accepted = oracle.random_case(g, rows=(5, 9, 4), padding=0)
    cache = random_cache(g, (10, 4, 2, 8))
    together = check(backend, [cache], [], slots, cu_rows, path, num_accepted)[0]
    step = cache
    for b in (2, 0, 1):
        mine = slots[cu_rows[b] : cu_rows[b + 1]]
        rows = torch.tensor([0, len(mine)], dtype=torch.int32)
        step = check(backend, [step], [], mine, rows, path[b : b + 1], num_accepted[b : b + 1])[0]
    assert_same(step, together)


@pytest.mark.parametrize("batch, rows, width", [(0, 0, 3), (2, 0, 3), (2, 4, 0), (0, 5, 2)])
def test_empty_things(backend, batch, rows, width):
    cache = torch.arange(16.0).view(8, 1, 1, 2)
    cu_rows = torch.zeros(batch + 1, dtype=torch.int32)
    path = torch.zeros(batch, width, dtype=torch.int32)
    check(backend, [cache], [], torch.arange(rows), cu_rows, path, torch.zeros(batch).int())


def test_strided_path(backend):
    g = torch.Generator().manual_seed(13)
    slots, cu_rows, path, num_accepted = (t.to(backend.device) for t in oracle.random_case(g))
    cache = random_cache(g, (10, 4, 2, 8))
    wide = torch.full((len(path), 9), 1, dtype=torch.int32, device=backend.device)
    wide[:, 2:7] = path
    ours = cache.clone().to(backend.device)
    backend.ops.compact_kv([ours], [], slots, cu_rows, wide[:, 2:7], num_accepted)
    lists = [t.cpu() for t in (slots, cu_rows, path, num_accepted)]
    assert_same(ours.cpu(), oracle.compact_kv([cache], *lists)[0])


def test_errors_name_op_argument_wanted_got(backend):
    on = backend.device
    lists = [t.to(on) for t in oracle.random_case(torch.Generator().manual_seed(14))]
    slots, cu_rows, path, num_accepted = lists
    cache = torch.zeros(10, 4, 2, 8, device=on)
    bad = [
        (([cache], [cache[0]], *lists), r"compact_kv: v_caches\[0\]: wanted shape \[num_pages, page_size, heads"),
        (([cache, cache.transpose(2, 3)], [], *lists), r"k_caches\[1\]: wanted stride 1 in the last"),
        (([cache], [], slots.float(), *lists[1:]), r"slots: wanted dtype int32 or int64, got float32"),
        (([cache], [], slots[None], *lists[1:]), r"slots: wanted shape \[R\]"),
        (([cache], [], slots, cu_rows.long(), path, num_accepted), r"cu_rows: wanted dtype int32, got int64"),
        (([cache], [], slots, cu_rows[:0], path, num_accepted), r"cu_rows: wanted at least 1 \(B \+ 1\)"),
        (([cache], [], slots, cu_rows.repeat(2)[::2], path, num_accepted), r"cu_rows: wanted a contiguous"),
        (([cache], [], slots, cu_rows, path.long(), num_accepted), r"path: wanted dtype int32, got int64"),
        (([cache], [], slots, cu_rows, path[0], num_accepted), r"path: wanted shape \[B, W\]"),
        (([cache], [], slots, cu_rows, path[1:], num_accepted), r"path: wanted size 4 \(B of cu_rows\)"),
        (([cache], [], slots, cu_rows, path[:, ::2], num_accepted), r"path: wanted stride 1"),
        (([cache], [], slots, cu_rows, path, num_accepted[1:]), r"num_accepted: wanted size 4 \(B of"),
        (([cache], [], slots, cu_rows, path, num_accepted.long()), r"num_accepted: wanted dtype int32"),
    ]  # fmt: skip
    for arguments, message in bad:
        with pytest.raises(RuntimeError, match=message):
            backend.ops.compact_kv(*arguments)
    assert not cache.any()


def test_opcheck_and_compile():
    g = torch.Generator().manual_seed(15)
    lists = oracle.random_case(g)
    caches = [random_cache(g, (10, 4, 2, 8), torch.int16).float() for _ in range(4)]
    wanted = oracle.compact_kv(caches, *lists)
    for k, v in ((caches[:2], caches[2:]), (caches[:1], [])):
        torch.library.opcheck(
            torch.ops.specdec.compact_kv.default,
            ([c.clone() for c in k], [c.clone() for c in v], *lists),
        )
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(k, v, slots, cu_rows, path, num_accepted):
            torch.ops.specdec.compact_kv(k, v, slots, cu_rows, path, num_accepted)
            return k[0].sum()

        ours = [c.clone() for c in caches]
        assert_same(step(ours[:2], ours[2:], *lists), wanted[0].sum())
        for mine, theirs in zip(ours, wanted, strict=True):
            assert_same(mine, theirs)


# --- Fuzz -----------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzz(backend_name, data):
    """Any numbers in paths, counts and slots; slots of one request are distinct where they exist."""
    rows = data.draw(st.lists(st.integers(0, 9), max_size=4))
    width = data.draw(st.integers(0, 6))
    total = sum(rows)
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    slots = torch.randperm(40, generator=g)[:total]
    for at in data.draw(st.lists(st.integers(0, max(total - 1, 0)), max_size=3)):
        if total:
            slots[at] = data.draw(st.sampled_from([-1, 40, 2**31, -(2**40), 2**62]))
    number = st.one_of(st.integers(-1, 9), st.integers(-(2**31), 2**31 - 1))
    path = [[data.draw(number) for _ in range(width)] for _ in rows]
    count = [data.draw(number) for _ in rows]
    cu_rows = torch.tensor([0, *rows]).cumsum(0).int()
    path = torch.tensor(path, dtype=torch.int32).view(len(rows), width)
    caches = [random_cache(g, (10, 4, 1, 4)), random_cache(g, (40, 1, 2, 3), torch.uint8)]
    lists = slots, cu_rows, path, torch.tensor(count, dtype=torch.int32)
    check(backends.get(backend_name), caches[:1], caches[1:], *lists)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
