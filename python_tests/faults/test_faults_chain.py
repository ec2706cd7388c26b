"""Faults seen in public chain verifiers and samplers, by id: the smallest input that shows them.

Seeds with a given random number were found by search; each use checks that it is the number.
"""

import chains
import numpy as np
import pytest
import torch
from chains import assert_equal, check, coins, logits_of, repeated, run
from compare import assert_rate, assert_same
from huge_strides import PICKED, ROWS, STRIDE, huge

from specdec_ext._philox import ACCEPT, BONUS, RESIDUAL, SAMPLE, uniform

NAN, INF = float("nan"), float("inf")
ALMOST_ONE = 1.0 - 2.0**-24  # the largest number there is
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# (index, purpose) -> number at position 0 -> seed
SEEDS = {
    (1, ACCEPT): {0.0: 17976797, 0.5: 6158807, ALMOST_ONE: 23386201},
    (1, RESIDUAL): {
        0.0: 19551888,
        0.25: 42798857,
        0.5: 45313734,
        0.75: 56427149,
        ALMOST_ONE: 8025062,
    },
    (0, BONUS): {0.0: 8458898, 0.25: 27354653, 0.5: 13684251, 0.75: 3904932, ALMOST_ONE: 13079668},
    (0, SAMPLE): {
        0.0: 22616265,
        0.25: 38101827,
        0.5: 27761314,
        0.75: 49199079,
        ALMOST_ONE: 8183275,
    },
}


def seed_of(number, index, purpose):
    seed = SEEDS[index, purpose][number]
    assert uniform(seed, 0, index, purpose) == number
    return seed


def sample(backend, logits, seeds, **options):
    on = backend.device
    seeds = torch.as_tensor(seeds, dtype=torch.int64)
    out = backend.ops.sample(
        logits.to(on),
        seeds.to(on),
        torch.zeros_like(seeds).to(on),
        vocab_size=options.pop("vocab_size", logits.shape[1]),
        **options,
    )
    return [t.cpu() for t in out]


# --- A01: NaN rows become ids past the vocabulary, or pass unnoticed --------------------------------
@pytest.mark.parametrize("vocab", [5, 8193, 151936])
@pytest.mark.parametrize("where", ["row", "lane", "infinity", "bonus", "draft"])
def test_A01_nan_is_flagged_and_stays_in_its_request(backend, vocab, where):
    g = torch.Generator().manual_seed(vocab)
    target, draft = torch.randn(4, vocab, generator=g), torch.randn(2, 1, vocab, generator=g)
    target[0] += torch.where(torch.arange(vocab) == 2, 40.0, 0.0)  # draft 2 is accepted where asked
    case = {
        "target_logits": target,
        "input_ids": torch.tensor([0, 2, 0, 2]),
        "cu_rows": torch.tensor([0, 2, 4], dtype=torch.int32),
        "seeds": torch.tensor([3, 4]),
        "positions": torch.tensor([5, 6]),
        "max_drafts": 1,
        "vocab_size": vocab,
        "draft_logits": draft,
    }
    clean = run(backend, case)
    best = int(target[1].argmax())
    if where == "row":
        target[0] = NAN
        wanted = ([0, -1], 0, 1)
    elif where == "lane":
        target[0, vocab - 1] = NAN
        wanted = ([2, -1], 0, 1)  # the finite argmax, and the request ends
    elif where == "infinity":
        target[0, 4] = INF
        wanted = ([2, -1], 0, 1)
    elif where == "bonus":
        target[1, (best + 1) % vocab] = NAN
        wanted = ([2, best], 1, 1)
    else:
        draft[0, 0, vocab - 1] = NAN
        wanted = ([2, -1], 0, 2)  # drawn from the target, which is almost one-hot at 2
    for greedy in (False, True):
        options = {"temperature": torch.zeros(2)} if greedy else {}
        out = check(backend, {**case, **options})
        if greedy and where == "draft":
            wanted = ([2, best], 1, 0)  # a greedy request never reads q
        assert (out[0][0].tolist(), int(out[1][0]), int(out[2][0])) == wanted
        if not greedy:
            assert_equal([t[1:] for t in out], [t[1:] for t in clean], "of the neighbour")
        rows = torch.stack([target[0], target[2]])
        if where in ("row", "lane", "infinity"):
            tokens, logprob, lse, status, *_ = sample(backend, rows, [3, 4], **options)
            assert (int(tokens[0]), int(status[0])) == (wanted[0][0], 1)
            alone = sample(
                backend, rows[1:], [4], **({"temperature": torch.zeros(1)} if greedy else {})
            )
            assert_same(tokens[1:], alone[0])
            assert_same(lse[1:], alone[2])


