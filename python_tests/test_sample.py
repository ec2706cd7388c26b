"""sample: tokens, log-probabilities and status against the oracle, on every backend."""

import json
import math
import pathlib

import pytest
import torch
from compare import DECISION_BAND, assert_close, assert_decisions, assert_same
from instruction_sets import results_by_isa
from oracles import sample as oracle

CASES = pathlib.Path(__file__).parent / "cases"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
NAMES = ["tokens", "logprob", "lse", "status", "top_ids", "top_logprobs"]


def run(backend, logits, seeds, positions, *, vocab_size=None, temperature=None):
    """Results on the CPU. The logits keep their strides."""
    on = backend.device
    out = backend.ops.sample(
        logits.to(on),
        seeds.to(on),
        positions.to(on),
        vocab_size=logits.shape[1] if vocab_size is None else vocab_size,
        temperature=None if temperature is None else temperature.to(on),
    )
    return [t.cpu() for t in out]


def check(backend, logits, seeds, positions, *, vocab_size=None, temperature=None):
    """The op against the oracle, given its random numbers."""
    vocab_size = logits.shape[1] if vocab_size is None else vocab_size
    out = run(backend, logits, seeds, positions, vocab_size=vocab_size, temperature=temperature)
    tokens, logprob, lse, status, top_ids, top_logprobs = out
    allowed = oracle.allowed(
        logits, seeds, positions, vocab_size=vocab_size, temperature=temperature, band=DECISION_BAND
    )
    assert tokens.dtype == torch.int64
    assert_decisions(tokens.tolist(), allowed, "token of row")
    wanted = oracle.statistics(logits, tokens, vocab_size=vocab_size)
    # What the sums are made of: a row's lse and its logits are of one magnitude.
    finite = logits[:, :vocab_size].float().nan_to_num(0, 0, 0).abs()
    magnitude = max([1.0, *finite.amax(1).tolist()])
    assert_close(logprob, wanted[0], what="logprob", magnitude=magnitude)
    assert_close(lse, wanted[1], what="lse", magnitude=magnitude)
    assert_same(status, wanted[2], "status")
    assert top_ids.shape == top_logprobs.shape == (logits.shape[0], 0)
    assert (top_ids.dtype, top_logprobs.dtype) == (torch.int64, torch.float32)
    return out


def random_case(rows, vocab, dtype=torch.float32, scale=3.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=g) * scale).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 2**40, (rows,), generator=g)
    return logits, seeds, positions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 5, 15, 16, 17, 255, 4095, 4096, 4097, 8192, 10000])
def test_matches_oracle(backend, dtype, vocab):
    rows = 3 if backend.emulated else 12
    logits, seeds, positions = random_case(rows, vocab, dtype, seed=vocab)
    temperature = torch.tensor([1.0, 0.0, 0.6, 1.7, 1e-6, 1e-5] * 2)[:rows]
    check(backend, logits, seeds, positions, temperature=temperature)
    check(backend, logits, seeds, positions)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_vocabulary(backend, dtype):
    rows = 1 if backend.emulated else 6
    logits, seeds, positions = random_case(rows, 151936, dtype, seed=1)
    temperature = torch.tensor([0.8, 1.0, 0.0, 2.0, 0.3, 1.0])[:rows]
    check(backend, logits, seeds, positions, temperature=temperature)


def test_draws_behind_the_first_32_tiles(backend):
    """A warp looks through 32 tiles of 4096 at a time: half of the mass lies behind those."""
    vocab, behind = 140000, 32 * 4096
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(5)).bfloat16()
    logits[:, behind:] += 2.7  # ln(131072 / 8928)
    tokens = check(backend, logits, torch.tensor([2, 9]), torch.zeros(2, dtype=torch.int64))[0]
    assert (tokens >= behind).all()


def test_the_last_number_draws_no_entry_without_mass(backend):
    """Of seed 8183275 the number is 1 - 2^-24, and the sum 0.9 * 2^-24 + 0.9 * 2^-24 + 1 depends on its order."""
    logits = torch.full((1, 12), -INF)
    logits[0, [0, 4]] = math.log(0.9 * 2.0**-24)
    logits[0, 8] = 0.0
    out = run(backend, logits, torch.tensor([8183275]), torch.zeros(1, dtype=torch.int64))
    assert out[0].tolist() == [8] and out[3].tolist() == [0]


