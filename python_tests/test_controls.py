"""sample and verify_chain under every control and method, on every backend, against the oracles:
random mixed batches, then the rows where filters are easily wrong.

The laws are enumerated in test_verify_law.py (of the oracles); here ops decide as the oracles do.
"""

import control_cases
import numpy as np
import pytest
import torch
from control_cases import check_chain, check_sample, random_controls

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
METHODS = ["token", "block", "sampled", "typical"]
VOCABS = [1, 2, 5, 255, 256, 257, 4096, 4097, 10000]
NAN, INF = float("nan"), float("inf")


def size(backend, emulated, real):
    return emulated if backend.emulated else real


def sample_case(rows, vocab, *, seed=0, dtype=torch.float32, scale=2.5, **controls):
    g = torch.Generator().manual_seed(seed)
    return {
        "logits": (torch.randn(rows, vocab, generator=g) * scale).to(dtype),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        "positions": torch.randint(0, 2**40, (rows,), generator=g),
        "vocab_size": vocab,
        **controls,
    }


def wanted_logprobs(i):
    """Another choice of what is reported for every i."""
    n = [-1, 0, 1, 5, 20, 1024][i % 6]
    return {"num_logprobs": n, "logprobs_mode": ["raw", "processed"][i // 2 % 2]}


# --- Random batches ---------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_sample(backend, dtype, vocab):
    rows = size(backend, 6, 40)
    for i in range(2):
        seed = vocab + 31 * i + DTYPES.index(dtype)
        controls = random_controls(rows, rows, vocab, seed=seed, joint=i == 1)
        case = sample_case(rows, vocab, seed=seed, dtype=dtype, **controls)
        check_sample(backend, {**case, **wanted_logprobs(seed)})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [2, 5, 257, 4097, 9000])
def test_chain(backend, vocab, method):
    if vocab == 9000 and backend.name in ("emu_hooks", "emu_asan"):
        pytest.skip("two tiles, which 4097 has, will do where every access is watched")
    batch = size(backend, 5, 30)
    for i, dtype in enumerate(DTYPES):
        check_chain(
            backend, chain_case(batch, vocab, 3, seed=vocab + i, dtype=dtype, method=method)
        )


def chain_case(batch, vocab, max_drafts, *, seed, dtype=torch.float32, **options):
    import chains

    case = chains.random_case(batch, vocab, max_drafts, seed=seed, dtype=dtype)
    rows = case["target_logits"].shape[0]
    controls = random_controls(batch, rows, vocab, seed=seed, joint=seed % 2 == 1)
    return {**case, **controls, **wanted_logprobs(seed), **options}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_chain_of_many_requests(backend, method):
    """Every branch of every method, often."""
    batch = size(backend, 60, 400)
    for vocab, scale in [(4, 0.8), (30, 2.0)]:
        case = chain_case(batch, vocab, 4, seed=vocab + 100, method=method)
        case["target_logits"] = case["target_logits"] * (scale / 2.0)
        check_chain(backend, case)


@pytest.mark.parametrize("only", ["penalties", "bias", "bitmask", "top_k", "top_p", "min_p"])
def test_each_control_alone(backend, only):
    batch = size(backend, 8, 40)
    kinds = {"edits": [only], "filters": []}
    if only in control_cases.FILTERS:
        kinds = {"edits": [], "filters": [only]}
    for vocab in (40, 5000):
        case = sample_case(
            batch, vocab, seed=vocab, **random_controls(batch, batch, vocab, **kinds)
        )
        # Processed log-probabilities see every logit through the sum, where a draw sees its own.
        reported = {"num_logprobs": 3, "logprobs_mode": "processed"}
        check_sample(backend, {**case, **reported})
        chain = chain_case(batch, vocab, 2, seed=vocab)
        chain = {k: v for k, v in chain.items() if k not in random_controls(1, 1, 2)}
        rows = chain["target_logits"].shape[0]
        controls = random_controls(batch, rows, vocab, seed=1, **kinds)
        check_chain(backend, {**chain, **controls, **reported})


def test_top_p_reached_exactly(backend):
    """Equal logits whose leading two or four hold exactly top_p of the mass: the next one is out."""
    draws = 40
    seeds, top_p = torch.arange(draws), torch.full((draws,), 0.5)
    for vocab, kept in [(4, {0, 1}), (8, {0, 1, 2, 3})]:
        logits = torch.full((draws, vocab), 1.5).to(backend.device)
        tokens = backend.ops.sample(
            logits,
            seeds.to(backend.device),
            seeds.to(backend.device),
            vocab_size=vocab,
            top_p=top_p.to(backend.device),
        )[0]
        assert set(tokens.tolist()) == kept


@pytest.mark.parametrize("draft_controls", [False, True])
@pytest.mark.parametrize("method", ["token", "block"])
def test_draft_controls_and_d2t(backend, method, draft_controls):
    batch = size(backend, 6, 30)
    watched = backend.name in ("emu_hooks", "emu_asan")  # two tiles will do there
    large = (4200, 150) if watched else (9000, 5000)
    for i, (vocab, draft_vocab) in enumerate([(9, 4), (300, 100), large]):
        case = chain_case(batch, vocab, 3, seed=i + 7, method=method, draft_controls=draft_controls)
        check_chain(backend, case)
        for increasing in (True, False):
            mapped = control_cases.with_d2t(
                case, draft_vocab, seed=i, increasing=increasing, offset=i % 2 == 0
            )
            check_chain(backend, mapped)


@pytest.mark.parametrize("increasing", [True, False])
def test_residual_loses_q_at_every_column_of_d2t(backend, increasing):
    """p is flat over 40 ids, q over the 20 that it has: a rejected draft leaves only the other 20."""
    import chains

    case = chains.repeated(np.ones((2, 40)) / 40, [7], range(24), np.ones((1, 40)) / 20)
    case = control_cases.with_d2t(case, 20, increasing=increasing, offset=False)
    case["input_ids"][1::2] = case["d2t"][3]
    tokens, accepted = check_chain(backend, case)[:2]
    after_rejection = tokens[accepted == 0, 0]
    assert len(after_rejection) > 4 and not torch.isin(after_rejection, case["d2t"]).any()


@pytest.mark.parametrize("method, drafts", [("sampled", 3), ("typical", 3), ("token", 0)])
def test_d2t_where_q_is_not_looked_at(backend, method, drafts):
    """Without edits, so that the map alone could make the call one with edits."""
    import chains

    case = chains.random_case(8, 50, drafts, seed=drafts)
    mapped = control_cases.with_d2t({**case, "draft_controls": True, "method": method}, 20)
    for n in (0, 2):
        check_chain(backend, {**mapped, "num_logprobs": n})


def test_d2t_outside_the_vocabulary(backend):
    """Draft columns without a target id take part in q's normalisation and in nothing else."""
    case = control_cases.with_d2t(chain_case(8, 50, 3, seed=3), 20)
    case["d2t"] = case["d2t"].clone()
    case["d2t"][18] = 1000
    case["d2t"][19] = -1000
    for draft_controls in (False, True):
        check_chain(backend, {**case, "draft_controls": draft_controls})


@pytest.mark.slow
def test_large_vocabulary(backend):
    vocab = 151936
    rows = size(backend, 3, 12)
    case = sample_case(rows, vocab, seed=5, dtype=torch.bfloat16)
    controls = random_controls(rows, rows, vocab, seed=5, edits=["penalties", "bias"])
    check_sample(backend, {**case, **controls, "num_logprobs": 20})


# --- Rows where filters go wrong --------------------------------------------------------------------
def filters(rows, **options):
    out = {}
    for name, value in options.items():
        dtype = torch.int32 if name == "top_k" else torch.float32
        out[name] = torch.full((rows,), value, dtype=dtype)
    return out


EDGES = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 700},
    {"top_k": 4999},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.37},
    {"top_p": 0.9999999},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"top_k": 3000, "top_p": 0.5},
    {"top_k": 3000, "top_p": 0.99, "min_p": 1e-4},
]