# --- A02: lanes past the vocabulary tie with lanes of no residual -----------------------------------
@pytest.mark.parametrize("vocab", [8193, 10000, 151936])
def test_A02_recovered_id_is_inside_the_vocabulary(backend, vocab):
    p, q = np.zeros(vocab), np.zeros(vocab)
    p[0] = q[1] = 1.0
    n = 3 if backend.emulated else 30
    seeds = [seed_of(ALMOST_ONE, 1, RESIDUAL), seed_of(0.0, 1, RESIDUAL), *range(n)]
    for draft_law in ([q], None):
        case = repeated([p, p], [1], seeds[: 4 if vocab > 10000 else None], draft_law)
        wide = torch.full((case["target_logits"].shape[0], vocab + 64), INF)  # columns past V
        wide[:, :vocab] = case["target_logits"]
        tokens, accepted, status, *_ = check(backend, {**case, "target_logits": wide})
        assert (tokens == torch.tensor([0, -1])).all() and (accepted == 0).all()
        assert (status == 0).all()


def test_A02_a_residual_without_mass_falls_back_to_the_target(backend):
    """q exceeds p at the draft by a rounding step only: the largest number rejects, all residual lanes
    together have less mass than counts, and the token still has p > 0."""
    vocab = 8193
    p = torch.full((2, vocab), -INF)
    p[:, [3, 5000, 8192]] = 0.0
    q = p[:1].clone()
    q[0, 3] = 2.4e-6  # residual mass 5e-7
    seeds = [seed_of(ALMOST_ONE, 1, ACCEPT), seed_of(0.0, 1, ACCEPT), *range(20)]
    n = len(seeds)
    case = {
        "target_logits": p.repeat(n, 1),
        "input_ids": torch.tensor([0, 3]).repeat(n),
        "cu_rows": (torch.arange(n + 1) * 2).int(),
        "seeds": torch.tensor(seeds),
        "positions": torch.zeros(n, dtype=torch.int64),
        "max_drafts": 1,
        "vocab_size": vocab,
        "draft_logits": q.repeat(n, 1, 1),
    }
    tokens, accepted, *_ = check(backend, case)
    assert accepted[:2].tolist() == [0, 1]
    assert set(tokens[tokens >= 0].tolist()) <= {3, 5000, 8192}
    # One-hot: all but 1.5e-8 of the mass is at the draft, and the largest number may reject it.
    almost = torch.full((2, vocab), -INF)
    almost[:, 8192] = 0.0
    almost[:, 17] = -18.0
    case.update(target_logits=almost.repeat(n, 1), input_ids=torch.tensor([0, 8192]).repeat(n))
    case.update(draft_logits=None)
    assert (check(backend, case)[0][:, 0] == 8192).all()


# --- A03: a draft of probability 0 is accepted at the edge of the numbers ---------------------------
def test_A03_zero_probability_is_never_accepted(backend):
    seeds = [seed_of(0.0, 1, ACCEPT), seed_of(ALMOST_ONE, 1, ACCEPT), *range(50)]
    p = [0.0, 0.25, 0.75]
    for q in (None, [[0.5, 0.25, 0.25]], [[1.0, 0.0, 0.0]]):
        tokens, accepted, *_ = check(backend, repeated([p, p], [0], seeds, q))
        assert (accepted == 0).all() and (tokens[:, 0] > 0).all()


