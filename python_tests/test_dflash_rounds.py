"""DFlash round by round: a draft pass over caches that inject_kv filled is the one over concatenated projections
of the context, whatever was rejected on the way; and the helpers around it."""

import json
import pathlib

import pytest
import torch
from compare import assert_close, assert_same
from dflash import EPS, Drafter, rms

import specdec_ext

CASES = pathlib.Path(__file__).resolve().parent / "cases"
MASK, PAGE, PAGES = 9, 4, 24


def place(table, b, position):
    return int(table[b, position // PAGE]) * PAGE + position % PAGE


class Paged:
    """A drafter's caches on a backend, of two requests with pages in any order."""

    def __init__(self, backend, drafter, generator):
        self.backend, self.on, self.drafter = backend, backend.device, drafter.to(torch.float32)
        shape = (drafter.layers, PAGES, PAGE, drafter.kv_heads, drafter.head_dim)
        self.k, self.v = ([*torch.full(shape, 7.0, device=self.on)] for _ in range(2))
        self.table = torch.randperm(PAGES, generator=generator).view(2, -1).int()
        blocks = self.drafter.blocks
        self.weight = specdec_ext.prepare_kv_weights(
            [block["k"] for block in blocks], [block["v"] for block in blocks]
        )
        self.norms = torch.stack([block["k_norm"] for block in blocks])

    def write(self, kv, layers, positions, slots, **options):
        arguments = [kv, self.norms[layers], self.drafter.cos, self.drafter.sin, positions, slots]
        options = {k: v.to(self.on) for k, v in options.items()}
        self.backend.ops.inject_kv(
            *[t.to(self.on) for t in arguments], self.k[layers], self.v[layers], eps=EPS,
            interleaved=self.drafter.interleaved, **options,
        )  # fmt: skip

    def fused(self, features):
        d = self.drafter
        features = [t.to(self.on) for t in features]
        fc, norm = d.fc.to(self.on), d.hidden_norm.to(self.on)
        return self.backend.ops.fuse_features(features, fc, norm, EPS).cpu()

    def inject(self, features, starts, cu_rows, commit_rows):
        """Rows of a verified pass, request by request."""
        rows = [
            (b, starts[b] + j)
            for b in range(2)
            for j in range(int(cu_rows[b + 1]) - int(cu_rows[b]))
        ]
        positions = torch.tensor([p for _, p in rows])
        slots = torch.tensor([place(self.table, b, p) for b, p in rows])
        kv = self.fused(features) @ self.weight.T
        d = self.drafter
        kv = kv.view(len(rows), d.layers, 2, d.kv_heads, d.head_dim)
        self.write(kv, slice(None), positions, slots, cu_rows=cu_rows, commit_rows=commit_rows)

    def draft(self, hidden, starts, positions, slots):
        """The pass over the block rows [2, N, d]; their K and V go to the caches for this pass alone."""
        d, (_, length, width) = self.drafter, hidden.shape
        hidden = hidden.reshape(-1, width)
        cu_rows = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        seq_lens = torch.tensor(starts, dtype=torch.int32) + length
        for layer, block in enumerate(d.blocks):
            x = rms(hidden, block["input_norm"])
            kv = torch.stack([d.heads(x, block["k"]), d.heads(x, block["v"])], 1)[:, None]
            self.write(kv, slice(layer, layer + 1), positions.flatten(), slots.flatten())
            q = d.queries(x, block, positions.flatten())
            lists = [t.to(self.on) for t in (self.table, cu_rows, seq_lens)]
            out, _ = self.backend.ops.verify_attention(
                q.to(self.on), self.k[layer], self.v[layer], *lists, max_rows=length, mask="full"
            )
            hidden = d.finish(hidden, out.cpu(), block)
        return hidden.view(2, length, width)


def with_block(backend, **arguments):
    """draft_block on a backend's device."""
    moved = {k: v.to(backend.device) if torch.is_tensor(v) else v for k, v in arguments.items()}
    return [t.cpu() for t in specdec_ext.draft_block(**moved)]


@pytest.mark.parametrize(
    "interleaved, rotary_dim", [(False, 64), (True, 64), (False, 24), (True, 24)]
)
@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_injected_context_is_concatenated_context(
    backend, interleaved, rotary_dim, sample_from_anchor
):
    g = torch.Generator().manual_seed(rotary_dim)
    drafter = Drafter(g, interleaved, rotary_dim)
    paged = Paged(backend, drafter, g)
    exact, plain = drafter, drafter.to(torch.float32)
    starts, drafts = [5, 3], 3
    context = [[torch.randn(n, size, generator=g) for size in drafter.features] for n in starts]
    paged.inject(
        [torch.cat(pair) for pair in zip(*context, strict=True)],
        [0, 0],
        torch.tensor([0, 5, 8], dtype=torch.int32),
        torch.tensor([5, 3], dtype=torch.int32),
    )
    for accepted in ([0, 3], [1, 0], [3, 2]):
        _, positions, slots, rows = with_block(
            backend, anchor_ids=torch.tensor([4, 5]),
            positions=torch.tensor(starts, dtype=torch.int32), block_table=paged.table,
            page_size=PAGE, num_drafts=drafts, mask_token_id=MASK, sample_from_anchor=sample_from_anchor,
        )  # fmt: skip
        length = positions.shape[1]
        hidden = torch.randn(2, length, drafter.width, generator=g)
        got = paged.draft(hidden, starts, positions, slots).flatten(0, 1)[rows]
        for b in range(2):
            wanted, peer = (
                m.concatenated(
                    [t.to(m.fc.dtype) for t in context[b]], hidden[b].to(m.fc.dtype), starts[b]
                )
                for m in (exact, plain)
            )
            assert_close(got[b], wanted[length - drafts :], peer[length - drafts :], f"request {b}")
        # Verification: rows for the anchor and all drafts, of which some are rejected.
        cu_rows = torch.tensor([0, drafts + 1, 2 * drafts + 2], dtype=torch.int32)
        features = [torch.randn(2 * drafts + 2, n, generator=g) for n in drafter.features]
        before = [cache.clone() for cache in paged.k + paged.v]
        commit = torch.tensor(accepted, dtype=torch.int32) + 1
        paged.inject(features, starts, cu_rows, commit)
        for old, new in zip(before, paged.k + paged.v, strict=True):
            written = {
                place(paged.table, b, starts[b] + j)
                for b in range(2)
                for j in range(accepted[b] + 1)
            }
            changed = (old != new).flatten(2).any(2).flatten().nonzero().flatten().tolist()
            assert set(changed) == written
        for b in range(2):
            first = b * (drafts + 1)
            for i, t in enumerate(features):
                context[b][i] = torch.cat([context[b][i], t[first : first + accepted[b] + 1]])
            starts[b] += accepted[b] + 1


# --- draft_block ------------------------------------------------------------------------------------
def test_blocks_of_a_public_engine(backend):
    """dflash_prepare_inputs_vllm.json: the block behind a verified pass, both read-outs, and the rows that its
    context is written by. A null page, 0, is a negative one here."""
    for case in json.loads((CASES / "dflash_prepare_inputs_vllm.json").read_text())["cases"]:
        if "cp_rank" in case:  # slots for context parallelism are not made here
            continue
        starts, rejected = case["query_start"], case["num_rejected"]
        batch = len(rejected)
        ids = case.get("next_token") or [case.get("last_sampled", 5)] * batch
        if "last_sampled_by_slot" in case:
            ids = [case["last_sampled_by_slot"][slot] for slot in case["request_slot"]]
        counts = [b - a - r for a, b, r in zip(starts, starts[1:], rejected, strict=False)]
        at = case.get("target_positions") or list(range(2, 6))
        table = torch.tensor(case.get("block_table", [[1] * 8] * batch), dtype=torch.int32)
        if case["name"].startswith("gpu"):
            table[table == 0] = -1
        out = with_block(
            backend,
            anchor_ids=torch.tensor(ids),
            positions=torch.tensor([at[a] + n for a, n in zip(starts, counts, strict=False)]).int(),
            block_table=table,
            page_size=case["block_size"],
            num_drafts=case["num_speculative"],
            mask_token_id=case.get("mask_token", 0),
            sample_from_anchor=case["sample_from_anchor"],
        )
        named = (
            "expected_input_ids", "expected_query_positions", "expected_query_slots",
            "expected_sample_rows",
        )  # fmt: skip
        for name, got in zip(named, out, strict=True):
            if name in case:
                assert got.flatten().tolist() == case[name], (case["name"], name)
        if case["name"] == "gpu_reject_suffix":
            assert (out[1] + 1).flatten().tolist() == case["expected_sample_positions"]
        if "expected_context_slots" not in case or case["name"].startswith("cpu"):
            continue
        # Rejected rows of the pass, and rows on the null page, write nothing.
        page = case["block_size"]
        slots = torch.tensor([int(table[0, p // page]) * page + p % page for p in at])
        slots[[int(table[0, p // page]) < 0 for p in at]] = -1
        cache = torch.zeros(16, page, 1, 2, device=backend.device)
        table_of_angles = [t.to(backend.device) for t in (torch.ones(16, 1), torch.zeros(16, 1))]
        backend.ops.inject_kv(
            torch.ones(len(at), 1, 2, 1, 2, device=backend.device), None, *table_of_angles,
            torch.tensor(at).to(backend.device), slots.to(backend.device), [cache], [cache.clone()],
            eps=0.0, cu_rows=torch.tensor(starts).int().to(backend.device),
            commit_rows=torch.tensor(counts).int().to(backend.device),
        )  # fmt: skip
        written = cache[..., 0].flatten().nonzero().flatten().tolist()
        assert written == [s for s in case["expected_context_slots"] if s >= 0]


def test_G03_the_block_begins_at_the_anchor(backend):
    """The KV holds positions 0 to 9, the anchor is at 10; then the context is clipped to its last 4."""
    for held in (10, 4):
        for sample_from_anchor in (True, False):
            _, positions, slots, rows = with_block(
                backend, anchor_ids=torch.tensor([5]), positions=torch.tensor([held]).int(),
                block_table=torch.arange(4).int()[None], page_size=4, num_drafts=3, mask_token_id=MASK,
                sample_from_anchor=sample_from_anchor,
            )  # fmt: skip
            first = int(not sample_from_anchor)
            assert positions.tolist() == slots.tolist() == [list(range(held, held + 3 + first))]
            assert rows.tolist() == [list(range(first, first + 3))]


def test_inactive_requests_and_limits(backend):
    ids, positions, slots, rows = with_block(
        backend, anchor_ids=torch.tensor([-1, 5, 6, 7], dtype=torch.int32),
        positions=torch.tensor([3, 3, 3, 0]).int(), block_table=torch.zeros(4, 1).int(), page_size=6,
        num_drafts=2, mask_token_id=MASK, sample_from_anchor=False,
        max_len=torch.tensor([99, 4, 5, 99]).int(),
    )  # fmt: skip
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[MASK] * 3, [MASK] * 3, [6, MASK, MASK], [7, MASK, MASK]]
    assert positions.tolist() == [[0] * 3, [0] * 3, [3, 4, 4], [0, 1, 2]]
    assert slots.tolist() == [[-1] * 3, [-1] * 3, [3, 4, -1], [0, 1, 2]]
    assert rows.tolist() == [[1, 2], [4, 5], [7, 8], [10, 11]]


def test_no_requests():
    out = specdec_ext.draft_block(
        torch.zeros(0).long(), torch.zeros(0).int(), torch.zeros(0, 2).int(), page_size=2, num_drafts=3,
        mask_token_id=0, sample_from_anchor=True,
    )  # fmt: skip
    assert [tuple(t.shape) for t in out] == [(0, 3)] * 4


def test_draft_block_compiles():
    case = torch.tensor([3, 4]), torch.tensor([5, 1]).int(), torch.arange(8).view(2, 4).int()

    def step(ids, positions, table):
        return specdec_ext.draft_block(
            ids,
            positions,
            table,
            page_size=2,
            num_drafts=3,
            mask_token_id=0,
            sample_from_anchor=False,
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(*case), step(*case), strict=True):
        assert_same(got, wanted)


def test_draft_block_takes_positions_of_both_types():
    table = torch.tensor([[4, 2, 0]], dtype=torch.int32)
    options = {"page_size": 4, "num_drafts": 3, "mask_token_id": 9, "sample_from_anchor": True}
    anchor, at = torch.tensor([5]), torch.tensor([6])
    narrow, wide = (
        specdec_ext.draft_block(anchor, at.to(t), table, **options)
        for t in (torch.int32, torch.int64)
    )
    for a, b in zip(narrow, wide, strict=True):
        assert_same(a, b)
    *_, slots, _ = specdec_ext.draft_block(anchor, torch.tensor([2**40]), table, **options)
    assert (slots == -1).all()


def test_draft_block_errors():
    good = {
        "anchor_ids": torch.tensor([1]), "positions": torch.tensor([3]).int(),
        "block_table": torch.zeros(1, 4).int(), "page_size": 4, "num_drafts": 3, "mask_token_id": 0,
        "sample_from_anchor": True,
    }  # fmt: skip
    for changed, message in [
        ({"anchor_ids": torch.tensor([[1]])}, r"draft_block: anchor_ids: wanted shape \[B\], got \[1, 1\]"),
        ({"positions": torch.ones(1)}, r"draft_block: positions: wanted dtype int32 or int64, got float32"),
        ({"positions": torch.ones(2).int()}, r"draft_block: positions: wanted size 1 \(B of anchor_ids\), got 2"),
        ({"positions": None}, r"draft_block: positions: wanted a tensor, got NoneType"),
        ({"anchor_ids": torch.ones(1)}, r"draft_block: anchor_ids: wanted dtype int32 or int64, got float32"),
        ({"block_table": torch.ones(1, 2)}, r"draft_block: block_table: wanted dtype int32, got float32"),
        ({"max_len": torch.ones(1)}, r"draft_block: max_len: wanted dtype int32, got float32"),
        ({"num_drafts": 2**31}, r"draft_block: num_drafts: wanted 1 to 4096, got 2147483648"),
        ({"page_size": 0}, r"draft_block: page_size: wanted at least 1, got 0"),
        ({"sample_from_anchor": "x"}, r"draft_block: sample_from_anchor: wanted True or False, got x"),
        ({"positions": torch.tensor(3).int()}, r"draft_block: positions: wanted shape \[B\]"),
        ({"num_drafts": 0}, r"draft_block: num_drafts: wanted 1 to 4096, got 0"),
        ({"block_table": torch.zeros(2, 4).int()}, r"block_table: wanted size 1"),
    ]:  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            specdec_ext.draft_block(**(good | changed))


# --- prepare_kv_weights -----------------------------------------------------------------------------
def test_stacked_weights_give_kv_of_every_layer():
    g = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 3, 2 * 4, 5, generator=g)
    x = torch.randn(6, 5, generator=g)
    weight = specdec_ext.prepare_kv_weights(list(k), tuple(v))
    assert weight.shape == (3 * 2 * 8, 5) and weight.is_contiguous()
    kv = specdec_ext.row_linear(x, weight).view(6, 3, 2, 2, 4)
    for layer in range(3):
        for side, one in enumerate((k, v)):
            wanted = specdec_ext.row_linear(x, one[layer])
            assert_same(kv[:, layer, side].flatten(1), wanted)


def test_stacked_weights_errors():
    a, b = torch.zeros(8, 5), torch.zeros(8, 4)
    for k, v, message in [
        ([], [], "k_weights: wanted at least one layer, got none"),
        ([a], [a, a], "v_weights: wanted 1 layers, got 2"),
        ([a[0]], [a[0]], r"k_weights\[0\]: wanted shape \[Hkv \* D, d\], got \[5\]"),
        ([a, b], [a, a], r"k_weights\[1\]: wanted the shape of k_weights\[0\]"),
        (
            [a, a],
            [a, a.half()],
            r"v_weights\[1\]: wanted the dtype of k_weights\[0\], torch.float32, got",
        ),
    ]:
        with pytest.raises(RuntimeError, match="specdec_ext.prepare_kv_weights: " + message):
            specdec_ext.prepare_kv_weights(k, v)