def edge_rows(vocab):
    g = torch.Generator().manual_seed(9)
    rows = torch.randn(12, vocab, generator=g)
    rows[0] = 0.25  # flat
    rows[1] = -0.0
    rows[1, ::2] = 0.0  # the two zeros are one value
    rows[2] = (rows[2] * 2).round() / 2  # many ties
    rows[3] = -INF
    rows[3, vocab // 2] = -3.0  # one finite
    rows[4] = -INF
    rows[4, -5:] = 1.0  # fewer finite ids than k
    rows[5] *= 1e4  # all mass on one id
    rows[6] *= 1e-3  # nearly flat, no ties
    rows[7, 1::3] = rows[7].max()  # a third of the row at the top
    rows[8, 17] = NAN
    rows[9, vocab - 1] = INF
    rows[10] = -INF
    rows[11] = torch.arange(vocab) * -1e-2
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_edge_rows(backend, edge, dtype):
    vocab = 5000
    logits = edge_rows(vocab).to(dtype)
    case = sample_case(len(logits), vocab, seed=1)
    for order in ["sequential", "joint"][: len(edge)]:
        check_sample(
            backend,
            {
                **case,
                "logits": logits,
                "filter_order": order,
                "num_logprobs": 7,
                "logprobs_mode": "processed",
                **filters(len(logits), **edge),
            },
        )


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-2, 50.0, 1e6, INF])
def test_extreme_temperatures(backend, temperature):
    rows, vocab = 4, 3000
    for options in (filters(rows, top_p=0.8), filters(rows, min_p=0.2), filters(rows, top_k=9)):
        case = sample_case(rows, vocab, seed=2, temperature=torch.full((rows,), temperature))
        check_sample(backend, {**case, **options, "logprobs_mode": "processed"})


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("vocab", [1, 5, 1023, 5000])
def test_top_logprobs(backend, vocab, mode):
    """All numbers of ids, flat rows and ties among them, with and without edits and filters."""
    logits = edge_rows(vocab) if vocab > 20 else sample_case(3, vocab)["logits"]
    rows = len(logits)
    edited = random_controls(rows, rows, vocab, seed=3, filters=[])
    filtered = random_controls(rows, rows, vocab, seed=4)
    for n, controls in [(1, {}), (1024, {}), (3, edited), (1024, edited), (1024, filtered)]:
        case = sample_case(rows, vocab, **controls)
        check_sample(backend, {**case, "logits": logits, "num_logprobs": n, "logprobs_mode": mode})


