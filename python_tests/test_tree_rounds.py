"""Whole tree rounds: after verify_tree, compact_kv and next_round, caches and lengths are those of plain
decoding of the same tokens, bit for bit, round after round."""

import random
import zlib

import pytest
import torch
from compare import assert_same
from oracles.tree_links import random_parents

VOCAB, STOP, MASK, BLOCK = 12, 0, 11, 5
BATCH, LAYERS, HEADS, HEAD_DIM = 3, 2, 2, 12
MAX_NODES, MAX_DEPTH, COLUMNS = 9, 5, 60
ROUNDS = 25


def kv_of(prefix):
    """K and V of all layers at the place of the last token, which depend on all tokens up to it: random
    bytes of that prefix."""
    seed = zlib.crc32(bytes(prefix))
    data = bytearray(random.Random(seed).randbytes(2 * LAYERS * HEADS * HEAD_DIM * 2))
    return torch.frombuffer(data, dtype=torch.float16).view(2 * LAYERS, HEADS, HEAD_DIM)


def make_caches(num_pages, page_size, layout, device):
    """K of all layers, then V, with bytes of no token."""
    nhd, hnd = (num_pages, page_size, HEADS, HEAD_DIM), (num_pages, HEADS, page_size, HEAD_DIM)
    if layout == "interleaved":
        both = [
            torch.full((num_pages, 2, *nhd[1:]), 7.0, dtype=torch.float16) for _ in range(LAYERS)
        ]
        both = [t.to(device) for t in both]
        return [t[:, 0] for t in both] + [t[:, 1] for t in both]
    shape = nhd if layout == "NHD" else hnd
    caches = [torch.full(shape, 7.0, dtype=torch.float16, device=device) for _ in range(2 * LAYERS)]
    return [c if layout == "NHD" else c.transpose(1, 2) for c in caches]