def test_many_draws_of_small_vocabularies(backend):
    """Thousands of decisions near all kinds of thresholds: flat, peaked and holed laws."""
    rows = 64 if backend.emulated else 4000
    for vocab, scale in [(3, 0.0), (5, 1.0), (40, 8.0)]:
        logits, seeds, positions = random_case(rows, vocab, scale=scale, seed=vocab)
        if vocab == 40:
            logits[torch.rand(rows, vocab, generator=torch.Generator().manual_seed(1)) < 0.5] = -INF
            logits[:, 7] = 0.0
        check(backend, logits, seeds, positions)


def test_extreme_logits_and_temperatures(backend):
    """Differences, not products: nothing overflows, and tiny temperatures keep their law."""
    vocab = 9
    rows = [
        (torch.full((vocab,), 3.0e38), 1.0),
        (torch.linspace(-3.0e38, 3.0e38, vocab), 1.0),
        (torch.full((vocab,), -3.0e38), 0.5),
        (20.0 + torch.arange(vocab) * 1e-3, 1e-3),  # x * c is near 3e4, its fraction matters
        (1000.0 + torch.arange(vocab) * 2.0**-13, 2e-4),
        (torch.tensor([-INF] * 8 + [-3.0e38]), 1.0),
        (torch.tensor([-INF, 1.0, -INF, 2.0] + [-INF] * 5), INF),  # flat over the finite ones
        (torch.arange(vocab) * 30.0, 1e30),
        (torch.zeros(vocab), NAN),  # as greedy
        (torch.zeros(vocab), -1.0),
        (torch.arange(vocab) * 1e-40, 1.0),  # denormals
    ]
    repeats = 2 if backend.emulated else 40
    logits = torch.stack([row for row, _ in rows]).float().repeat_interleave(repeats, 0)
    temperature = torch.tensor([t for _, t in rows]).repeat_interleave(repeats)
    seeds = torch.arange(len(logits))
    out = check(backend, logits, seeds, seeds + 5, temperature=temperature)
    assert set(out[0][6 * repeats : 7 * repeats].tolist()) <= {1, 3}