def test_A03_half_open_buckets(backend):
    """Equal masses make every edge exact: number k/4 draws id k + 1, in all three draws."""
    flat = [0.0, 0.25, 0.25, 0.25, 0.25]
    wanted = {0.0: 1, 0.25: 2, 0.5: 3, 0.75: 4, ALMOST_ONE: 4}
    for number, token in wanted.items():
        residual = repeated([flat, flat], [0], [seed_of(number, 1, RESIDUAL)])
        assert int(check(backend, residual)[0][0, 0]) == token
        residual = repeated([flat, flat], [0], residual["seeds"], [[1.0, 0.0, 0.0, 0.0, 0.0]])
        assert int(check(backend, residual)[0][0, 0]) == token
        bonus = repeated([flat], [], [seed_of(number, 0, BONUS)])
        assert int(check(backend, bonus)[0][0, 0]) == token
        assert int(sample(backend, logits_of([flat]), [seed_of(number, 0, SAMPLE)])[0]) == token
    # The entry's own case, whose edge is not exact in float32: on either side of it.
    p = [0.0, 0.25, 0.75]
    below = chains.seeds_with(0, 1, RESIDUAL, 0.2499, 0.24999)
    above = chains.seeds_with(0, 1, RESIDUAL, 0.25001, 0.2501)
    tokens, *_ = check(backend, repeated([p, p], [0], [SEEDS[1, RESIDUAL][0.0], *below, *above]))
    assert tokens[:, 0].tolist() == [1, 1, 2]


def test_A03_accept_is_strict(backend):
    """0.5 < 0.5 is false; one step below is true."""
    p = [0.5, 0.5, 0.0]
    below = chains.seeds_with(0, 1, ACCEPT, 0.4999, 0.5)
    seeds = [
        seed_of(0.5, 1, ACCEPT),
        *below,
        seed_of(0.0, 1, ACCEPT),
        seed_of(ALMOST_ONE, 1, ACCEPT),
    ]
    tokens, accepted, *_ = run(backend, repeated([p, p], [0], seeds))
    assert accepted.tolist() == [0, 1, 1, 0]
    assert tokens[[0, 3], 0].tolist() == [1, 1]
    # p = q accepts for every number, the largest included.
    q = [0.1, 0.2, 0.7]
    for draft in range(3):
        out = run(backend, repeated([q, q], [draft], seeds, [q]))
        assert (out[1] == 1).all()


# --- A05: counters run over the padded width --------------------------------------------------------
@pytest.mark.parametrize("padding", [-INF, NAN, 0.0])
def test_A05_padded_chain(backend, padding):
    vocab = 3
    law = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    target = torch.full((6, vocab), padding)
    target[:3] = law
    target[3] = torch.tensor([-INF, -INF, 0.0])
    draft = torch.full((1, 5, vocab), padding)
    draft[0, :3] = law
    case = {
        "target_logits": target,
        "input_ids": torch.tensor([2, 1, 0, 1, -1, -1]),
        "cu_rows": torch.tensor([0, 6], dtype=torch.int32),
        "positions": torch.tensor([9]),
        "max_drafts": 5,
        "vocab_size": vocab,
        "draft_logits": draft,
    }
    for seed in range(20):
        tokens, accepted, status, *_ = check(backend, {**case, "seeds": torch.tensor([seed])})
        assert tokens[0].tolist() == [1, 0, 1, 2, -1, -1]
        assert (int(accepted), int(status)) == (3, 0)


# --- A06: one number for the accept test and the residual -------------------------------------------
def test_A06_the_residual_has_its_own_number(backend):
    p, q = [0.2, 0.4, 0.4], [[0.8, 0.1, 0.1]]
    pool = np.arange(1 << 15)
    accept, residual = coins(pool, 0, 1, ACCEPT), coins(pool, 0, 1, RESIDUAL)
    seeds = []
    for number in (0.1, 0.6):  # accept number 0.9 both times
        near = (np.abs(accept - 0.9) < 0.05) & (np.abs(residual - number) < 0.05)
        seeds.append(int(pool[near][0]))
    tokens, accepted, *_ = check(backend, repeated([p, p], [0], seeds, q))
    assert accepted.tolist() == [0, 0] and tokens[:, 0].tolist() == [1, 2]
    # Reuse would draw id 1 for a third of the rejections: accept numbers .25...625 of .25..1.
    n = 300 if backend.emulated else 20000
    tokens, accepted, *_ = run(backend, repeated([p, p], [0], range(n), q))
    rejected = accepted == 0
    ones = float((tokens[rejected, 0] == 1).double().mean())
    assert_rate(ones, 0.5, int(rejected.sum()))
    low = rejected & torch.from_numpy(accept[:n] < 0.5) if n <= len(accept) else rejected
    ones = float((tokens[low, 0] == 1).double().mean())
    assert_rate(ones, 0.5, int(low.sum()))


