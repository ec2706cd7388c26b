"""fuse_features: against the float64 oracle, bit for bit row_linear of the concatenation, and itself row by row."""

import pytest
import torch
from compare import assert_close, assert_rounded_once, assert_same
from huge_strides import huge
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import OWN_BF16, results_by_isa
from oracles import fuse_features as oracle
from test_row_linear import at_the_end

import specdec_ext

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1,), (64, 64), (40, 24, 64), (33, 31, 5), (8, 0, 16), (3, 1, 1, 2, 128), (20,) * 16]


def run(backend, hiddens, weight, norm=None, eps=1e-6):
    on = backend.device
    moved = [h.to(on) for h in hiddens], weight.to(on), norm if norm is None else norm.to(on)
    return backend.ops.fuse_features(*moved, eps).cpu()


def case(rows=3, sizes=(40, 24, 64), width=20, dtype=torch.float32, norm=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    return oracle.random_case(g, rows, sizes, width, dtype, norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_matches_oracle(backend, dtype, sizes, norm):
    """Widths that 16 bytes, chunks and steps of k divide and do not; borders between layers anywhere."""
    for rows, width in ((1, 1), (5, 37), (2, 600)):
        arguments = case(rows, sizes, width, dtype, norm, seed=width)
        got = run(backend, *arguments)
        assert got.dtype == dtype
        peer = oracle.torch_peer(*arguments)
        assert_close(got, oracle.fuse_features(*arguments), peer, what="y")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_without_norm_it_is_row_linear_of_the_concatenation(backend, dtype, sizes):
    for rows in (1, 9, 66):
        hiddens, weight, _ = case(rows, sizes, 21, dtype)
        both = torch.cat(hiddens, 1).to(backend.device)
        wanted = backend.ops.row_linear(both, weight.to(backend.device)).cpu()
        assert_same(run(backend, hiddens, weight), wanted, f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_in_any_call(backend, dtype):
    """Also above 64 rows, which are taken in tiles."""
    hiddens, weight, norm = case(70, (40, 33), 36, dtype)
    wanted = torch.cat(
        [run(backend, [h[r : r + 1] for h in hiddens], weight, norm) for r in range(70)]
    )
    for rows in (2, 7, 8, 9, 17, 33, 64, 65, 70):
        got = run(backend, [h[-rows:] for h in hiddens], weight, norm)
        assert_same(got, wanted[-rows:], f"last {rows} rows")
    wild = [h.clone() for h in hiddens]
    wild[0][1::2] = float("nan")
    assert_same(run(backend, wild, weight, norm)[::2], wanted[::2], "beside NaN rows")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", [0, 1, "weight", "both"])
def test_strides_and_alignment_change_no_bit(backend, dtype, which):
    """Layers with row strides of their own, off 16 bytes; what lies between the rows is never read."""
    hiddens, weight, norm = case(11, (72, 64), 35, dtype)
    wanted = run(backend, hiddens, weight, norm)

    def apart(t, begin, width):
        wide = torch.full((t.shape[0], width), float("nan"), dtype=t.dtype, device=backend.device)
        wide[:, begin : begin + t.shape[1]] = t.to(backend.device)
        return wide[:, begin : begin + t.shape[1]]

    for begin, gap in ((0, 8), (1, 1), (8, 24), (3, 9)):
        ours = [
            apart(h, begin, h.shape[1] + gap) if which in (i, "both") else h
            for i, h in enumerate(hiddens)
        ]
        mine = (
            apart(weight, begin, weight.shape[1] + gap) if which in ("weight", "both") else weight
        )
        assert_same(run(backend, ours, mine, norm), wanted, f"begin {begin}, gap {gap}")


def test_views_of_one_buffer_and_one_layer_twice(backend):
    """Layers side by side in one tensor, layer-major ones, and one given twice."""
    hiddens, weight, norm = case(6, (32, 32, 32), 20)
    wanted = run(backend, hiddens, weight, norm)
    side = torch.cat(hiddens, 1).to(backend.device)
    assert_same(run(backend, side.split(32, 1), weight, norm), wanted)
    stacked = torch.stack(hiddens).to(backend.device)
    assert_same(run(backend, list(stacked), weight, norm), wanted)
    twice = [hiddens[0], hiddens[1], hiddens[0]]
    assert_same(
        run(backend, twice, weight, norm), run(backend, [h.clone() for h in twice], weight, norm)
    )


@pytest.mark.parametrize("weights", DTYPES, ids=str)
def test_norm_weights_of_another_dtype(backend, weights):
    hiddens, weight, norm = case(4, dtype=torch.bfloat16)
    norm = norm.to(weights)
    got = run(backend, hiddens, weight, norm)
    assert_same(got, run(backend, hiddens, weight, norm.float()))
    assert_close(got, oracle.fuse_features(hiddens, weight, norm), what="y")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounded_once(backend, dtype):
    """Not to the type of the hidden states before the norm."""
    arguments = case(12, (40, 24), 100, dtype)
    assert_rounded_once(run(backend, *arguments), oracle.fuse_features(*arguments), "y")


def test_eps_is_below_the_root(backend):
    arguments = case(3, (40,), 20)
    got = run(backend, *arguments, 0.7)
    assert_close(got, oracle.fuse_features(*arguments, 0.7), what="y")


def test_not_finite_values_stay_in_their_row(backend):
    hiddens, weight, norm = case(9)
    hiddens[0][2, 39], hiddens[2][4, 0] = float("nan"), float("inf")
    hiddens[1][6] = 0.0
    got = run(backend, hiddens, weight, norm)
    assert got[2].isnan().all() and got[4].isnan().any()
    others = [0, 1, 3, 5, 6, 7, 8]
    assert got[others].isfinite().all()
    zeros = run(backend, [torch.zeros_like(h) for h in hiddens], weight, norm)
    assert_same(zeros.abs(), torch.zeros_like(zeros))
    assert run(backend, [torch.zeros_like(h) for h in hiddens], weight, norm, 0.0).isnan().all()


@pytest.mark.parametrize(
    "rows, sizes, width", [(0, (8, 8), 4), (3, (8, 8), 0), (3, (0, 0), 4), (3, (0,), 4)]
)
@pytest.mark.parametrize("norm", [False, True])
def test_empty(backend, rows, sizes, width, norm):
    got = run(backend, *case(rows, sizes, width, norm=norm))
    assert_same(got, torch.zeros(rows, width))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cpu_reads_nothing_behind_the_last_element(dtype):
    """Layers that end where the process has no memory."""
    hiddens, weight, norm = case(3, (33, 40, 7), 5, dtype)
    wanted = specdec_ext.fuse_features(hiddens, weight, norm)
    got = specdec_ext.fuse_features(
        [at_the_end(h) for h in hiddens], at_the_end(weight), at_the_end(norm)
    )
    assert_same(got, wanted)


def test_rows_behind_2_to_31_elements(backend):
    """E01: products of row and stride beyond int32. Untouched pages of the view cost no memory."""
    far = huge(backend, (4, 16), (2**30, 1), torch.bfloat16)
    hiddens, weight, norm = case(4, (16, 8), 20, torch.bfloat16)
    wanted = run(backend, hiddens, weight, norm)
    far.copy_(hiddens[0])
    assert_same(run(backend, [far, hiddens[1]], weight, norm), wanted)


def test_errors_name_op_argument_wanted_got(backend):
    on = backend.device
    hiddens, weight, norm = case()
    hiddens, weight, norm = [h.to(on) for h in hiddens], weight.to(on), norm.to(on)
    bad = [
        (([], weight, norm), r"fuse_features: hiddens: wanted 1 to 16 tensors, got 0"),
        ((hiddens * 6, weight, norm), r"hiddens: wanted 1 to 16 tensors, got 18"),
        ((hiddens[:2] + [hiddens[2][0]], weight, norm), r"hiddens\[2\]: wanted shape \[R, d_i\], got \[64\]"),
        ((hiddens[:2] + [hiddens[2][1:]], weight, norm), r"hiddens\[2\]: wanted size 3 \(R of hiddens\[0\]\)"),
        (([hiddens[0].double(), *hiddens[1:]], weight, norm), r"hiddens\[0\]: wanted dtype .*, got float64"),
        (([hiddens[0], hiddens[1].half(), hiddens[2]], weight, norm), r"hiddens\[1\]: wanted dtype float32, got float16"),
        (([hiddens[0].T.contiguous().T, *hiddens[1:]], weight, norm), r"hiddens\[0\]: wanted stride 1 in the last"),
        ((hiddens, weight[:, 1:], norm), r"fc_weight: wanted size 128 \(sum of d_i\)"),
        ((hiddens, weight.half(), norm), r"fc_weight: wanted dtype float32, got float16"),
        ((hiddens, weight[0], norm), r"fc_weight: wanted shape \[d, sum of d_i\]"),
        ((hiddens, weight, norm[1:]), r"norm_weight: wanted size 20 \(d of fc_weight\)"),
        ((hiddens, weight, norm.long()), r"norm_weight: wanted dtype .*, got int64"),
        ((hiddens, weight, norm, -1.0), r"eps: wanted a number >= 0, got -1"),
        ((hiddens, weight, norm, float("nan")), r"eps: wanted a number >= 0, got nan"),
    ]  # fmt: skip
    for arguments, message in bad:
        with pytest.raises(RuntimeError, match=message):
            backend.ops.fuse_features(*arguments)


def test_opcheck_and_compile():
    hiddens, weight, norm = case()
    op = torch.ops.specdec.fuse_features.default
    torch.library.opcheck(op, (hiddens, weight, norm, 1e-5))
    torch.library.opcheck(op, (hiddens[:1], weight[:, :40].contiguous()))

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(hiddens, weight, norm):
        return torch.ops.specdec.fuse_features([h + 1 for h in hiddens], weight, norm) * 2

    for rows in (1, 3, 8):
        hiddens, weight, norm = case(rows)
        wanted = specdec_ext.fuse_features([h + 1 for h in hiddens], weight, norm) * 2
        assert_same(step(hiddens, weight, norm), wanted)


EXAMPLES = {"cpu": 60, "emu": 25, "emu_hooks": 6, "emu_asan": 6, "cuda": 150}


def test_random_calls(backend):
    """Any widths, strides and dtypes: without norm the bits of row_linear, with it near the oracle."""

    @settings(max_examples=EXAMPLES[backend.name], deadline=None, database=None, derandomize=True)
    @given(st.data())
    def fuzz(data):
        draw = data.draw
        sizes = draw(st.lists(st.integers(0, 70), min_size=1, max_size=6))
        dtype, rows = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 20))
        hiddens, weight, norm = case(
            rows, sizes, draw(st.integers(1, 40)), dtype, seed=draw(st.integers(0, 99))
        )
        ours = []
        for h in hiddens:
            wide = torch.full((rows, h.shape[1] + draw(st.integers(0, 9))), 3.0, dtype=dtype)
            wide[:, : h.shape[1]] = h
            ours.append(wide[:, : h.shape[1]])
        got = run(backend, ours, weight)
        wanted = backend.ops.row_linear(
            torch.cat(hiddens, 1).to(backend.device), weight.to(backend.device)
        )
        assert_same(got, wanted.cpu())
        if rows > 0 and sum(sizes) > 0:
            arguments = hiddens, weight, norm
            peer = oracle.torch_peer(*arguments)
            assert_close(
                run(backend, ours, weight, norm), oracle.fuse_features(*arguments), peer, what="y"
            )

    fuzz()


def test_instruction_sets_give_the_same_bits():
    """Of inject_kv too; products of bf16 pairs round in their own ways."""
    results = results_by_isa("isa_dflash")
    for isa, other in results.items():
        for name in other:
            pairs = isa in OWN_BF16 and name.startswith("fuse") and "bfloat16" in name
            if not pairs:
                assert_same(other[name], results["baseline"][name], f"{name} on {isa}")
