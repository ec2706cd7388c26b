"""Faults seen in public KV compaction and next-round bookkeeping, by id: the smallest input that shows
them."""

import json
import pathlib

import pytest
import torch
from compare import assert_same
from huge_strides import huge_caches
from oracles import compact_kv as compact_oracle
from oracles import next_round as round_oracle
from test_compact_kv import check as check_compact
from test_compact_kv import one_request
from test_next_round import check as check_round
from test_next_round import one

CASES = pathlib.Path(__file__).resolve().parent.parent / "cases"
EOS = 2


def numbered(places, page_size=1, heads=1, head_dim=1):
    """A cache whose value is its slot."""
    cache = torch.arange(places, dtype=torch.float32).view(-1, page_size, 1, 1)
    return cache.repeat(1, 1, heads, head_dim)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# --- G01: slots of nothing fall on slot 0 -----------------------------------------------------------
@pytest.mark.parametrize("bad", [-1, 8, 2**31, 2**32 + 3, -(2**40)])
def test_G01_slots_outside_move_nothing(backend, bad):
    """At either end: row 2 has no source, row 1 has no target; the rest moves."""
    cache = numbered(8)
    for path, slots, wanted in (
        ([0, 2, 3], [3, 5, bad, 6], {5: 5.0, bad: None}),  # 2 -> 1 has no source
        ([0, 2, 3], [3, bad, 4, 6], {4: 6.0}),  # 2 -> 1 has no target, 3 -> 2 moves
    ):
        got = check_compact(backend, [cache], [], torch.tensor(slots), *one_request(4, path))[0]
        assert (got[0], got[7]) == (0.0, 7.0)
        for slot, value in wanted.items():
            assert value is None or got[slot] == value


def test_G01_places_without_a_page_get_no_slot(backend):
    out = check_round(backend, one([5], 0, seq_len=2, pages=(6, -1, 5), block_len=12))
    assert out[2].tolist() == [[27, -1, -1, -1, -1, 20, 21, 22, 23, -1, -1, -1]]


# --- G03: a draft block anchored at the last committed row ------------------------------------------
def test_G03_the_block_begins_at_the_pending_token(backend):
    """The KV holds positions 0 to 9, the pending token is at 10; then the context is clipped by 6."""
    out = check_round(backend, one([5], 0, seq_len=9))
    assert out[1].tolist() == [[10, 11, 12]] and out[3].tolist() == [10]
    assert check_round(backend, one([5], 0, seq_len=3))[1].tolist() == [[4, 5, 6]]