def test_A06_repeats_are_bit_identical(backend):
    repeats, vocab = (
        (3, 9000) if backend.emulated else (1000 if backend.name == "cuda" else 20, 151936)
    )
    case = chains.random_case(3, vocab, 2, seed=6, dtype=torch.bfloat16)
    case = {k: v.to(backend.device) if torch.is_tensor(v) else v for k, v in case.items()}
    wanted = run(backend, case)
    for _ in range(repeats):
        assert_equal(run(backend, case), wanted)


# --- A09: a greedy draft verified with its soft law -------------------------------------------------
@pytest.mark.slow
def test_A09_one_hot_drafts_need_the_one_hot_mode(backend):
    p, q = [0.5, 0.5], [[0.6, 0.4]]
    n = 400 if backend.emulated else 40000
    flag = {"draft_is_one_hot": torch.ones(n, dtype=torch.bool)}
    for one_hot in (repeated([p, p], [0], range(n)), repeated([p, p], [0], range(n), q, **flag)):
        tokens, accepted, *_ = run(backend, one_hot)
        assert (tokens[accepted == 0, 0] == 1).all(), "the residual of a one-hot draft excludes it"
        assert_rate(float((tokens[:, 0] == 0).double().mean()), 0.5, n)
    # What goes wrong otherwise, as the docstring says: the soft law accepts 5/6 of these drafts.
    tokens, *_ = run(backend, repeated([p, p], [0], range(n), q))
    assert_rate(float((tokens[:, 0] == 0).double().mean()), 5 / 6, n)


# --- A10: the residual went through a softmax -------------------------------------------------------
def test_A10_the_residual_is_divided_by_its_sum(backend):
    p, q = [0.7, 0.2, 0.1], [[0.1, 0.6, 0.3]]
    n = 60 if backend.emulated else 600
    seeds = [seed_of(0.0, 1, RESIDUAL), seed_of(0.5, 1, RESIDUAL), seed_of(ALMOST_ONE, 1, RESIDUAL)]
    seeds += chains.seeds_with(0, 1, RESIDUAL, 0.9985, 0.9995, 20) + list(range(n))
    tokens, accepted, *_ = check(backend, repeated([p, p], [1], seeds, q))
    rejected = accepted == 0
    assert rejected.sum() > n // 2
    assert (tokens[rejected, 0] == 0).all()
    assert coins(seeds, 0, 1, RESIDUAL)[rejected.numpy()].max() > 0.99


def test_A10_a_small_residual_is_still_the_residual(backend):
    """Masses of 5e-3 and 4e-4 are far from nothing: every rejection draws their only id."""
    for gap, low in ((5e-3, 0.991), (4e-4, 0.9993)):
        p, q = [0.5, 0.3, 0.2], [[0.5 + gap, 0.3, 0.2 - gap]]
        seeds = chains.seeds_with(0, 1, ACCEPT, low, 1.0, 10)
        tokens, accepted, *_ = check(backend, repeated([p, p], [0], seeds, q))
        assert (accepted == 0).any() and (tokens[accepted == 0, 0] == 2).all()


def test_A10_a_residual_of_rounding_noise_is_not_drawn_from(backend):
    """A mass of 5e-7 counts as none: the token comes from p, whatever lane the noise favours."""
    p, q = [0.5, 0.3, 0.2], [[0.5 + 5e-7, 0.3, 0.2 - 5e-7]]
    seeds = [5785936, 8313617, 9144070, 14189404]  # of 2^24, those with an accept number above
    assert coins(seeds, 0, 1, ACCEPT).min() > 1 - 4e-7
    tokens, accepted, *_ = run(backend, repeated([p, p], [0], seeds, q))
    assert accepted.tolist() == [0] * 4
    u = coins(seeds, 0, 1, RESIDUAL)
    assert tokens[:, 0].tolist() == [0 if x < 0.5 else 1 if x < 0.8 else 2 for x in u]


# --- A13: the accept number is stuck at 0 -----------------------------------------------------------
@pytest.mark.slow
def test_A13_rare_drafts_are_rarely_accepted(backend):
    n = {"emu": 1000, "emu_hooks": 200, "emu_asan": 200}.get(backend.name, 100000)
    q = [[1.0, 0.0]]
    for draft_law in (q, None):
        case = repeated([[0.001, 0.999], [0.5, 0.5]], [0], range(n), draft_law)
        tokens, accepted, *_ = run(backend, case)
        rate = float(accepted.double().mean())
        assert_rate(rate, 0.001, n)
        assert (tokens[accepted == 0, 0] == 1).all()
        case = repeated([[0.0, 1.0], [0.5, 0.5]], [0], range(n), draft_law)
        assert (run(backend, case)[1] == 0).all()