class Engine:
    """Requests on one cache; `plain` is what plain decoding would have in its cache."""

    def __init__(self, backend, seed, page_size, layout):
        self.ops, self.on, self.page_size = backend.ops, backend.device, page_size
        self.g = torch.Generator().manual_seed(seed)
        pages = BATCH * COLUMNS
        self.caches = make_caches(pages, page_size, layout, self.on)
        self.table = torch.randperm(pages, generator=self.g).view(BATCH, COLUMNS).int()
        self.tokens = [[] for _ in range(BATCH)]
        self.max_len = [0] * BATCH
        self.counts = {"moved": 0, "rejected": 0, "stopped": 0, "full": 0, "idle": 0}
        for b in range(BATCH):
            self.start(b)

    def number(self, low, high):
        return int(torch.randint(low, high, (1,), generator=self.g))

    def slot(self, b, place):
        page, offset = divmod(place, self.page_size)
        return int(self.table[b, page]) * self.page_size + offset

    def write(self, b, place, prefix):
        page, offset = divmod(self.slot(b, place), self.page_size)
        for cache, kv in zip(self.caches, kv_of(prefix), strict=True):
            cache[page, offset] = kv.to(self.on)

    def start(self, b):
        """A new request, whose KV up to its anchor is in the cache."""
        self.tokens[b] = [self.number(1, VOCAB) for _ in range(self.number(1, 7))]
        self.max_len[b] = min(
            len(self.tokens[b]) + self.number(1, 40), COLUMNS * self.page_size - MAX_NODES
        )
        self.max_len[b] = max(self.max_len[b], len(self.tokens[b]) + 1)
        for place in range(len(self.tokens[b]) - 1):
            self.write(b, place, self.tokens[b][: place + 1])

    def draft(self, b):
        """(parents, ids, prefixes of the nodes); a request may sit out a round."""
        if self.number(0, 10) == 0:
            return [], [], []
        nodes = self.number(1, MAX_NODES + 1)
        parents = random_parents(
            self.g, nodes, ["any", "deep", "chain"][self.number(0, 3)]
        ).tolist()
        ids, prefixes = [self.tokens[b][-1]], [self.tokens[b]]
        for u in range(1, nodes):
            ids.append(self.number(0 if self.number(0, 3) == 0 else 1, VOCAB))
            prefixes.append([*prefixes[parents[u]], ids[u]])
        return parents, ids, prefixes

    def logits_of(self, trees, rows):
        """Random, with some child of most nodes likely."""
        logits = torch.randn(rows, VOCAB, generator=self.g)
        row = 0
        for parents, ids, _ in trees:
            for u in range(len(ids)):
                children = [ids[c] for c in range(len(ids)) if parents[c] == u]
                if children:
                    logits[row, children[self.number(0, len(children))]] += 4.0
                row += 1
        return logits

    def round(self):
        trees = [self.draft(b) for b in range(BATCH)]
        counts = [len(ids) for _, ids, _ in trees]
        cu_rows = torch.tensor([0, *counts]).cumsum(0).int()
        seq_lens = torch.tensor([len(t) - 1 for t in self.tokens], dtype=torch.int32)
        slots = []
        for b, (_, _, prefixes) in enumerate(trees):
            for u, prefix in enumerate(prefixes):
                slots.append(self.slot(b, int(seq_lens[b]) + u))
                self.write(b, int(seq_lens[b]) + u, prefix)
        before = [cache.clone() for cache in self.caches]
        rows = sum(counts)
        int32 = lambda values: torch.tensor(values, dtype=torch.int32, device=self.on)  # noqa: E731
        int64 = lambda values: torch.tensor(values, dtype=torch.int64, device=self.on)  # noqa: E731
        slots, cu_rows = int64(slots), cu_rows.to(self.on)
        tokens, path, num_accepted, *_ = self.ops.verify_tree(
            self.logits_of(trees, rows).to(self.on),
            int64([i for _, ids, _ in trees for i in ids]),
            int32([p for parents, _, _ in trees for p in parents]),
            cu_rows,
            torch.randint(0, 2**62, (BATCH,), generator=self.g).to(self.on),
            seq_lens.long().to(self.on),
            MAX_DEPTH,
            vocab_size=VOCAB,
        )
        self.ops.compact_kv(
            self.caches[:LAYERS], self.caches[LAYERS:], slots, cu_rows, path, num_accepted
        )
        out = self.ops.next_round(
            tokens,
            num_accepted,
            seq_lens.to(self.on),
            self.table.to(self.on),
            page_size=self.page_size,
            block_len=BLOCK,
            mask_token_id=MASK,
            stop_token_ids=int64([STOP]),
            max_len=int32(self.max_len),
        )
        self.untouched(before, slots)
        for b in range(BATCH):
            drafts, accepted = counts[b] - 1, int(num_accepted[b])
            self.counts["moved"] += path[b, : accepted + 1].tolist() != list(range(accepted + 1))
            self.counts["rejected"] += accepted < drafts
            self.check(b, [t[b].tolist() for t in out], tokens[b].tolist(), accepted, counts[b] > 0)

    def untouched(self, before, slots):
        """Places that hold no row of this pass are as they were."""
        pages, page_size = self.caches[0].shape[:2]
        others = torch.ones(pages * page_size, dtype=torch.bool, device=self.on)
        others[slots] = False
        others = others.view(pages, page_size)
        for now, then in zip(self.caches, before, strict=True):
            assert_same(now[others], then[others])

    def check(self, b, result, tokens, accepted, active):
        input_ids, positions, slots, seq_len, num_emitted, finished = result
        # Plain decoding: one token after the other, until it stops.
        if active:
            for token in tokens[: accepted + 1]:
                self.tokens[b].append(token)
                if token == STOP or len(self.tokens[b]) >= self.max_len[b]:
                    break
        done = active and (self.tokens[b][-1] == STOP or len(self.tokens[b]) >= self.max_len[b])
        assert finished == done and seq_len == len(self.tokens[b]) - 1
        assert num_emitted <= accepted + 1 and (num_emitted > 0) == active
        for place in range(seq_len):
            page, offset = divmod(self.slot(b, place), self.page_size)
            got = torch.stack([cache[page, offset] for cache in self.caches]).cpu()
            assert_same(got, kv_of(self.tokens[b][: place + 1]), f"request {b}, place {place}")
        if not active or done:
            assert (input_ids, positions, slots) == ([MASK] * BLOCK, [0] * BLOCK, [-1] * BLOCK)
            self.counts["idle"] += not active
        else:
            places, limit = range(seq_len, seq_len + BLOCK), self.max_len[b]
            assert input_ids == [self.tokens[b][-1]] + [MASK] * (BLOCK - 1)
            assert positions == [min(place, limit - 1) for place in places]
            assert slots == [self.slot(b, place) if place < limit else -1 for place in places]
        if done:
            self.counts["stopped" if self.tokens[b][-1] == STOP else "full"] += 1
            self.start(b)


@pytest.mark.parametrize(
    "seed, page_size, layout",
    [
        (0, 1, "NHD"),
        (1, 2, "HND"),
        (2, 3, "interleaved"),
        (3, 4, "NHD"),
        (4, 5, "HND"),
        (5, 16, "interleaved"),
        (6, 7, "NHD"),
        (7, 64, "HND"),
    ],
)
def test_rounds_leave_what_plain_decoding_would(backend, seed, page_size, layout):
    engine = Engine(backend, seed, page_size, layout)
    for _ in range(ROUNDS):
        engine.round()
    assert engine.counts["moved"] > 3 and engine.counts["rejected"] > 10, engine.counts
    assert engine.counts["stopped"] + engine.counts["full"] > 1 and engine.counts["idle"] > 0