# --- G06: sources overwritten before they are read ---------------------------------------------------
@pytest.mark.parametrize(
    "path, wanted",
    [
        ([1, 2, 3], [1, 2, 3, 3, 4, 5, 6]),
        ([0, 2, 3, 5], [0, 2, 3, 5, 4, 5, 6]),
        ([1, 0], [1, 0, 2, 3, 4, 5, 6]),
        ([6, 5, 4, 3, 2, 1, 0], [6, 5, 4, 3, 2, 1, 0]),
        ([2, 2, 2, 2], [2, 2, 2, 2, 4, 5, 6]),
        ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]),
        ([], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
@pytest.mark.parametrize("head_dim", [1, 64, 700])
def test_G06_gather_then_scatter(backend, path, wanted, head_dim):
    cache, lists = numbered(7, head_dim=head_dim), one_request(7, path)
    for _ in range(1000 if backend.name == "cuda" else 2):
        got = check_compact(backend, [cache], [cache.half()], torch.arange(7), *lists)
        for mine in got:
            assert mine.unique(dim=3).flatten().tolist() == wanted


def test_G06_kv_slots_of_accepted_rows(backend):
    """kv_slot_split_accept_evict_sglang.json: a public op hands out the accepted rows' slots in order and
    frees the others. Here rows move instead: the first places then hold those slots' contents."""
    for case in json.loads((CASES / "kv_slot_split_accept_evict_sglang.json").read_text())["cases"]:
        slots, accepted = case["out_cache_loc"], case["accept_index"]
        assert [slots[i] for i in accepted] == case["expected_accepted"]
        lists = one_request(len(slots), accepted)
        got = check_compact(backend, [numbered(504, 4)], [], torch.tensor(slots), *lists)[0].view(
            -1
        )
        assert got[slots[: len(accepted)]].tolist() == case["expected_accepted"]
        others = [s for s in range(504) if s not in slots[: len(accepted)]]
        assert got[others].tolist() == others


# --- Kind 12: caches that are page-major, and planes of scales ---------------------------------------
def test_page_major_buffers(backend):
    """All layers in one buffer, [page, layer, K or V, place, head, channel]: caches are strided views."""
    pages, layers, page_size = 3, 2, 4
    buffer = torch.randn(
        pages, layers, 2, page_size, 2, 8, generator=torch.Generator().manual_seed(1)
    )
    on = buffer.clone().to(backend.device)
    slots, lists = torch.tensor([9, 10, 3, 0, 7]), one_request(5, [0, 2, 4])
    backend.ops.compact_kv(
        [on[:, layer, 0] for layer in range(layers)],
        [on[:, layer, 1] for layer in range(layers)],
        *[t.to(backend.device) for t in (slots, *lists)],
    )
    for layer in range(layers):
        for side in range(2):
            wanted = compact_oracle.compact_kv([buffer[:, layer, side]], slots, *lists)[0]
            assert_same(on[:, layer, side].cpu(), wanted)


@pytest.mark.parametrize("kind", ["per head", "per place"])
def test_scales_travel_with_their_bytes(backend, kind):
    """A float8 cache with a scale for every place: values after the move are those before it."""
    g = torch.Generator().manual_seed(2)
    values = torch.randn(6, 4, 3, 16, generator=g)
    heads = 3 if kind == "per head" else 1
    scale = torch.rand(6, 4, heads, 1, generator=g) + 0.5
    stored = (values / scale).to(torch.float8_e4m3fn)
    slots, lists = torch.randperm(24, generator=g)[:9], one_request(9, [0, 3, 4, 8])
    got, new_scale = check_compact(backend, [stored], [scale], slots, *lists)
    wanted = compact_oracle.compact_kv([stored.float() * scale], slots, *lists)[0]
    assert_same(got.float() * new_scale, wanted)


# --- E01: 32-bit products of slots and strides -------------------------------------------------------
def test_E01_slots_behind_2_to_31_elements(backend):
    k_cache, v_cache, slots = huge_caches(backend)
    rows = torch.arange(32, dtype=torch.bfloat16).view(4, 1, 8).to(backend.device)
    k_cache[slots, 0], v_cache[slots, 0] = rows, -rows
    lists = [t.to(backend.device) for t in one_request(4, [3, 2, 1, 0])]
    backend.ops.compact_kv([k_cache], [v_cache], slots, *lists)
    assert_same(k_cache[slots, 0], rows.flip(0))
    assert_same(v_cache[slots, 0], -rows.flip(0))


def test_E01_slots_of_large_pages(backend):
    """page * page_size beyond int32, in what next_round hands out."""
    out = check_round(backend, one([5], 0, seq_len=2**20 - 2, pages=(2**15,), page_size=2**20))
    assert out[2].tolist() == [[2**35 + 2**20 - 1, -1, -1]]


# --- E03: more requests than the y dimension of a grid has ------------------------------------------
@pytest.mark.parametrize("batch", [65536, 65537])
def test_E03_many_requests(backend, batch):
    if backend.name in ("emu_hooks", "emu_asan"):
        pytest.skip("the grid is the same in the plain build; 65537 blocks take long here")
    on = backend.device
    cache = torch.arange(2 * batch, dtype=torch.float32, device=on).view(-1, 1, 1, 1)
    path = torch.ones(batch, 1, dtype=torch.int32, device=on)
    cu_rows = torch.arange(0, 2 * batch + 1, 2, dtype=torch.int32, device=on)
    none = torch.zeros(batch, dtype=torch.int32, device=on)
    slots = torch.arange(2 * batch, device=on)
    moving = torch.arange(batch, device=on) % 256 >= 255  # the last one of 65536, few to emulate
    moving[-1] = True
    backend.ops.compact_kv([cache], [], slots, cu_rows, path, moving.int() - 1)
    assert_same(cache.view(batch, 2)[:, 0], slots.view(batch, 2)[:, 0].float() + moving)
    out = backend.ops.next_round(
        slots.view(batch, 2), none, none + 3, path, page_size=8, block_len=2, mask_token_id=9
    )
    assert_same(out[0][:, 0], slots.view(batch, 2)[:, 0])
    assert out[2].unique(dim=0).tolist() == [[12, 13]] and (out[4] == 1).all()


# --- J01: one tile assumed to cover a request -------------------------------------------------------
@pytest.mark.parametrize("width", [1023, 1024, 1025])
def test_J01_more_tokens_and_rows_than_a_tile(backend, width):
    tokens = torch.randint(10, 99, (2, width), generator=torch.Generator().manual_seed(3))
    case = {
        "tokens": tokens, "num_accepted": int32(width - 1, 2), "seq_lens": int32(0, 0),
        "block_table": torch.arange(2 * width // 16 + 1, dtype=torch.int32).expand(2, -1),
        "page_size": 16, "block_len": width, "mask_token_id": 0,
    }  # fmt: skip
    out = check_round(backend, case)
    assert out[4].tolist() == [width, 3]
    assert out[1][0].tolist() == list(range(width, 2 * width))
    assert out[1][1].tolist() == list(range(3, width + 3))
    tokens[0, width - 1] = EOS
    out = check_round(backend, case | {"stop_token_ids": torch.tensor([EOS])})
    assert out[4].tolist() == [width, 3] and out[5].tolist() == [True, False]


# --- J03: target and draft caches trimmed alike ------------------------------------------------------
@pytest.mark.parametrize("accepted", range(5))
def test_J03_what_each_cache_trims(backend, accepted):
    """4 drafts behind an anchor at 10: the target's pass wrote 5 places, the drafter's 4."""
    out = check_round(backend, one([5, 6, 7, 8, 9], accepted))
    kept = int(out[3])
    assert 10 + 5 - kept == 4 - accepted
    assert 10 + 4 - kept == 3 - accepted  # -1: the drafter has one token to catch up with


# --- J04: placeholders as the next token -------------------------------------------------------------
def test_J04_placeholders_are_no_tokens(backend):
    """Ids out of the vocabulary never leave verification; -1 does, for requests that emit nothing."""
    tokens = torch.tensor([[-1, -1, -1], [4, -1, -1], [4, 7, -1]])
    case = {
        "tokens": tokens, "num_accepted": int32(0, 0, 1), "seq_lens": int32(5, 5, 5),
        "block_table": torch.zeros(3, 4, dtype=torch.int32), "page_size": 4, "block_len": 2,
        "mask_token_id": 1,
    }  # fmt: skip
    for counts in (int32(0, 0, 1), int32(-1, 2, 2)):  # right ones, and ones that name placeholders
        out = check_round(backend, case | {"num_accepted": counts})
        assert out[0].tolist() == [[1, 1], [4, 1], [7, 1]]
        assert out[4].tolist() == [0, 1, 2] and out[3].tolist() == [5, 6, 7]


# --- J06: stop tokens and budgets inside an accepted run ---------------------------------------------
@pytest.mark.parametrize(
    "tokens, accepted, budget, emitted, finished",
    [
        ([5, EOS, 7, 8, 9], 4, 3, [5, EOS], True),
        ([5, EOS, 7, 8, 9], 4, 1, [5], True),
        ([5, 6, EOS], 2, 9, [5, 6, EOS], True),  # as the bonus
        ([5, 6, EOS], 1, 9, [5, 6], False),  # rejected
        ([5, 6, 7], 2, 3, [5, 6, 7], True),  # the budget is spent with the last one
        ([5, 6, 7], 2, 4, [5, 6, 7], False),
    ],
)
def test_J06_stop_inside_an_accepted_run(backend, tokens, accepted, budget, emitted, finished):
    case = one(tokens, accepted, seq_len=10, stop_token_ids=[EOS], max_len=[11 + budget])
    out = check_round(backend, case)
    assert tokens[: int(out[4])] == emitted and out[5].tolist() == [finished]
    assert out[3].tolist() == [10 + len(emitted)]


# --- J08: padding of the batch ------------------------------------------------------------------------
def test_J08_padding_changes_nothing(backend):
    """12 requests in a batch of 13, offsets padded with the last one; a padded row of slots."""
    g = torch.Generator().manual_seed(4)
    slots, cu_rows, path, count = compact_oracle.random_case(g, rows=(3,) * 12, padding=0)
    cache = numbered(40, 4)
    wanted = check_compact(backend, [cache], [], slots, cu_rows, path, count)[0]
    slots = torch.cat([slots, torch.tensor([39])])
    cu_rows, path = torch.cat([cu_rows, cu_rows[-1:]]), torch.cat([path, path[:1]])
    count = torch.cat([count, count[:1]])
    assert_same(check_compact(backend, [cache], [], slots, cu_rows, path, count)[0], wanted)
    case = round_oracle.random_case(g, batch=13)
    case["tokens"][12] = -1
    padded = check_round(backend, case)
    names = ["tokens", "num_accepted", "seq_lens", "block_table", "max_len"]
    alone = check_round(backend, case | {name: case[name][:12] for name in names})
    for mine, theirs in zip(padded, alone, strict=True):
        assert_same(mine[:12], theirs)


# --- J09, I07: accepted and emitted are two counts ------------------------------------------------------
def test_J09_the_bonus_token_counts(backend):
    out = check_round(backend, one([4, 5, 6], 2))
    assert out[4].tolist() == [3] and out[0][0, 0] == 6


def test_I07_padding_rows_emit_nothing(backend):
    """Requests of 2, 0, 0 and 1 rows, two of them padding: 0 tokens there, 1 for the one without drafts."""
    tokens = torch.tensor([[7, 8], [-1, -1], [-1, -1], [3, -1]])
    case = {
        "tokens": tokens, "num_accepted": int32(1, 0, 0, 0), "seq_lens": int32(4, 0, 9, 2),
        "block_table": torch.zeros(4, 4, dtype=torch.int32), "page_size": 4, "block_len": 2,
        "mask_token_id": 0,
    }  # fmt: skip
    out = check_round(backend, case)
    assert out[4].tolist() == [2, 0, 0, 1] and out[3].tolist() == [6, 0, 9, 3]


# --- Draft blocks of a public engine --------------------------------------------------------------------
def test_blocks_of_a_public_engine(backend):
    """dflash_prepare_inputs_vllm.json: ids, positions and slots of the block behind a verified pass. Its
    null page, 0, is a negative one here; slots for context parallelism are not made here."""
    for case in json.loads((CASES / "dflash_prepare_inputs_vllm.json").read_text())["cases"]:
        if "cp_rank" in case:
            continue
        starts, rejected = case["query_start"], case["num_rejected"]
        batch = len(rejected)
        block_len = case["num_speculative"] + (not case["sample_from_anchor"])
        last = case.get("next_token") or [case.get("last_sampled", 5)] * batch
        if "last_sampled_by_slot" in case:
            last = [case["last_sampled_by_slot"][slot] for slot in case["request_slot"]]
        counts = [b - a - r for a, b, r in zip(starts, starts[1:], rejected, strict=False)]
        tokens = torch.full((batch, max(counts)), -1)
        for b, count in enumerate(counts):
            tokens[b, :count] = torch.tensor([50] * (count - 1) + [last[b]])
        first = [case.get("target_positions", [0])[a] for a in starts[:-1]]
        table = torch.tensor(case.get("block_table", [[1] * 8] * batch), dtype=torch.int32)
        if case["name"].startswith("gpu"):
            table[table == 0] = -1
        out = check_round(
            backend,
            {
                "tokens": tokens,
                "num_accepted": torch.tensor(counts, dtype=torch.int32) - 1,
                "seq_lens": torch.tensor(first, dtype=torch.int32),
                "block_table": table,
                "page_size": case["block_size"],
                "block_len": block_len,
                "mask_token_id": case.get("mask_token", 0),
            },
        )
        named = ("expected_input_ids", "expected_query_positions", "expected_query_slots")
        for name, got in zip(named, out, strict=False):
            if name in case:
                assert got.flatten().tolist() == case[name], (case["name"], name)