# --- A17: tie rules differ between draft, verify and plain decoding ---------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_A17_ties_take_the_lowest_id_everywhere(backend, dtype):
    vocab = 20000
    logits = torch.zeros(vocab)
    logits[[3, 15000]] = 7.0
    with_nan = logits.clone()
    with_nan[10] = NAN
    rows = torch.stack([logits, logits, logits, logits, with_nan, logits]).to(dtype)
    case = {
        "target_logits": rows,
        "input_ids": torch.tensor([0, 3, 0, 15000, 0, 3]),
        "cu_rows": torch.tensor([0, 2, 4, 6], dtype=torch.int32),
        "seeds": torch.arange(3),
        "positions": torch.arange(3),
        "max_drafts": 1,
        "vocab_size": vocab,
        "temperature": torch.zeros(3),
    }
    tokens, accepted, status, *_ = check(backend, case)
    assert tokens.tolist() == [[3, 3], [3, -1], [3, -1]]
    assert accepted.tolist() == [1, 0, 0] and status.tolist() == [0, 0, 1]
    greedy = torch.zeros(2, device=backend.device)
    assert sample(backend, rows[[0, 4]], [0, 0], temperature=greedy)[0].tolist() == [3, 3]


# --- A19: the search falls off the end --------------------------------------------------------------
def test_A19_the_largest_number_draws_the_last_id_with_mass(backend):
    p = [0.3, 0.3, 0.3999, 0.0, 0.0]
    last = [0.0, 0.0, 0.0, 0.0, 1.0]
    for probabilities, token in ((p, 2), (last, 4)):
        near_one = chains.seeds_with(0, 0, SAMPLE, 0.9999, 1.0)
        for seed in [seed_of(ALMOST_ONE, 0, SAMPLE), *near_one]:
            assert sample(backend, logits_of([probabilities]), [seed])[0].tolist() == [token]
        bonus = repeated([probabilities], [], [seed_of(ALMOST_ONE, 0, BONUS)])
        assert check(backend, bonus)[0].tolist() == [[token]]
        residual = repeated([probabilities] * 2, [3], [seed_of(ALMOST_ONE, 1, RESIDUAL)])
        assert check(backend, residual)[0][0, 0] == token
        drawn = repeated([probabilities] * 2, [3], residual["seeds"], [[0.0, 0.0, 0.0, 1.0, 0.0]])
        assert check(backend, drawn)[0][0, 0] == token
    # All mass at zero: flagged, id 0.
    tokens, _, _, status, *_ = sample(backend, torch.full((1, 5), -INF), [0])
    assert (int(tokens), int(status)) == (0, 1)
    out = check(backend, repeated([[0.0] * 5], [], [0]))
    assert (out[0].tolist(), out[2].tolist()) == ([[0]], [1])


@pytest.mark.parametrize("vocab", [4096, 4097, 9000, 151936])
def test_A19_long_rows_with_a_tail_of_no_mass(backend, vocab):
    logits = torch.full((1, vocab), -INF)
    g = torch.Generator().manual_seed(vocab)
    logits[0, : vocab - 700] = torch.randn(vocab - 700, generator=g)
    token = sample(backend, logits, [seed_of(ALMOST_ONE, 0, SAMPLE)])[0]
    # 1 - 2^-24 of the mass: within the last 1e-6 of it.
    p = torch.softmax(logits[0].double(), 0)
    assert p[int(token)] > 0 and float(p[int(token) + 1 :].sum()) < 2e-6


# --- E01: products of row and stride in 32 bits -----------------------------------------------------
@pytest.mark.slow
def test_E01_row_strides_of_sample(backend):
    logits = huge(backend, (ROWS, 8), (STRIDE, 1), torch.bfloat16)
    for i, r in enumerate(PICKED):
        logits[r] = torch.nn.functional.one_hot(torch.tensor(2 * i + 1), 8) * 90.0 - 45.0
    zeros = torch.zeros(ROWS, dtype=torch.int64, device=backend.device)
    tokens = backend.ops.sample(logits, zeros, zeros, vocab_size=8)[0]
    assert tokens[PICKED].tolist() == [1, 3, 5, 7]


