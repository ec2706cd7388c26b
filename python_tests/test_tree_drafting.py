"""Rounds of drafting and verification with trees that expand_tree and build_tree made: a tree of one branch is
the chain, bit for bit, and a bushy one leaves in the cache what the accepted path alone would have left."""

import pytest
import torch
from compare import assert_same
from oracles import build_tree as oracle
from tree_cases import check_links

import specdec_ext

VOCAB, HEADS, HEAD_DIM, PAGE, PAGES, BATCH = 40, 2, 64, 16, 12, 2
ROUNDS = 3


class Model:
    """One layer of attention over a paged cache between an embedding and a head; also a drafter."""

    def __init__(self, backend, seed):
        g = torch.Generator().manual_seed(seed)
        self.ops, self.on = backend.ops, backend.device
        width = HEADS * HEAD_DIM
        random = lambda *shape: torch.randn(*shape, generator=g).to(self.on)  # noqa: E731
        self.qkv, self.head = random(3, VOCAB, HEADS, HEAD_DIM), random(VOCAB, width) * 0.3
        self.drafts = random(VOCAB, VOCAB) * 1.5  # by the token before
        self.k, self.v = torch.zeros(2, PAGES, PAGE, HEADS, HEAD_DIM, device=self.on)
        self.table = torch.randperm(PAGES, generator=g).view(BATCH, -1).int().to(self.on)
        self.seeds = torch.randint(0, 2**62, (BATCH,), generator=g).to(self.on)

    def slots(self, places):
        return self.table.long().gather(1, places // PAGE) * PAGE + places % PAGE

    def forward(self, ids, seq_lens, **mask):
        """Logits of [B, n] rows behind seq_lens places, written to the next ones; and their slots."""
        count = ids.shape[1]
        q, k, v = self.qkv[:, ids.flatten()]
        slots = self.slots(seq_lens[:, None] + torch.arange(count, device=self.on)).flatten()
        self.ops.append_kv(k, v, self.k, self.v, slots)
        cu_rows = (torch.arange(BATCH + 1) * count).int().to(self.on)
        out, _ = self.ops.verify_attention(
            q, self.k, self.v, self.table, cu_rows, (seq_lens + count).int(), max_rows=count, **mask
        )
        logits = self.ops.row_linear(out.flatten(1), self.head)
        return logits + 4.0 * self.drafts[ids.flatten()], slots, cu_rows

    def grow(self, anchors, topk, depth):
        """Candidates of all depths by the drafter: (tokens, scores, parents)."""

        def drafter(prefixes):
            last = [[p[-1] if p else int(anchors[b]) for p in prefixes[b]] for b in range(BATCH)]
            return self.drafts[torch.tensor(last, device=self.on)]

        def expand(logits, scores):
            out = self.ops.expand_tree(logits, scores.to(self.on), topk, vocab_size=VOCAB)
            return [t.cpu() for t in out]

        return oracle.grow(drafter, BATCH, topk, depth, expand)

    def tree_round(self, anchors, seq_lens, topk, depth, num_nodes, options):
        grown = [t.to(self.on) for t in self.grow(anchors, topk, depth)]
        ids, parents, mask, positions, _, _, status = self.ops.build_tree(
            *grown, anchors, seq_lens, num_nodes
        )
        assert (status == 0).all()
        logits, slots, cu_rows = self.forward(
            ids, seq_lens, mask="tree", tree_mask=mask.flatten(0, 1), positions=positions.flatten()
        )
        tokens, path, accepted, status, *_ = self.ops.verify_tree(
            logits, ids.flatten(), parents.flatten(), cu_rows, self.seeds, seq_lens, depth,
            vocab_size=VOCAB, **options,
        )  # fmt: skip
        assert (status == 0).all()
        self.ops.compact_kv([self.k], [self.v], slots, cu_rows, path, accepted)
        return tokens, accepted, ids

    def chain_round(self, anchors, seq_lens, depth, options):
        tokens, _, _ = self.grow(anchors, 1, depth)
        ids = torch.cat([anchors[:, None], tokens.to(self.on)], 1)
        logits, _, cu_rows = self.forward(ids, seq_lens)
        tokens, accepted, status, *_ = self.ops.verify_chain(
            logits, ids.flatten(), cu_rows, self.seeds, seq_lens, depth, vocab_size=VOCAB, **options
        )
        assert (status == 0).all()
        return tokens, accepted, ids

    def cached(self, seq_lens):
        """K and V of every request up to its length."""
        places = torch.arange(PAGES // BATCH * PAGE, device=self.on).expand(BATCH, -1)
        slots = self.slots(places)
        return [
            torch.stack([c.flatten(0, 1)[slots[b, : seq_lens[b]]] for c in (self.k, self.v)]).cpu()
            for b in range(BATCH)
        ]


def after(tokens, accepted, seq_lens):
    """The next anchors and lengths."""
    return tokens.gather(1, accepted[:, None].long())[:, 0], seq_lens + accepted + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_B12_a_tree_of_one_branch_is_the_chain(backend, temperature):
    tree, chain = Model(backend, 1), Model(backend, 1)
    on, depth = backend.device, 4
    options = {"temperature": torch.full((BATCH,), temperature, device=on)}
    anchors, seq_lens = torch.tensor([3, 8], device=on), torch.tensor([0, 0], device=on)
    accepts = 0
    for _ in range(2 * ROUNDS):
        mine = tree.tree_round(anchors, seq_lens, 1, depth, depth + 1, options)
        theirs = chain.chain_round(anchors, seq_lens, depth, options)
        for name, a, b in zip(("tokens", "num_accepted", "input_ids"), mine, theirs, strict=True):
            assert_same(a.cpu(), b.cpu(), name)
        accepts += int(mine[1].sum())
        anchors, seq_lens = after(*mine[:2], seq_lens)
        for a, b in zip(tree.cached(seq_lens), chain.cached(seq_lens), strict=True):
            assert_same(a, b, "cache")
    assert accepts > ROUNDS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bushy_tree_leaves_the_cache_of_its_path(backend, temperature):
    model = Model(backend, 2)
    on = backend.device
    options = {"temperature": torch.full((BATCH,), temperature, device=on)}
    anchors, seq_lens = torch.tensor([3, 8], device=on), torch.tensor([0, 0], device=on)
    text, accepts = [[], []], 0
    for _ in range(ROUNDS):
        tokens, accepted, ids = model.tree_round(anchors, seq_lens, 8, 2, 33, options)
        for b in range(BATCH):
            text[b] += [int(anchors[b]), *tokens[b, : int(accepted[b])].tolist()]
        accepts += int(accepted.sum())
        anchors, seq_lens = after(tokens, accepted, seq_lens)
        for b, cached in enumerate(model.cached(seq_lens)):
            plain = model.qkv[1:, torch.tensor(text[b], device=on)]
            assert_same(cached, plain.cpu(), f"cache of request {b}")
    assert accepts > ROUNDS


@pytest.mark.parametrize("num_nodes", [9, 12])
def test_a_static_tree_takes_its_tokens_by_rank(backend, num_nodes):
    """A tree of Medusa's kind: its nodes are candidates of the ranks that tree_from_paths gives, all as good as
    each other, and build_tree leaves them as they are."""
    paths = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]
    parents, ranks = specdec_ext.tree_from_paths(paths)
    depth = check_links(backend, parents, torch.tensor([0, 9]).int(), 9)[1]
    rows = torch.randn(BATCH, 3, VOCAB, generator=torch.Generator().manual_seed(3)).to(
        backend.device
    )
    # Every depth is a frontier node of its own; its first tokens are those of the ranks.
    scores = torch.zeros(BATCH, 3, device=backend.device)
    candidates = backend.ops.expand_tree(rows, scores, 4, vocab_size=VOCAB)[3].view(BATCH, 3, 4)
    tokens = candidates[:, depth[1:].long() - 1, ranks[1:].long()]
    numbers = torch.arange(BATCH, device=backend.device)
    above = (parents[1:] - 1).repeat(BATCH, 1).to(backend.device)
    out = backend.ops.build_tree(
        tokens, torch.zeros(BATCH, 8, device=backend.device), above, numbers, numbers, num_nodes
    )
    ids, got, mask, positions, first, following, status = (t.cpu() for t in out)
    assert status.tolist() == [0 if num_nodes == 9 else 16] * BATCH
    wanted = check_links(backend, parents, torch.tensor([0, 9]).int(), 9)
    for b in range(BATCH):
        assert_same(got[b, :9].contiguous(), parents)
        assert_same(ids[b, 1:9].contiguous(), tokens[b].cpu())
        assert torch.equal(positions[b, :9], b + depth)
        for mine, theirs in zip(
            (mask[b], first[b], following[b]), (wanted[0], *wanted[2:4]), strict=True
        ):
            assert_same(mine[:9].contiguous(), theirs)
    best = rows.topk(4, -1).indices
    assert torch.equal(candidates, best)
