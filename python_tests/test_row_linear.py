"""row_linear: against the float64 oracle, and bit for bit against itself row by row."""

import ctypes
import mmap

import isa_linear
import pytest
import torch
from compare import assert_close, assert_same
from instruction_sets import OWN_BF16, results_by_isa
from oracles import row_linear as oracle

import specdec_ext

PROT_NONE = 0
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def run(backend, x, weight, bias=None):
    on = [t if t is None else t.to(backend.device) for t in (x, weight, bias)]
    return backend.ops.row_linear(*on).cpu()


def case(rows, outputs, size, dtype=torch.float32, bias=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    return oracle.random_case(g, rows, outputs, size, dtype, bias)


def check(backend, arguments):
    got = run(backend, *arguments)
    wanted = oracle.row_linear(*arguments)
    assert got.dtype == arguments[0].dtype
    assert_close(got, wanted, oracle.torch_peer(*arguments), what="y", magnitude=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "rows, outputs, size",
    [
        (1, 1, 1),
        (2, 3, 8),
        (3, 5, 31),
        (4, 7, 32),
        (5, 33, 33),
        (7, 31, 64),
        (8, 32, 77),
        (9, 4, 640),
        (17, 35, 130),
        (33, 6, 95),
        (64, 9, 520),
        (65, 37, 40),
        (130, 5, 67),
        (300, 3, 40),
        (3, 40, 8224),
    ],
)
def test_matches_oracle(backend, dtype, bias, rows, outputs, size):
    """Row counts on both sides of every tile, outputs and K that are multiples of nothing."""
    check(backend, case(rows, outputs, size, dtype, bias, seed=rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_k_counts_once(backend, dtype):
    """One-hot rows pick single weights exactly, at every place of k."""
    size, outputs = 197, 34
    weight = torch.arange(outputs * size).reshape(outputs, size) % 251 - 125
    got = run(backend, torch.eye(size, dtype=dtype), weight.to(dtype))
    assert_same(got, weight.T.contiguous().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 203])
def test_a_row_is_the_same_in_any_call(backend, dtype, size):
    """The point of the op: one row, tiles of every size, a large call, whatever the neighbours."""
    x, weight, bias = case(70, 37, size, dtype)
    wanted = torch.cat([run(backend, x[r : r + 1], weight, bias) for r in range(70)])
    for rows in (2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 32, 33, 64, 65, 70):
        assert_same(run(backend, x[:rows], weight, bias), wanted[:rows], f"{rows} rows")
        assert_same(run(backend, x[-rows:], weight, bias), wanted[-rows:], f"last {rows} rows")
    wild = x.clone()
    wild[1::2] = float("nan")
    assert_same(run(backend, wild, weight, bias)[::2], wanted[::2], "beside NaN rows")


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_output_is_the_same_in_any_weight(backend, dtype):
    """Shards of a layer give the bits of the whole: an output does not know its place."""
    x, weight, bias = case(5, 70, 203, dtype)
    wanted = run(backend, x, weight, bias)
    for begin, end in ((0, 1), (1, 2), (1, 70), (31, 66), (69, 70)):
        got = run(backend, x, weight[begin:end], bias[begin:end])
        assert_same(got, wanted[:, begin:end].contiguous(), f"outputs {begin} to {end}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [72, 61])
def test_strides_and_alignment_change_no_bit(backend, dtype, size):
    """Rows apart, rows off 16 bytes, one row for all, rows of weights one inside the other; what lies
    between the rows is never read."""
    x, weight, bias = case(11, 35, size, dtype)
    wanted = run(backend, x, weight, bias)

    def apart(t, begin, width):
        wide = torch.full((t.shape[0], width), float("nan"), dtype=t.dtype, device=backend.device)
        wide[:, begin : begin + t.shape[1]] = t.to(backend.device)
        return wide[:, begin : begin + t.shape[1]]

    for begin, width in ((0, 80), (1, 81), (8, 96), (3, 79)):
        wide_x, wide_weight = apart(x, begin, width), apart(weight, begin, width)
        for a, b in ((wide_x, weight), (x, wide_weight), (wide_x, wide_weight)):
            assert_same(run(backend, a, b, bias), wanted, f"begin {begin}, width {width}")
    same = x[:1].to(backend.device).expand(11, size)
    assert same.stride() == (0, 1)
    assert_same(run(backend, same, weight, bias), wanted[:1].expand(11, -1).contiguous())
    sliding = torch.arange(40 + size).to(dtype).as_strided((40, size), (1, 1))
    assert_same(run(backend, x, sliding), run(backend, x, sliding.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite_values_stay_in_their_row_and_output(backend, dtype):
    x, weight, _ = case(9, 40, 70, dtype, bias=False)
    x[2, 69], x[4, 0] = float("nan"), float("inf")
    weight[7, 33], weight[39, 69] = float("nan"), -float("inf")
    x[:, 69] = x[:, 69].abs() + 1
    got = run(backend, x, weight)
    wanted = oracle.row_linear(x, weight)
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        assert_same(test(got), test(wanted))


def test_the_sum_is_rounded_once_after_the_bias(backend):
    """256 + 1 is no bfloat16; with the bias -256 the exact sum is 1."""
    x, weight = torch.ones(1, 257).bfloat16(), torch.ones(1, 257).bfloat16()
    got = run(backend, x, weight, torch.tensor([-256.0]).bfloat16())
    assert got.item() == 1.0


def test_large_values_overflow_to_infinity(backend):
    x, weight = torch.full((1, 4), 300.0).half(), torch.full((1, 4), 300.0).half()
    assert run(backend, x, weight).item() == float("inf")


@pytest.mark.parametrize("rows, outputs, size", [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
def test_empty(backend, rows, outputs, size):
    x, weight, bias = case(rows, outputs, size)
    got = run(backend, x, weight, bias)
    assert_same(got, bias.expand(rows, outputs).contiguous())


def test_weights_behind_2_to_31_elements(backend):
    """E01: products of row and stride beyond int32. Untouched pages of the view cost no memory."""
    if backend.name == "emu_asan":
        pytest.skip("a view of 8 GB of address space does not fit the sanitizer's shadow memory")
    stride = 2**26
    base = torch.empty(40 * stride, dtype=torch.bfloat16, device=backend.device)
    weight = base.as_strided((40, 16), (stride, 1))
    x, values, _ = case(2, 40, 16, torch.bfloat16)
    weight.copy_(values)
    assert_same(run(backend, x, weight), run(backend, x, values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, size", [(5, 40), (21, 33), (32, 77)])
def test_cpu_reads_nothing_behind_the_last_element(dtype, outputs, size):
    """Weights and rows that end where the process has no memory: reading on ends it."""
    x, weight, _ = case(3, outputs, size, dtype, bias=False)
    wanted = specdec_ext.row_linear(x, weight)
    assert_same(specdec_ext.row_linear(at_the_end(x), at_the_end(weight)), wanted)


def at_the_end(t):
    """A copy whose last byte is the last one before a page that must not be touched."""
    page = mmap.PAGESIZE
    size = -(-t.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    libc = ctypes.CDLL(None, use_errno=True)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(base + size), ctypes.c_size_t(page), PROT_NONE) == 0
    copy = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=size - t.nbytes)
    return copy.view(t.shape).copy_(t)


def test_errors_name_op_argument_wanted_got(backend):
    x, weight, bias = (t.to(backend.device) for t in case(3, 5, 8))
    bad = [
        ((x[0], weight, bias), r"row_linear: x: wanted shape \[R, K\], got \[8\]"),
        ((x.double(), weight, bias), r"row_linear: x: wanted dtype .*, got float64"),
        ((x, weight.half(), bias), r"row_linear: weight: wanted dtype float32, got float16"),
        ((x, weight[:, 1:], bias), r"row_linear: weight: wanted size 8 \(K of x\)"),
        ((x, weight, bias[1:]), r"row_linear: bias: wanted size 5 \(N of weight\)"),
        ((x, weight, bias.half()), r"row_linear: bias: wanted dtype float32, got float16"),
        ((x, weight, bias.expand(1, 5)), r"row_linear: bias: wanted shape \[N\], got \[1, 5\]"),
        ((x, weight, bias[:1].expand(5)), r"row_linear: bias: wanted .*got strides \[0\]"),
        (
            (x, weight.T.contiguous().T, bias),
            r"weight: wanted stride 1 in the last dimension, got strides \[1, 5\]",
        ),
        ((x.T.contiguous().T, weight, bias), r"x: wanted stride 1 in the last dimension"),
    ]
    for arguments, message in bad:
        with pytest.raises(RuntimeError, match=message):
            backend.ops.row_linear(*arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_give_the_same_bits(dtype):
    """Large enough that several threads do share the outputs."""
    x, weight, bias = case(9, 1000, 333, dtype)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(specdec_ext.row_linear(x, weight, bias))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same(other, results[0])


def test_cpu_isas_give_the_same_bits():
    """Every instruction set this CPU has, each in its own process; products of bf16 pairs have bits of their own,
    which are as near the exact result, and a row has them in every call."""
    results = results_by_isa("isa_linear")
    for name, arguments in isa_linear.cases():
        wanted = oracle.row_linear(*arguments)
        peer = oracle.torch_peer(*arguments)
        for isa, other in results.items():
            if isa not in OWN_BF16 or "bfloat16" not in name:
                assert_same(other[name], results["baseline"][name], f"{name} on {isa}")
            assert_same(other[f"{name} row by row"], other[name], f"{name} on {isa}")
            for part in (slice(0, 2), slice(3, None)):  # output 2 has a large weight
                got = other[name][:, part]
                assert_close(got, wanted[:, part], peer[:, part], what=f"{name} on {isa}")


def test_opcheck_and_compile():
    arguments = case(3, 5, 20)
    torch.library.opcheck(torch.ops.specdec.row_linear.default, arguments)
    torch.library.opcheck(torch.ops.specdec.row_linear.default, arguments[:2])

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(x, weight, bias):
        return torch.ops.specdec.row_linear(x + 1, weight, bias) * 2

    for rows in (1, 3, 8):
        x, weight, bias = case(rows, 5, 20)
        assert_same(step(x, weight, bias), specdec_ext.row_linear(x + 1, weight, bias) * 2)