def test_E01_row_strides_of_target_logits_and_ids(backend):
    target = huge(backend, (ROWS, 8), (STRIDE, 1), torch.bfloat16)
    ids = huge(backend, (ROWS,), (STRIDE,), torch.int32)
    cu_rows = torch.tensor([0, 1, 2047, 2047, 2049, 2098, 2100], dtype=torch.int32)
    on = backend.device
    for i, r in enumerate([0, 2047, 2048, 2098, 2099]):
        target[r] = torch.nn.functional.one_hot(torch.tensor(i + 1), 8) * 90.0 - 45.0
    ids[2048], ids[2099] = 2, 4
    # Requests of one row: 0; two rows: 2047 and 2048, 2098 and 2099 (others: zeros, never compared).
    tokens, accepted, *_ = backend.ops.verify_chain(
        target,
        ids,
        cu_rows.to(on),
        torch.zeros(6, dtype=torch.int64, device=on),
        torch.zeros(6, dtype=torch.int64, device=on),
        1,
        vocab_size=8,
    )
    assert tokens[[0, 3, 5]].tolist() == [[1, -1], [2, 3], [4, 5]]
    assert accepted[[0, 3, 5]].tolist() == [0, 1, 1]


@pytest.mark.parametrize("strides", [(STRIDE * 2, STRIDE, 1), (8, 8 * STRIDE, 1)])
def test_E01_strides_of_draft_logits(backend, strides):
    """Request and draft strides: q is one-hot far behind 2^31 elements, so that id decides."""
    shape = (1100, 2, 8) if strides[0] > strides[1] else (2, 300, 8)
    draft = huge(backend, shape, strides, torch.bfloat16)
    picked = [(1, 0), (1023, 1), (1024, 0), (1099, 1)] if shape[1] == 2 else [(1, 299), (0, 257)]
    on, max_drafts = backend.device, shape[1]
    for row, j in picked:
        # p is flat over 8 ids, q one-hot at the draft 5 of row j: acceptance is 1/8, residual without 5.
        draft[row, : j + 1] = 0.0
        draft[row, j] = torch.nn.functional.one_hot(torch.tensor(5), 8) * 90.0 - 45.0
        n = 4 if backend.emulated else 16
        rows = j + 2
        tokens, accepted, status, *_ = backend.ops.verify_chain(
            torch.zeros(n * rows, 8, device=on),
            torch.tensor([0] + [1] * j + [5]).repeat(n).to(on),
            (torch.arange(n + 1) * rows).int().to(on),
            torch.arange(n).to(on),
            torch.zeros(n, dtype=torch.int64, device=on),
            max_drafts,
            vocab_size=8,
            draft_logits=draft,
            draft_rows=torch.full((n,), row, dtype=torch.int32, device=on),
        )
        tokens, accepted = tokens.cpu(), accepted.cpu()
        coin = coins(np.arange(n), 0, j + 1, ACCEPT)
        wanted = torch.from_numpy(np.where(coin < 1 / 8, j + 1, j)).int()
        assert_same(accepted, wanted, f"accepted with q at {row}, {j}")
        assert (tokens[accepted == j, j] != 5).all() and (status == 0).all()


@pytest.mark.slow
def test_E01_strides_of_seeds_and_positions(backend):
    if backend.name == "cuda":
        pytest.skip("16 GB of device memory for one argument")
    seeds = huge(backend, (ROWS,), (STRIDE,), torch.int64)
    seeds[PICKED] = torch.tensor([5, 6, 7, 8])
    g = torch.Generator().manual_seed(1)
    row = torch.randn(1, 64, generator=g)
    logits = row.expand(ROWS, 64)
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    wanted = sample(backend, row.expand(4, 64), [5, 6, 7, 8])[0]
    assert_same(backend.ops.sample(logits, seeds, zeros, vocab_size=64)[0][PICKED], wanted)
    by_position = backend.ops.sample(logits, zeros, seeds, vocab_size=64)[0][PICKED]
    direct = backend.ops.sample(
        row.expand(4, 64), torch.zeros(4).long(), torch.tensor([5, 6, 7, 8]), vocab_size=64
    )[0]
    assert_same(by_position, direct)