def test_unusable_rows_are_flagged_and_leave_their_neighbours_alone(backend):
    logits, seeds, positions = random_case(8, 5000, seed=3)
    alone = run(backend, logits, seeds, positions)
    bad = logits.clone()
    bad[0] = NAN
    bad[1, 4999] = NAN
    bad[2, 17] = INF
    bad[3] = -INF
    bad[4, 100:] = NAN
    bad[5, :4096] = -INF  # a whole tile of probability 0 is normal
    out = check(backend, bad, seeds, positions)
    assert out[3].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert out[0][[0, 3]].tolist() == [0, 0]
    for name, mine, theirs in zip(NAMES, out, alone, strict=True):
        assert_same(mine[6:], theirs[6:], name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_rows_and_negative_nan(backend, dtype):
    """Rows whose bits, as integers, are ordered the other way round."""
    vocab = 4096 + 21
    logits, seeds, positions = random_case(5, vocab, seed=8)
    logits = (-logits.abs() - 0.25).to(dtype)
    logits[1, 4110] = -0.0
    logits[2, [5, 4100]] = 0.0
    bits = logits.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[3, 17] = bits[4, vocab - 1] = -1
    temperature = torch.tensor([0.7, 0.0, 0.0, 1.0, 0.0])
    out = check(backend, logits, seeds, positions, temperature=temperature)
    assert out[3].tolist() == [0, 0, 0, 1, 1]
    assert out[0][1:3].tolist() == [4110, 5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_of_whole_tiles(backend, dtype):
    """Exponents of 2 beyond a float's, either way, in tiles of 4096 entries that are summed at once."""
    logits, seeds, positions = random_case(6, 2 * 4096, seed=11)
    logits[1] += 300.0
    logits[2] -= 300.0
    logits[3, ::3] -= 300.0
    logits[4, :4096] += 60.0
    logits[5] *= 0.01
    logits = logits.to(dtype)
    for temperature in (1.0, 0.7, 0.02, 50.0):
        check(backend, logits, seeds, positions, temperature=torch.full((6,), temperature))


def test_ties_take_the_lowest_id(backend):
    logits = torch.zeros(3, 20000)
    logits[0, [3, 15000]] = 7.0
    logits[1, [15000, 19999]] = 7.0
    logits[2, :] = -0.0
    logits[2, 5000] = 0.0
    zeros = torch.zeros(3, dtype=torch.int64)
    for dtype in DTYPES:
        out = run(backend, logits.to(dtype), zeros, zeros, temperature=torch.zeros(3))
        assert out[0].tolist() == [3, 15000, 0]


def test_columns_past_vocab_size_are_ignored(backend):
    logits, seeds, positions = random_case(4, 4200, seed=4)
    wanted = run(backend, logits[:, :4100].contiguous(), seeds, positions)
    logits[:, 4100:] = NAN
    check(backend, logits, seeds, positions, vocab_size=4100)
    for name, mine, theirs in zip(
        NAMES, run(backend, logits, seeds, positions, vocab_size=4100), wanted, strict=True
    ):
        assert_same(mine, theirs, name)


def test_row_strides_and_int32_positions(backend):
    logits, seeds, positions = random_case(4, 700, torch.bfloat16, seed=5)
    wanted = run(backend, logits, seeds, positions % 1000)
    base = torch.full((8, 1000), NAN, dtype=torch.bfloat16, device=backend.device)
    view = base[::2, 3:703]  # odd start: no row is aligned
    view.copy_(logits)
    got = run(backend, view, seeds, (positions % 1000).int())
    for name, mine, theirs in zip(NAMES, got, wanted, strict=True):
        assert_same(mine, theirs, name)


def test_off_values_are_bitwise_absent(backend):
    logits, seeds, positions = random_case(5, 5000, seed=6)
    with_ones = run(backend, logits, seeds, positions, temperature=torch.ones(5))
    for name, mine, theirs in zip(
        NAMES, run(backend, logits, seeds, positions), with_ones, strict=True
    ):
        assert_same(mine, theirs, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_invariance(backend, dtype):
    """A row alone, in any batch order and at any thread count: the same bits."""
    rows, vocab = (4, 4500) if backend.emulated else (9, 40000)
    logits, seeds, positions = random_case(rows, vocab, dtype, seed=7)
    temperature = torch.tensor([1.0, 0.7, 0.0] * 3)[:rows]
    whole = run(backend, logits, seeds, positions, temperature=temperature)

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    shuffled = run(
        backend, logits[order], seeds[order], positions[order], temperature=temperature[order]
    )
    for name, mine, theirs in zip(NAMES, shuffled, whole, strict=True):
        assert_same(mine, theirs[order], f"{name} of the permuted batch")
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for r in range(rows):
                one = slice(r, r + 1)
                alone = run(
                    backend, logits[one], seeds[one], positions[one], temperature=temperature[one]
                )
                for name, mine, theirs in zip(NAMES, alone, whole, strict=True):
                    assert_same(mine, theirs[one], f"{name} of row {r} alone, {n} threads")
            again = run(backend, logits, seeds, positions, temperature=temperature)
            for name, mine, theirs in zip(NAMES, again, whole, strict=True):
                assert_same(mine, theirs, f"{name} with {n} threads")
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [0, 1])
def test_row_counts(backend, rows):
    logits, seeds, positions = random_case(rows, 100)
    check(backend, logits, seeds, positions)
    if rows == 0:
        strange = torch.empty_strided((0, 100), (1, 7))
        assert run(backend, strange, seeds, positions)[0].shape == (0,)


def test_errors_name_op_argument_wanted_got(backend):
    logits, seeds, positions = (t.to(backend.device) for t in random_case(3, 10))
    one = torch.ones(3, device=backend.device)
    bad = [
        ((logits[0], seeds, positions), {}, r"sample: logits: wanted shape \[R, >= vocab_size\]"),
        ((logits.double(), seeds, positions), {}, r"logits: wanted dtype float32 or float16 or"),
        ((logits.t(), seeds, positions), {"vocab_size": 3}, r"logits: wanted stride 1"),
        ((logits, seeds.int(), positions), {}, r"seeds: wanted dtype int64, got int32"),
        ((logits, seeds[:2], positions), {}, r"seeds: wanted size 3 \(R of logits\)"),
        ((logits, seeds, positions.float()), {}, r"positions: wanted dtype int32 or int64"),
        (
            (logits, seeds, positions),
            {"vocab_size": 11},
            r"logits: wanted at least 11 \(vocab_size\)",
        ),
        ((logits, seeds, positions), {"vocab_size": 0}, r"vocab_size: wanted .* got 0"),
        (
            (logits, seeds, positions),
            {"temperature": one.double()},
            r"temperature: wanted dtype float32",
        ),
        ((logits, seeds, positions), {"temperature": one[:1]}, r"temperature: wanted size 3"),
    ]
    for arguments, options, message in bad:
        with pytest.raises(RuntimeError, match=message):
            backend.ops.sample(*arguments, **{"vocab_size": 10, **options})


def test_opcheck_and_compile():
    logits, seeds, positions = random_case(3, 50)
    op = torch.ops.specdec.sample.default
    temperature = torch.tensor([1.0, 0.0, 0.5])
    torch.library.opcheck(op, (logits, seeds, positions), {"vocab_size": 50})
    torch.library.opcheck(
        op,
        (logits.bfloat16(), seeds, positions.int()),
        {"vocab_size": 40, "temperature": temperature},
    )

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(logits, seeds, positions):
        tokens, logprob, *_ = torch.ops.specdec.sample(
            logits * 1.0, seeds, positions, vocab_size=logits.shape[1]
        )
        return tokens + 1, logprob

    wanted = torch.ops.specdec.sample(logits, seeds, positions, vocab_size=50)
    tokens, logprob = step(logits, seeds, positions)
    assert_same(tokens, wanted[0] + 1)
    assert_same(logprob, wanted[1])
    assert step(logits[:2], seeds[:2], positions[:2])[0].shape == (2,)

    class Module(torch.nn.Module):
        def forward(self, logits, seeds, positions):
            return torch.ops.specdec.sample(logits, seeds, positions, vocab_size=50)[0]

    exported = torch.export.export(Module(), (logits, seeds, positions)).module()
    assert_same(exported(logits, seeds, positions), wanted[0])


def test_every_instruction_set_gives_the_same_bits():
    results = results_by_isa("isa_bits")
    for isa, tensors in results.items():
        for name, wanted in results["baseline"].items():
            assert_same(tensors[name], wanted, f"{name} on {isa}")


@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_order_of_top_k_and_top_p(backend, order):
    """top_k_top_p_order.json: joint keeps an id that sequential drops, as top-k renormalises first."""
    case = json.loads((CASES / "top_k_top_p_order.json").read_text())
    expected = case["expected_joint" if order == "joint" else "expected_top_k_then_top_p"]
    rows = 8 if backend.emulated else 400
    on = backend.device
    out = backend.ops.sample(
        torch.log(torch.tensor(case["inputs"]["probs"])).repeat(rows, 1).to(on),
        torch.arange(rows).to(on),
        torch.zeros(rows, dtype=torch.int64).to(on),
        vocab_size=len(expected),
        top_k=torch.full((rows,), case["inputs"]["top_k"], dtype=torch.int32).to(on),
        top_p=torch.full((rows,), case["inputs"]["top_p"]).to(on),
        filter_order=order,
        num_logprobs=len(expected),
        logprobs_mode="processed",
    )
    support = [i for i, p in enumerate(expected) if p > 0]
    drawn = set(out[0].tolist())
    assert drawn == set(support) if rows == 400 else drawn <= set(support)
    assert out[4][0].tolist() == support + [-1] * (len(expected) - len(support))
    wanted = torch.tensor([expected[i] for i in support], dtype=torch.float64)
    assert_close(out[5][0, : len(support)].cpu().exp(), wanted, what="law")
