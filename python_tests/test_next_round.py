"""next_round: every output element against the oracle, on every backend."""

import backends
import pytest
import torch
from compare import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import next_round as oracle
from tree_cases import soil

POSITIONAL = ["tokens", "num_accepted", "seq_lens", "block_table"]


def run(backend, case):
    batch, block_len = case["tokens"].shape[0], case["block_len"]
    wide = 2 * batch * block_len  # int64
    soil(wide, wide, wide, batch, batch)
    return backend.call("next_round", POSITIONAL, case)


def check(backend, case):
    """The op against the oracle; returns the op's results."""
    out = run(backend, case)
    for name, mine, theirs in zip(oracle.NAMES, out, oracle.next_round(**case), strict=True):
        assert_same(mine, theirs, name)
    return out


def one(tokens, num_accepted, seq_len=10, pages=(0, 1, 2, 3, 4, 5, 6, 7), **options):
    """A case of one request."""
    case = {
        "tokens": torch.tensor([tokens]),
        "num_accepted": torch.tensor([num_accepted], dtype=torch.int32),
        "seq_lens": torch.tensor([seq_len], dtype=torch.int32),
        "block_table": torch.tensor([pages], dtype=torch.int32),
        "page_size": 4,
        "block_len": 3,
        "mask_token_id": 99,
    }
    for name, dtype in (("max_len", torch.int32), ("stop_token_ids", torch.int64)):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=dtype)
    return case | options


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("seed", range(8))
def test_matches_oracle(backend, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    sizes = {
        "batch": 1 + 5 * seed,
        "width": 1 + seed,
        "block_len": seed * seed,
        "page_size": 1 + seed,
    }
    check(backend, oracle.random_case(g, dtype=dtype, limits=seed % 2 == 0, **sizes))


def test_a_round_by_hand(backend):
    """Two drafts accepted behind position 10: tokens at 11 to 13, the block from 13 on, over a page border."""
    out = check(backend, one([5, 6, 7, -1], 2, pages=(9, 9, 9, 20, 3)))
    assert [t.tolist() for t in out] == [
        [[7, 99, 99]], [[13, 14, 15]], [[81, 82, 83]], [13], [3], [False],
    ]  # fmt: skip
    out = check(backend, one([5, 6, 7, 8], 3, pages=(9, 9, 9, 20, 3)))
    assert out[1].tolist() == [[14, 15, 16]] and out[2].tolist() == [[82, 83, 12]]


@pytest.mark.parametrize(
    "max_len, emitted, finished, positions, slots",
    [
        (100, 3, False, [13, 14, 15], [13, 14, 15]),
        (15, 3, False, [13, 14, 14], [13, 14, -1]),  # one more token fits: it would be at 14
        (14, 3, True, [0, 0, 0], [-1, -1, -1]),  # full with the last token
        (13, 2, True, [0, 0, 0], [-1, -1, -1]),
        (11, 0, True, [0, 0, 0], [-1, -1, -1]),  # full before
        (2, 0, True, [0, 0, 0], [-1, -1, -1]),
        (-(2**31), 0, True, [0, 0, 0], [-1, -1, -1]),
        (2**31 - 1, 3, False, [13, 14, 15], [13, 14, 15]),
    ],
)
def test_max_len(backend, max_len, emitted, finished, positions, slots):
    out = check(backend, one([5, 6, 7, -1], 2, max_len=[max_len]))
    assert out[4].tolist() == [emitted] and out[5].tolist() == [finished]
    assert out[3].tolist() == [10 + emitted]
    assert out[1].tolist() == [positions] and out[2].tolist() == [slots]


@pytest.mark.parametrize(
    "seq_len, emitted, finished",
    [
        (2**31 - 1, 0, True),
        (2**31 - 2, 0, True),
        (2**31 - 3, 1, True),
        (2**31 - 5, 3, True),
        (2**31 - 6, 3, False),
    ],
)
def test_a_length_ends_at_the_largest_int32(backend, seq_len, emitted, finished):
    """Without max_len: what does not fit ends the request, as a limit of 2^31 - 1 tokens does."""
    case = one([5, 6, 7, -1], 2, seq_len=seq_len, block_len=6)
    out = check(backend, case)
    assert out[3].tolist() == [seq_len + emitted]
    assert out[4].tolist() == [emitted] and out[5].tolist() == [finished]
    limited = run(backend, case | {"max_len": torch.tensor([2**31 - 1], dtype=torch.int32)})
    for mine, theirs, name in zip(limited, out, oracle.NAMES, strict=True):
        assert_same(mine, theirs, name)
    if not finished:  # the anchor at 2^31 - 3, one more place, then none
        assert out[1].tolist() == [[2**31 - 3] + [2**31 - 2] * 5]


@pytest.mark.parametrize(
    "stops, emitted, finished",
    [
        ([], 3, False),
        ([-1, -5], 3, False),
        ([8], 3, False),  # behind the accepted ones
        ([7], 3, True),  # the last one
        ([5], 1, True),
        ([7, 6], 2, True),  # the first of two in the tokens, not in the list
        ([2**32 + 6], 3, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_stop_tokens(backend, stops, emitted, finished, dtype):
    case = one([5, 6, 7, 8], 2, stop_token_ids=stops)
    case["tokens"] = case["tokens"].to(dtype)
    out = check(backend, case)
    assert out[4].tolist() == [emitted] and out[5].tolist() == [finished]


def test_stop_and_limit_together(backend):
    """Whichever comes first; the stop token at the limit is both."""
    for max_len, emitted in ((12, 1), (13, 2), (14, 2)):
        out = check(backend, one([5, 6, 7], 2, stop_token_ids=[6], max_len=[max_len]))
        assert out[4].tolist() == [emitted] and out[5].tolist() == [True]


@pytest.mark.parametrize("num_accepted, emitted", [(-(2**31), 1), (-1, 1), (4, 4), (2**31 - 1, 4)])
def test_num_accepted_is_clamped(backend, num_accepted, emitted):
    assert check(backend, one([5, 6, 7, 8], num_accepted))[4].tolist() == [emitted]


def test_negative_ids_are_never_emitted(backend):
    out = check(backend, one([5, 6, -1, 8], 3))
    assert out[4].tolist() == [2] and out[0][0, 0] == 6
    for tokens in ([-1, 6, 7, 8], [-5, -1, -1, -1]):
        out = check(backend, one(tokens, 2, max_len=[3], stop_token_ids=[6, -1]))
        assert [t.tolist() for t in out] == [
            [[99, 99, 99]], [[0, 0, 0]], [[-1, -1, -1]], [10], [0], [False],
        ]  # fmt: skip


def test_pages(backend):
    """A negative page and columns that are not there: slot -1, and the places after them go on."""
    case = one([5], 0, seq_len=2, pages=(7, -1, 2**31 - 1), block_len=12)
    out = check(backend, case)
    last = (2**31 - 1) * 4  # does not fit int32
    assert out[2].tolist() == [[31, *[-1] * 4, last, last + 1, last + 2, last + 3, -1, -1, -1]]
    check(backend, one([5], 0, seq_len=-3, block_len=6))  # places below 0 have no slot
    check(backend, one([5], 0, pages=()))
    check(backend, one([5, 6], 1, seq_len=2**31 - 5))


@pytest.mark.parametrize(
    "batch, width, block_len", [(0, 3, 2), (3, 0, 2), (3, 1, 0), (2, 1, 1), (0, 0, 0)]
)
def test_sizes(backend, batch, width, block_len):
    g = torch.Generator().manual_seed(1)
    case = oracle.random_case(g, batch=batch, width=max(width, 1), block_len=block_len)
    case["tokens"] = case["tokens"][:, :width]
    out = check(backend, case)
    assert out[0].shape == (batch, block_len) and out[3].shape == (batch,)


def test_request_alone_and_in_any_batch(backend):
    g = torch.Generator().manual_seed(2)
    case = oracle.random_case(g, batch=9)
    together = run(backend, case)
    for b in range(9):
        names = [*POSITIONAL, "max_len"]
        alone = run(backend, case | {name: case[name][b : b + 1] for name in names})
        for mine, theirs in zip(alone, together, strict=True):
            assert_same(mine[0], theirs[b])


def test_arguments_are_not_written(backend):
    case = oracle.random_case(torch.Generator().manual_seed(3))
    before = {k: v.clone() for k, v in case.items() if torch.is_tensor(v)}
    run(backend, case)
    for name, tensor in before.items():
        assert_same(case[name], tensor, name)


def test_strides(backend):
    """Rows of tokens and of the block table any distance apart."""
    case = oracle.random_case(torch.Generator().manual_seed(4))
    wanted = run(backend, case)
    for name in ("tokens", "block_table"):
        t = case[name]
        wide = torch.full((t.shape[0], t.shape[1] + 3), 5, dtype=t.dtype, device=backend.device)
        view = wide[:, 2:-1]
        view.copy_(t)
        for mine, theirs in zip(run(backend, case | {name: view}), wanted, strict=True):
            assert_same(mine, theirs, name)


def test_errors_name_op_argument_wanted_got(backend):
    case = oracle.random_case(torch.Generator().manual_seed(5))
    bad = [
        ({"tokens": case["tokens"].float()}, r"next_round: tokens: wanted dtype int32 or int64, got float32"),
        ({"tokens": case["tokens"][0]}, r"tokens: wanted shape \[B, K\+1\], got \[5\]"),
        ({"tokens": case["tokens"][:, ::2]}, r"tokens: wanted stride 1 in the last dimension"),
        ({"num_accepted": case["num_accepted"][1:]}, r"num_accepted: wanted size 7 \(B of tokens\)"),
        ({"num_accepted": case["num_accepted"].long()}, r"num_accepted: wanted dtype int32, got int64"),
        ({"seq_lens": case["seq_lens"].long()}, r"seq_lens: wanted dtype int32, got int64"),
        ({"seq_lens": case["seq_lens"].repeat(2)[::2]}, r"seq_lens: wanted a contiguous tensor"),
        ({"block_table": case["block_table"][1:]}, r"block_table: wanted size 7 \(B of tokens\)"),
        ({"block_table": case["block_table"].long()}, r"block_table: wanted dtype int32, got int64"),
        ({"stop_token_ids": case["stop_token_ids"][None]}, r"stop_token_ids: wanted shape \[S\]"),
        ({"stop_token_ids": case["stop_token_ids"].float()}, r"stop_token_ids: wanted dtype int32 or int64"),
        ({"max_len": case["max_len"].long()}, r"max_len: wanted dtype int32, got int64"),
        ({"max_len": case["max_len"][1:]}, r"max_len: wanted size 7 \(B of tokens\)"),
        ({"page_size": 0}, r"page_size: wanted a number from 1 to 2\^31 - 1, got 0"),
        ({"block_len": -1}, r"block_len: wanted a number from 0 to 2\^31 - 1, got -1"),
        ({"tokens": case["tokens"].int(), "mask_token_id": 2**31},
         r"mask_token_id: wanted a number of the dtype of tokens, got 2147483648"),
    ]  # fmt: skip
    for change, message in bad:
        with pytest.raises(RuntimeError, match=message):
            backend.call("next_round", POSITIONAL, case | change)


def test_opcheck_and_compile():
    case = oracle.random_case(torch.Generator().manual_seed(6))
    tensors = [case[name] for name in POSITIONAL]
    options = {k: v for k, v in case.items() if k not in POSITIONAL}
    bare = {k: v for k, v in options.items() if not torch.is_tensor(v)}
    for given_options in (options, bare):
        torch.library.opcheck(torch.ops.specdec.next_round.default, tensors, given_options)
    wanted = oracle.next_round(**case)
    for dynamic in (False, True):
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
        def step(*tensors, **options):
            return torch.ops.specdec.next_round(*tensors, **options)

        for mine, theirs in zip(step(*tensors, **options), wanted, strict=True):
            assert_same(mine, theirs)


# --- Fuzz -----------------------------------------------------------------------------------------
@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_fuzz(backend_name, data):
    batch, width = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 40))
    int32 = st.integers(-(2**31), 2**31 - 1)

    def numbers(likely, *shape):
        count = torch.Size(shape).numel()
        values = st.lists(st.one_of(likely, likely, int32), min_size=count, max_size=count)
        return torch.tensor(data.draw(values), dtype=torch.int32).view(shape)

    case = {
        "tokens": numbers(st.integers(-1, 30), batch, width),
        "num_accepted": numbers(st.integers(-1, 41), batch),
        # Sums of lengths beyond int32 have no right result.
        "seq_lens": numbers(st.integers(0, 30), batch).clamp(max=2**31 - 100),
        "block_table": numbers(st.integers(-1, 9), batch, data.draw(st.integers(0, 7))),
        "page_size": data.draw(st.sampled_from([1, 3, 16, 2**31 - 1])),
        "block_len": data.draw(st.integers(0, 40)),
        "mask_token_id": data.draw(st.integers(-1, 99)),
    }
    if data.draw(st.booleans()):
        case["stop_token_ids"] = numbers(st.integers(-1, 30), data.draw(st.integers(0, 4)))
    if data.draw(st.booleans()):
        case["max_len"] = numbers(st.integers(0, 60), batch)
    check(backends.get(backend_name), case)


def pytest_generate_tests(metafunc):
    if "backend_name" in metafunc.fixturenames:
        metafunc.parametrize("backend_name", backends.available())