# --- Rows without a law -----------------------------------------------------------------------------
def test_rows_without_a_law(backend):
    """Masked out, biased away, NaN at a masked id, a bias of +inf, raw rows of -inf."""
    vocab, rows = 300, 9
    case = sample_case(rows, vocab, seed=4)
    logits = case["logits"]
    logits[1, 7] = NAN
    logits[2] = -INF
    logits[3, 5] = INF
    logits[6, 40:] = -INF
    masks = torch.full((4, 10), -1, dtype=torch.int32)
    masks[1] = 0  # nothing
    masks[2, :] = 0
    masks[2, 3] = 0b10010  # ids 97 and 100
    masks[3, 0] &= ~(1 << 7)  # all but 7
    offsets = torch.zeros(rows + 1, dtype=torch.int32)
    offsets[5:] = 2
    offsets[9:] = 4
    case |= {
        "token_bitmask": masks,
        "bitmask_rows": torch.tensor([1, 3, 2, 2, 2, 77, 2, 1, -1], dtype=torch.int32),
        "bias_offsets": offsets,
        "bias_ids": torch.tensor([97, 100, 4, 4]),
        "bias_values": torch.tensor([-INF, -INF, INF, -INF]),
    }
    for mode in ("raw", "processed"):
        for temperature in (1.0, 0.0):
            check_sample(
                backend,
                {
                    **case,
                    "num_logprobs": 3,
                    "logprobs_mode": mode,
                    "temperature": torch.full((rows,), temperature),
                },
            )
    check_sample(backend, {**case, **filters(rows, top_k=3)})


@pytest.mark.parametrize("method", METHODS)
def test_chains_that_end_without_a_law(backend, method):
    batch, vocab = size(backend, 10, 60), 70
    for seed in range(2):
        case = chain_case(batch, vocab, 3, seed=seed + 40, method=method, num_logprobs=2)
        g = torch.Generator().manual_seed(seed)
        rows = case["target_logits"].shape[0]
        for r in range(rows):
            kind = int(torch.randint(0, 12, (1,), generator=g))
            if kind == 0:
                case["target_logits"][r, r % vocab] = NAN
            elif kind == 1:
                case["target_logits"][r] = -INF
        case["draft_logits"][0, 0, 3] = NAN
        case["draft_logits"][1] = -INF
        case["token_bitmask"][0] = 0
        check_chain(backend, case)


