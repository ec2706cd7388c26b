"""One small call of every op, for tests that treat all ops alike (schedules, determinism)."""

import torch


def _attention(generator, dtype):
    rows, pages, page_size = [5, 0, 2], 40, 16
    lens = [530, 0, 70]
    return (
        torch.randn(sum(rows) + 1, 6, 64, generator=generator).to(dtype),
        torch.randn(pages, page_size, 2, 64, generator=generator).to(dtype),
        torch.randn(pages, page_size, 2, 64, generator=generator).to(dtype),
        torch.randint(0, pages, (3, 34), generator=generator).int(),
        torch.tensor([0, 5, 5, 7], dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
    )


def _chain(generator, dtype):
    vocab, drafts = 4500, 3
    target = 3 * torch.randn(2 * (drafts + 1), vocab, generator=generator)
    draft = target.view(2, drafts + 1, vocab)[:, :drafts] + torch.randn(
        2, drafts, vocab, generator=generator
    )
    noise = torch.rand(draft.shape, generator=generator).log().neg()
    picks = (draft.softmax(-1) / noise).argmax(-1)
    ids = torch.cat([torch.zeros(2, 1, dtype=torch.int64), picks], 1).reshape(-1)
    arguments = (
        target.to(dtype),
        ids,
        torch.tensor([0, 4, 8], dtype=torch.int32),
        torch.tensor([5, 2**40 + 1]),
        torch.tensor([11, 2**33]),
        drafts,
    )
    options = {
        "vocab_size": vocab - 1,
        "draft_logits": draft.to(dtype),
        "temperature": torch.tensor([0.8, 1.0]),
    }
    return arguments, options


def _verified_trees(generator, dtype):
    """Two trees whose drafts come from rows near the target's."""
    vocab, parents = 4500, [-1, 0, 0, 1, 1, -1, 0, 0, 0, 2]
    target = 3 * torch.randn(len(parents), vocab, generator=generator)
    draft = target + 2 * torch.randn(len(parents), vocab, generator=generator)
    ids = torch.zeros(len(parents), dtype=torch.int64)
    for row in range(len(parents)):
        first = 0 if row < 5 else 5
        if parents[row] >= 0:
            law = draft[first + parents[row]].softmax(-1)
            ids[row] = torch.multinomial(law, 1, generator=generator)
    arguments = (
        target.to(dtype),
        ids,
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor([0, 5, 10], dtype=torch.int32),
        torch.tensor([5, 2**40 + 1]),
        torch.tensor([11, 2**33]),
        2,
    )
    options = {
        "vocab_size": vocab - 1,
        "draft_logits": draft.to(dtype),
        "temperature": torch.tensor([0.8, 1.0]),
        "children": "sampled",
    }
    return arguments, options


def _trees(generator):
    """Two trees, one of them malformed, around a request without rows, and rows of no request."""
    nodes, broken = 70, 7
    parents = torch.zeros(nodes + broken + 2, dtype=torch.int32)
    for start, count in ((0, nodes), (nodes, broken)):
        for node in range(1, count):
            parents[start + node] = torch.randint(max(0, node - 9), node, (1,), generator=generator)
        parents[start] = -1
    parents[nodes + 3] = 5
    return parents, torch.tensor([0, nodes, nodes, nodes + broken], dtype=torch.int32)


def call(op, ops, seed=0, dtype=torch.float32):
    """Runs `op` of the namespace `ops` on fixed small data; returns its output tensors."""
    g = torch.Generator().manual_seed(seed)
    if op == "append_kv":
        k, v = torch.randn(2, 5, 3, 64, generator=g).to(dtype)
        caches = torch.randn(2, 4, 4, 3, 64, generator=g).to(dtype)
        ops.append_kv(k, v, caches[0], caches[1], torch.tensor([3, -1, 9, 0, 15]))
        return [caches]
    if op == "compact_kv":
        caches = torch.randn(3, 6, 4, 2, 40, generator=g).to(dtype)
        hidden = torch.randn(6, 4, 1, 5, generator=g).to(dtype)
        path = torch.tensor([[0, 2, 3, 6], [0, -1, -1, -1], [1, 0, 2, 1]], dtype=torch.int32)
        cu_rows, counts = torch.tensor([0, 7, 7, 10]), torch.tensor([3, 0, 3])
        slots = torch.tensor([5, 6, 7, 8, 20, 21, 22, 1, 0, -1, 3])
        ops.compact_kv([*caches[:2]], [caches[2], hidden], slots, cu_rows.int(), path, counts.int())
        return [caches, hidden]
    if op == "fuse_features":
        hiddens = [torch.randn(11, n, generator=g).to(dtype) for n in (100, 64, 33)]
        weight = torch.randn(700, 197, generator=g).to(dtype)
        norm = weight[:, 0].contiguous()
        return [ops.fuse_features(hiddens, weight, norm), ops.fuse_features(hiddens, weight)]
    if op == "inject_kv":
        from oracles import inject_kv as oracle

        case = oracle.random_case(g, rows=30, layers=3, pages=9, head_dim=40, dtype=dtype)
        case |= {"cu_rows": torch.tensor([0, 9, 20, 29], dtype=torch.int32)}
        case |= {"commit_rows": torch.tensor([9, 4, 12], dtype=torch.int32)}
        ops.inject_kv(*[case.pop(name) for name in oracle.NAMES[:6]], **case)
        return case["k_caches"] + case["v_caches"]
    if op == "next_round":
        return ops.next_round(
            torch.randint(0, 9, (6, 40), generator=g),
            torch.randint(0, 40, (6,), generator=g).int(),
            torch.randint(0, 20, (6,), generator=g).int(),
            torch.randint(-1, 9, (6, 12), generator=g).int(),
            page_size=4,
            block_len=35,
            mask_token_id=7,
            stop_token_ids=torch.tensor([-1, 8]),
            max_len=torch.tensor([30, 9, 40, 50, 60, 70], dtype=torch.int32),
        )
    if op == "verify_attention":
        return ops.verify_attention(*_attention(g, dtype), max_rows=5)
    if op == "row_linear":
        x, weight = torch.randn(11, 300, generator=g), torch.randn(2500, 300, generator=g)
        return [ops.row_linear(x.to(dtype), weight.to(dtype), weight[:, 0].to(dtype).contiguous())]
    if op == "sample":
        logits = 3 * torch.randn(3, 4500, generator=g).to(dtype)
        return ops.sample(
            logits,
            torch.tensor([1, 2, 3]),
            torch.tensor([4, 5, 6]),
            vocab_size=4500,
            temperature=torch.tensor([0.0, 1.0, 0.5]),
        )
    if op == "markov_draft":
        from oracles import markov_draft as oracle

        from specdec_ext import prepare_markov

        out = []
        for head, batch in (("vanilla", 3), ("vanilla", 11), ("gated", 2), ("rnn", 3)):
            case = oracle.random_case(
                g, batch, 3, vocab=1100, rank=40, head=head, dtype=dtype, weights=dtype
            )
            names = ("base_logits", "anchor_ids", "w1", "w2", "seeds", "positions")
            tensors = [case.pop(name) for name in names]
            out += ops.markov_draft(*tensors, **case)
            greedy = {"temperature": torch.zeros(batch), "return_logits": False}
            greedy |= {"prepared": list(prepare_markov(tensors[3])), "return_logprobs": False}
            out += ops.markov_draft(*tensors, **case | greedy)
        return out
    if op == "expand_tree":
        logits = torch.randn(2, 3, 17000, generator=g)
        logits[0, 1] = logits[0, 1].round()  # ties
        scores = torch.tensor([[0.0, -1.0, -2.0], [-1.0, float("nan"), 0.0]])
        return ops.expand_tree(logits.to(dtype), scores, 7, vocab_size=17000)
    if op == "block_tree":
        logits = 2 * torch.randn(2, 4, 17000, generator=g)
        logits[0, 1] = logits[0, 1].round()
        logits[1, 3, 9] = float("nan")
        numbers, temperature = torch.tensor([5, 6]), torch.tensor([1.0, 0.6])
        return ops.block_tree(
            logits.to(dtype), numbers, numbers, 40, 6, vocab_size=17000, temperature=temperature
        )
    if op == "build_tree":
        from oracles import build_tree as oracle

        out = []
        for kind in ("tree", "any", "tied"):
            out += ops.build_tree(*oracle.random_case(g, 3, 90, 40, kind).values())
        return out
    if op == "schedule_prefix":
        confidence = 0.3 + 0.7 * torch.rand(40, 7, generator=g)
        confidence[3] = confidence[30]
        table, budget = 1.0 / (300.0 + torch.arange(200)), torch.tensor([99], dtype=torch.int32)
        active = torch.arange(40) % 5 != 0
        return [
            *ops.schedule_prefix(confidence, table, min_drafts=1, active=active),
            *ops.schedule_prefix(confidence, table, budget=budget),
        ]
    if op == "verify_chain":
        arguments, options = _chain(g, dtype)
        return ops.verify_chain(*arguments, **options)
    if op == "verify_tree":
        arguments, options = _verified_trees(g, dtype)
        by_token = ops.verify_tree(*arguments, **options)
        top_p = torch.tensor([0.9, 1.0])
        climbed = ops.verify_tree(
            *arguments, **options, method="traversal", top_p=top_p, num_logprobs=3
        )
        return [*by_token, *climbed]
    if op in ("tree_links", "tree_from_mask"):
        parents, cu_rows = _trees(g)
        links = ops.tree_links(parents, cu_rows, 70)
        return links if op == "tree_links" else ops.tree_from_mask(links[0], cu_rows)
    raise KeyError(f"no small call of {op}: add one to small_calls.py")
