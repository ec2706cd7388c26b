"""How results are compared: the only place with tolerances (policy: CONTRIBUTING.md).

structure, movement, ids, counts   assert_same: bit for bit
floats                             assert_close: NaN and infinity positions first; then the error is
                                   at most twice that of the same formula in torch at the same dtype,
                                   both against the float64 oracle, plus a rounding floor of the
                                   output type
"""

import numpy as np
import torch

_INT_OF = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

# Rounding floors: a few units in the last place of the dtype that results are rounded to, relative
# to the largest magnitude a value of the result could be summed up from.
_FLOOR = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def bits(t):
    """The tensor's bit patterns as integers, so that NaN equals NaN and -0 differs from 0."""
    return t.detach().cpu().contiguous().view(_INT_OF[t.element_size()])


def _where(different):
    index = tuple(int(i) for i in torch.nonzero(different)[0])
    return index, int(different.sum()), different.numel()


def assert_same(got, wanted, what="result"):
    """Bitwise equality of shape, dtype and every element."""
    assert got.shape == wanted.shape, (
        f"{what}: shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    )
    assert got.dtype == wanted.dtype, f"{what}: dtype {got.dtype}, wanted {wanted.dtype}"
    different = bits(got) != bits(wanted)
    if different.any():
        index, count, total = _where(different)
        raise AssertionError(
            f"{what}: {count} of {total} elements differ, first at {index}: "
            f"{got.cpu()[index].item()} wanted {wanted.cpu()[index].item()}"
        )


def assert_close(got, oracle, peer=None, what="result", magnitude=None):
    """Floats against the float64 oracle.

    peer: the same formula by torch at the dtype of `got`; twice its error is allowed.
    magnitude: size of the numbers summed up (default: the oracle's largest value).
    """
    got64, oracle = got.detach().cpu().double(), oracle.detach().cpu().double()
    assert got64.shape == oracle.shape, f"{what}: shape {got64.shape}, wanted {oracle.shape}"
    for name, test in (
        ("NaN", torch.isnan),
        ("+inf", torch.isposinf),
        ("-inf", torch.isneginf),
    ):
        different = test(got64) != test(oracle)
        if different.any():
            index, count, total = _where(different)
            raise AssertionError(
                f"{what}: {name} at other places in {count} of {total} elements, first at {index}: "
                f"{got64[index].item()} wanted {oracle[index].item()}"
            )
    finite = torch.isfinite(oracle)
    if not finite.any():
        return
    error = torch.where(finite, (got64 - oracle).abs(), 0.0)
    scale = float(oracle[finite].abs().max()) if magnitude is None else float(magnitude)
    allowed = _FLOOR[got.dtype] * max(scale, 1e-30)
    if peer is not None:
        peer_error = torch.where(finite, (peer.detach().cpu().double() - oracle).abs(), 0.0)
        allowed += 2.0 * float(peer_error.max())
    worst = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    assert float(error.max()) <= allowed, (
        f"{what}: error {float(error.max()):.3g} at {index} above {allowed:.3g}: "
        f"{got64[index].item()} wanted {oracle[index].item()}"
    )


# Of numbers that are rounded once, from float32 sums, this part may be rounded the other way than the oracle's;
# of numbers rounded twice it is a quarter.
_OTHER_WAY = 0.02


def assert_rounded_once(got, oracle, what="result"):
    other = (bits(got) != bits(oracle.to(got.dtype))).double().mean()
    assert float(other) <= _OTHER_WAY, (
        f"{what}: {float(other):.3f} of all elements rounded otherwise"
    )


def assert_quantised(got, exact, steps, what="out"):
    """Attention over e4m3 caches against that over the values they were made from: within some steps of
    2^-4, which is what a code is at most off, relative to its value."""
    error = float((got.cpu().double() - exact).abs().max())
    assert error < steps * 2.0**-4, f"{what}: {error} off what was quantised"


# Decisions given their random numbers: exact, except where the float64 threshold lies within this
# distance (of a cumulative law; relative, of u * q against p). It bounds the float32 rounding of a
# probability: 2^-24 of an exponent of up to 2^6, plus the errors of exp2 and of the row's sum.
DECISION_BAND = 4e-6

# Laws put together by exact enumeration: of the op, whose thresholds are measured to about 1e-7, and
# of formulas in float64.
LAW_ERROR = 1e-6
FORMULA_ERROR = 1e-12


# A bound of a prepared head is above what rounding loses by this much at most, relative to the row: float32
# sums of up to 1024 products, twice.
BOUND_SLACK = 2.0**-12


def assert_formula(got, wanted, what="value", error=FORMULA_ERROR):
    """A float64 formula, or a list of them, against another way to the same number."""
    got, wanted = np.asarray(got, dtype=np.float64), np.asarray(wanted, dtype=np.float64)
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, wanted {wanted.shape}"
    assert (np.abs(got - wanted) <= error * np.maximum(1.0, np.abs(wanted))).all(), (
        f"{what}: {got}, wanted {wanted}"
    )


def assert_decisions(got, allowed, what="decision"):
    """Every decision is the oracle's, or one that crosses a threshold within DECISION_BAND.

    got: one decision per case. allowed: per case the oracle's decisions for that band, the exact one
    first. Returns the number of crossings, which must be rare.
    """
    crossings = 0
    for i, (mine, decisions) in enumerate(zip(got, allowed, strict=True)):
        if mine == decisions[0]:
            continue
        crossings += 1
        assert mine in decisions, (
            f"{what} {i}: {mine}, wanted {decisions[0]} (band: {decisions[1:4]})"
        )
    limit = 1 + len(allowed) // 100
    assert crossings <= limit, f"{what}: {crossings} of {len(allowed)} cross a threshold"
    return crossings


# Frequencies of draws at fixed seeds: within this many standard deviations of the law.
_DEVIATIONS = 5.0


def assert_rate(rate, law, count, what="rate"):
    """A relative frequency among `count` draws, or several, against probabilities. What has probability
    0 or 1 must come out never or always."""
    rate, law = np.asarray(rate, dtype=np.float64), np.asarray(law, dtype=np.float64)
    bound = _DEVIATIONS * np.sqrt(law * (1.0 - law) / count)
    assert (np.abs(rate - law) <= bound).all(), f"{what}: {rate} among {count}, wanted {law}"


# A number that was published with three decimals.
PUBLISHED_ERROR = 5e-4


def assert_counts(counted, law, what="counts"):
    """How often each outcome was drawn against its probability, by chi-squared: at most four standard deviations
    above its mean. Outcomes expected fewer than five times are one."""
    expected = law * counted.sum()
    common = expected >= 5
    chi = ((counted - expected) ** 2 / expected)[common].sum()
    rest = float(expected[~common].sum())
    if rest > 0:
        chi += (counted[~common].sum() - rest) ** 2 / rest
    freedom = int(common.sum()) - (rest <= 0)
    assert chi < freedom + 4 * (2 * freedom) ** 0.5, (
        f"{what}: chi-squared {float(chi)} of {freedom}"
    )
