"""verify_attention with trees, sliding windows, soft caps and sinks: against the oracle, and bit for bit
where other arguments mean the same."""

import backends
import pytest
import torch
from compare import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import verify_attention as oracle
from test_verify_attention import DTYPES, INF, NAN, cases, check, make, run


def trees(rows, seq_lens, seed=0, **options):
    tree_mask, positions = oracle.random_trees(
        torch.Generator().manual_seed(seed), rows, seq_lens, **options
    )
    return {"mask": "tree", "tree_mask": tree_mask, "positions": positions}


def with_spare(options, spare_rows):
    """Rows of no request, with garbage."""
    if "tree_mask" in options:
        options["tree_mask"] = torch.nn.functional.pad(
            options["tree_mask"], (0, 0, 0, spare_rows), value=-1
        )
    options["positions"] = torch.nn.functional.pad(
        options["positions"], (0, spare_rows), value=-(2**63)
    )
    return options


def assert_same_results(got, wanted, what=""):
    assert_same(got[0], wanted[0], f"out {what}")
    assert_same(got[1], wanted[1], f"lse {what}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, head_dim", [(2, 64), (10, 128)])
@pytest.mark.parametrize("window", [-1, 1, 5, 70])
def test_trees_match_oracle(backend, dtype, heads, head_dim, window):
    """Ragged trees of one batch, over the ends of tiles; a request that is all tree; one without rows."""
    rows, lens = [7, 3, 0, 5, 1, 4], [68, 64, 9, 5, 140, 2]
    case = make(rows, lens, heads=heads, head_dim=head_dim, page_size=9, dtype=dtype, spare_rows=2)
    check(backend, case, window=window, **with_spare(trees(rows, lens), 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [33, 100, 256])
def test_large_trees(backend, dtype, nodes):
    """More than one word of bits, and trees over several tiles and groups of rows."""
    if backend.emulated and (nodes > 100 or dtype == torch.float16):
        pytest.skip("slow")
    rows, lens = [nodes, 2], [nodes + 30, 20]
    case = make(rows, lens, heads=2, kv_heads=1, dtype=dtype)
    check(backend, case, **trees(rows, lens, seed=nodes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("window", [1, 3, 64, 100])
def test_windows_match_oracle(backend, dtype, mask, window):
    lens = [1, 3, 66, 200, 4]
    case = make([1, 3, 4, 5, 6], lens, heads=6, page_size=7, dtype=dtype, spare_rows=1)
    check(backend, case, mask=mask, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["causal", "full", "tree"])
def test_windows_far_from_the_start(backend, dtype, mask):
    """Whole tiles and segments that nobody sees, with NaN in them, in pages that do not exist."""
    rows, lens, window = [5, 2], [1100 if backend.emulated else 2700, 530], 20
    case = make(rows, lens, heads=4, page_size=16, dtype=dtype)
    options = {"mask": mask, "window": window}
    if mask == "tree":
        options |= trees(rows, lens)
    wanted = check(backend, case, **options)
    q, k_cache, v_cache, table, cu_rows, seq_lens = case
    table, k_cache, v_cache = table.clone(), k_cache.clone(), v_cache.clone()
    for b in range(2):
        first = lens[b] - rows[b] - window + 1  # of what row 0 sees
        table[b, : first // 16] = 2**31 - 1
        page, end = int(table[b, first // 16]), first % 16
        k_cache[page, :end] = v_cache[page, :end] = NAN
    got = run(backend, (q, k_cache, v_cache, table, cu_rows, seq_lens), **options)
    assert_same_results(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chain_as_a_tree_has_the_bits_of_causal(backend, dtype):
    rows, lens = [4, 40, 1], [70, 90, 600]
    case = make(rows, lens, heads=6, dtype=dtype)
    words = [w for n in rows for w in oracle.ancestor_words(range(-1, n - 1), 2)]
    words = torch.tensor(words, dtype=torch.int64)
    tree_mask = (words - (words >> 31 << 32)).int()
    positions = torch.cat([torch.arange(s - n, s) for n, s in zip(rows, lens, strict=True)])
    wanted = run(backend, case)
    assert_same_results(run(backend, case, mask="tree", tree_mask=tree_mask), wanted)
    wanted = run(backend, case, window=9)
    assert_same_results(run(backend, case, window=9, positions=positions.int()), wanted)
    options = {"mask": "tree", "tree_mask": tree_mask, "positions": positions}
    assert_same_results(run(backend, case, window=9, **options), wanted)
    every = torch.full_like(tree_mask, -1)
    wanted = run(backend, case, mask="full")
    assert_same_results(run(backend, case, mask="tree", tree_mask=every), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["causal", "full", "tree"])
def test_large_windows_have_the_bits_of_none(backend, dtype, mask):
    rows, lens = [4, 2, 3], [600, 20, 2]
    case = make(rows, lens, heads=6, dtype=dtype)
    options = trees(rows, lens) if mask == "tree" else {"mask": mask}
    wanted = run(backend, case, **options)
    for window in (600, 2**31, 2**63 - 1):
        assert_same_results(run(backend, case, window=window, **options), wanted, f"{window}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_of_any_size(backend, dtype):
    """Positions far from the places: whatever the oracle says, in whole numbers without bound."""
    rows, lens = [4, 3, 2], [40, 70, 9]
    case = make(rows, lens, dtype=dtype)
    tree = trees(rows, lens)
    far = [38, 36, 2**63 - 1, 40, -(2**63), 10, -3, 7, 2**40]
    tree["positions"] = torch.tensor(far, dtype=torch.int64)
    for window in (1, 8, 2**63 - 1):
        check(backend, case, window=window, **tree)
        check(backend, case, mask="full", positions=tree["positions"], window=window)
        check(backend, case, positions=tree["positions"], window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [-1, 6])
def test_unseen_rows_may_be_nan(backend, dtype, window):
    """NaN in K and V of a node reaches its descendants and itself, and no other row."""
    parents = [-1, 0, 0, 1, 2, 1, 4, 0]
    rows, lens = [8, 2], [67, 9]
    case = make(rows, lens, heads=6, page_size=8, dtype=dtype)
    words = oracle.ancestor_words(parents, 1) + oracle.ancestor_words([-1, 0], 1)
    options = {
        "mask": "tree",
        "tree_mask": torch.tensor(words, dtype=torch.int32),
        "positions": torch.tensor([59, 60, 60, 61, 61, 61, 62, 60, 7, 8]),
        "window": window,
    }
    clean = run(backend, case, **options)
    for node, junk in ((1, NAN), (2, INF), (6, NAN)):
        q, k_cache, v_cache, *rest = case
        k_bad, v_bad = k_cache.clone(), v_cache.clone()
        place = 59 + node
        page, offset = int(case[3][0, place // 8]), place % 8
        k_bad[page, offset] = v_bad[page, offset] = junk
        out, lse = run(backend, (q, k_bad, v_bad, *rest), **options)
        blind = [i for i in range(10) if i > 7 or not words[i][0] >> node & 1]
        seeing = sorted(set(range(10)) - set(blind))
        assert_same(out[blind], clean[0][blind], "out of rows that do not see the node")
        assert_same(lse[blind], clean[1][blind], "lse of rows that do not see the node")
        assert not torch.isfinite(out[seeing].float()).any(dim=-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [-1, 7])
def test_batch_and_padding_change_no_bit(backend, dtype, window):
    """A request alone with words of another width, bits behind its rows inverted, against the batch."""
    rows, lens = [5, 1, 3], [66, 5, 40]
    case = make(rows, lens, heads=6, page_size=16, dtype=dtype)
    options = trees(rows, lens, num_words=3)
    out, lse = run(backend, case, max_rows=90, window=window, **options)
    q, k_cache, v_cache, table, cu_rows, seq_lens = case
    for b in range(3):
        begin, end = int(cu_rows[b]), int(cu_rows[b + 1])
        words = options["tree_mask"][begin:end, :1] ^ -(1 << rows[b])
        alone = run(
            backend,
            (
                q[begin:end],
                k_cache,
                v_cache,
                table[b : b + 1],
                torch.tensor([0, rows[b]], dtype=torch.int32),
                seq_lens[b : b + 1],
            ),
            mask="tree",
            tree_mask=words,
            positions=options["positions"][begin:end].int(),
            window=window,
        )
        assert_same_results(alone, (out[begin:end], lse[begin:end]), f"of request {b}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_hangs_on_its_own_bits(backend, dtype):
    """Other rows' words and positions change; row 2 keeps its bits. Rows go through other groups."""
    rows, lens = [40], [100]
    case = make(rows, lens, heads=4, kv_heads=1, dtype=dtype)
    options = trees(rows, lens)
    out, lse = run(backend, case, **options)
    for seed in (1, 2):
        other = trees(rows, lens, seed=seed)["tree_mask"]
        other[2] = options["tree_mask"][2]
        got = run(backend, case, mask="tree", tree_mask=other)
        assert_same(got[0][2], out[2], "out")
        assert_same(got[1][2], lse[2], "lse")


def test_a_row_without_bits_sees_the_prefix_only(backend):
    """Bits are taken literally, the own one too; without a prefix there is nothing to see."""
    case = make([2, 3], [2, 30])
    options = {"mask": "tree", "tree_mask": torch.zeros(5, 1, dtype=torch.int32)}
    out, lse = check(backend, case, **options)
    assert (out[:2] == 0).all() and torch.isneginf(lse[:2]).all()
    assert torch.isfinite(lse[2:]).all()


def test_more_rows_than_words_have_bits_for(backend):
    """A request of more rows than max_rows, against the contract: no word is read outside, keys without a
    bit are not seen, rows past max_rows are not computed."""
    case = make([40], [60], heads=2, kv_heads=1)
    options = {"mask": "tree", "tree_mask": torch.full((40, 1), -1, dtype=torch.int32)}
    got = run(backend, case, max_rows=32, **options)
    padded = torch.nn.functional.pad(options["tree_mask"], (0, 1))
    wanted = run(backend, case, max_rows=40, mask="tree", tree_mask=padded)
    assert_same_results([t[:32] for t in got], [t[:32] for t in wanted])
    assert (got[0][32:] == 0).all() and torch.isneginf(got[1][32:]).all()


def test_strided_words_and_positions(backend):
    rows, lens = [5, 3], [66, 40]
    case = make(rows, lens)
    options = trees(rows, lens)
    wanted = run(backend, case, window=4, **options)
    wide = torch.full((8, 5), -1, dtype=torch.int32)
    wide[:, 2:3] = options["tree_mask"]
    twice = torch.stack([options["positions"], options["positions"] + 9], 1)
    arguments = [t.to(backend.device) for t in (*case, wide, twice)]
    out, lse = backend.ops.verify_attention(
        *arguments[:6],
        max_rows=5,
        mask="tree",
        tree_mask=arguments[6][:, 2:3],
        positions=arguments[7][:, 0],
        window=4,
    )
    assert_same_results((out.cpu(), lse.cpu()), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(dtype):
    rows, lens = [9, 3], [1700, 600]
    case = make(rows, lens, heads=6, dtype=dtype)
    options = trees(rows, lens)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append([run(backends.get("cpu"), case, window=w, **options) for w in (-1, 700)])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for got, wanted in zip(result, results[0], strict=True):
            assert_same_results(got, wanted)


# --- Soft cap and sinks ---------------------------------------------------------------------------------


def sinks_of(heads, seed=0):
    return torch.randn(heads, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.05, 1.0, 30.0])
@pytest.mark.parametrize("heads", [4, 16])
def test_soft_caps_match_oracle(backend, dtype, softcap, heads):
    rows, lens = [3, 1, 4], [70, 5, 40]
    case = make(rows, lens, heads=heads, dtype=dtype)
    check(backend, case, softcap=softcap)
    check(backend, case, softcap=softcap, scale=2.0, window=9, **trees(rows, lens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("heads", [4, 16])
def test_sinks_match_oracle(backend, dtype, softcap, heads):
    """Over several segments; large sinks, small ones and none. Rows that see nothing stay empty."""
    rows, lens = [3, 1, 4, 2], [570, 5, 2, 0]
    case = make(rows, lens, heads=heads, dtype=dtype, spare_rows=1)
    sinks = sinks_of(heads)
    sinks[:3] = torch.tensor([60.0, -60.0, -INF])
    out, lse = check(backend, case, sinks=sinks, softcap=softcap)
    blind = [4, 5, 8, 9, 10]  # places below 0, no place, no request
    assert (out[blind] == 0).all() and torch.isneginf(lse[blind]).all()
    assert torch.isfinite(lse[[0, 1, 2, 3, 6, 7]]).all()
    options = with_spare(trees(rows, lens), 1)
    check(backend, case, sinks=sinks, softcap=softcap, window=30, **options)


def test_a_soft_cap_bounds_scores(backend):
    """Scores of 1000 and -1000: what is left is the cap, and all of the first kind weigh the same."""
    case = list(make([1], [4], heads=1, kv_heads=1))
    case[0] = torch.ones(1, 1, 64)
    for place, sign in enumerate((1.0, 1.5, -1.0, -2.0)):
        page, offset = int(case[3][0, place // 16]), place % 16
        case[1][page, offset] = 1000.0 / 64 * sign
        case[2][page, offset] = float(place)
    out, lse = run(backend, tuple(case), scale=1.0, softcap=20.0)
    assert_close(out, torch.full_like(out, 0.5), what="out")
    assert_close(lse, torch.full_like(lse, 20.0).double() + torch.tensor(2.0).double().log())


@pytest.mark.parametrize("dtype", DTYPES)
def test_neutral_controls_change_no_bit(backend, dtype):
    """Sinks of -inf are none, and an off soft cap is none."""
    case = make([3, 2], [600, 40], heads=6, dtype=dtype)
    wanted = run(backend, case)
    none = torch.full((6,), -INF)
    assert_same_results(run(backend, case, sinks=none, softcap=0.0), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_rows_of_a_pass_are_one_row_calls(backend, dtype):
    """Rows go through other groups, tiles and threads alone than together."""
    rows, seq_len = 20, 90
    case = make([rows], [seq_len], heads=4, kv_heads=1, dtype=dtype)
    options = {"softcap": 1.5, "sinks": sinks_of(4), "window": 40}
    out, lse = run(backend, case, **options)
    one = torch.tensor([0, 1], dtype=torch.int32)
    for j in (0, 7, 19):
        length = torch.tensor([seq_len - rows + j + 1], dtype=torch.int32)
        alone = run(backend, (case[0][j : j + 1], *case[1:4], one, length), **options)
        assert_same_results(alone, (out[j : j + 1], lse[j : j + 1]), f"of row {j}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_unseen_places_may_be_nan(backend, dtype):
    """-inf of a hidden score comes after the cap, which would turn it into a weight."""
    case = make([4], [70], heads=2, kv_heads=1, page_size=8, dtype=dtype)
    options = {"softcap": 1.5, "sinks": sinks_of(2)}
    wanted = run(backend, case, **options)
    q, k_cache, v_cache, table, *rest = case
    k_bad, v_bad = k_cache.clone(), v_cache.clone()
    k_bad[int(table[0, 8]), 5] = v_bad[int(table[0, 8]), 5] = NAN  # place 69, of the last row
    out, lse = run(backend, (q, k_bad, v_bad, table, *rest), **options)
    assert_same_results((out[:3], lse[:3]), (wanted[0][:3], wanted[1][:3]))


def test_errors_of_soft_cap_and_sinks(backend):
    case = [t.to(backend.device) for t in make([2, 1], [20, 9])]
    ones = torch.ones(4, device=backend.device)
    for options, message in (
        ({"softcap": -1.0}, r"softcap: wanted 0 or a positive number .*, got -1"),
        ({"softcap": NAN}, "softcap: wanted 0 or a positive number .*, got nan"),
        ({"softcap": INF}, "softcap: wanted 0 or a positive number .*, got inf"),
        ({"softcap": 1e-46}, "softcap: wanted 0 or a positive number .*, got 1e-46"),
        ({"softcap": 1e-3, "scale": 1e38}, "softcap: wanted .* finite scale / softcap"),
        ({"sinks": ones.half()}, "sinks: wanted dtype float32, got float16"),
        ({"sinks": ones[1:]}, r"sinks: wanted size 4 \(Hq of q\) in dimension 0"),
        ({"sinks": ones[None]}, r"sinks: wanted shape \[Hq\]"),
        ({"sinks": torch.ones(8, device=backend.device)[::2]}, "sinks: wanted"),
    ):
        with pytest.raises(RuntimeError, match="specdec::verify_attention: " + message):
            backend.ops.verify_attention(*case, max_rows=2, **options)


def test_opcheck():
    rows, lens = [3, 2], [70, 20]
    case = tuple(t.nan_to_num(0) if t.is_floating_point() else t for t in make(rows, lens))
    options = {"max_rows": 3, "window": 8, **trees(rows, lens), "softcap": 2.0}
    options["sinks"] = sinks_of(4)
    torch.library.opcheck(torch.ops.specdec.verify_attention.default, case, options)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    options=cases(),
    mask=st.sampled_from(["causal", "full", "tree"]),
    window=st.sampled_from([-1, 1, 2, 30, 64, 200]),
    literal=st.booleans(),
    given_positions=st.booleans(),
    softcap=st.sampled_from([0.0, 0.3, 5.0]),
    with_sinks=st.booleans(),
)
def test_fuzz_cpu(options, mask, window, literal, given_positions, softcap, with_sinks):
    case = make(**options)
    rows, lens = options["rows"], options["seq_lens"]
    masks = with_spare(
        trees([*rows], lens, seed=options["seed"], num_words=1), options["spare_rows"]
    )
    if literal:  # any bits at all
        g = torch.Generator().manual_seed(options["seed"])
        shape = masks["tree_mask"].shape
        masks["tree_mask"] = torch.randint(-(2**31), 2**31, shape, generator=g).int()
    if mask != "tree":
        masks = {"mask": mask, **({"positions": masks["positions"]} if given_positions else {})}
    if with_sinks:
        masks["sinks"] = sinks_of(options["heads"], options["seed"])
    check(backends.get("cpu"), case, window=window, softcap=softcap, **masks)