# --- Off is absent ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_off_values_are_bitwise_absent(backend):
    import chains

    batch, vocab = 8, 5000
    case = chains.random_case(batch, vocab, 3, seed=11)
    rows = case["target_logits"].shape[0]
    off = {
        **filters(batch, top_k=0, top_p=1.0, min_p=0.0),
        "repetition_penalty": torch.ones(batch),
        "frequency_penalty": torch.zeros(batch),
        "presence_penalty": torch.zeros(batch),
        "token_counts": torch.ones(batch, vocab, dtype=torch.int32),
        "bias_offsets": torch.zeros(batch + 1, dtype=torch.int32),
        "bias_ids": torch.tensor([1, 2]),
        "bias_values": torch.tensor([1.0, 2.0]),
        "token_bitmask": torch.zeros(1, 157, dtype=torch.int32),
        "bitmask_rows": torch.full((rows,), -1, dtype=torch.int32),
    }
    for method in METHODS:
        for draft_controls in (False, True):
            options = {"method": method, "draft_controls": draft_controls, "num_logprobs": 2}
            wanted = chains.run(backend, {**case, **options})
            got = chains.run(backend, {**case, **options, **off})
            chains.assert_equal(got, wanted, f"{method} {draft_controls}")


def test_sampled_is_sample(backend):
    """Row j of `sampled` is bitwise what `sample` gives for it."""
    batch, vocab, drafts = 4, 5000, 2
    g = torch.Generator().manual_seed(5)
    rows = batch * (drafts + 1)
    logits = torch.randn(rows, vocab, generator=g) * 3
    controls = random_controls(batch, rows, vocab, seed=6, edits=["bias", "bitmask"])
    each = lambda t: t.repeat_interleave(drafts + 1)  # noqa: E731
    of_rows = {
        k: each(v) if torch.is_tensor(v) and v.shape == (batch,) else v for k, v in controls.items()
    }
    offsets = controls["bias_offsets"].tolist()
    spans = [(offsets[b], offsets[b + 1]) for b in range(batch) for _ in range(drafts + 1)]
    of_rows["bias_ids"] = torch.cat([controls["bias_ids"][a:z] for a, z in spans])
    of_rows["bias_values"] = torch.cat([controls["bias_values"][a:z] for a, z in spans])
    of_rows["bias_offsets"] = torch.tensor([0] + [z - a for a, z in spans]).cumsum(0).int()
    seeds, positions = torch.arange(batch), torch.arange(batch) * 100
    singles = control_cases.run_sample(
        backend,
        {
            "logits": logits,
            "seeds": each(seeds),
            "positions": (positions[:, None] + torch.arange(drafts + 1)).reshape(-1),
            "vocab_size": vocab,
            **of_rows,
            "num_logprobs": 4,
        },
    )
    tokens = singles[0].reshape(batch, drafts + 1)
    ids = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), tokens[:, :drafts]], 1)
    import chains

    out = chains.run(
        backend,
        {
            "target_logits": logits,
            "input_ids": ids.reshape(-1),
            "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * (drafts + 1),
            "seeds": seeds,
            "positions": positions,
            "max_drafts": drafts,
            "vocab_size": vocab,
            "method": "sampled",
            **controls,
            "num_logprobs": 4,
        },
    )
    assert (out[1] == drafts).all() or (singles[3] != 0).any()
    for b in range(batch):
        n = int(out[1][b]) + 1
        assert out[0][b, :n].tolist() == tokens[b, :n].tolist()
        rows_b = slice(b * (drafts + 1), b * (drafts + 1) + n)
        control_cases.assert_same(out[3][b, :n], singles[1][rows_b], "logprobs")
        control_cases.assert_same(out[4][b, :n], singles[4][rows_b], "top ids")
        control_cases.assert_same(out[5][b, :n], singles[5][rows_b], "top logprobs")
