"""verify_tree against the same decision in torch, as engines take it: softmax of every row, then a walk
on probabilities that reads the host-side tree."""

import torch
from compare import DECISION_BAND, assert_decisions
from oracles import verify_tree as oracle

import specdec_ext

VOCAB = 151936


def wide_tree(widths):
    """Parents of a tree whose nodes at depth d have widths[d] children."""
    parents, level = [-1], [0]
    for width in widths:
        below = []
        for u in level:
            below += range(len(parents), len(parents) + width)
            parents += [u] * width
        level = below
    return parents


def cut_tree(nodes):
    """A tree as drafters search for it: wide near the anchor, narrow below."""
    parents = [-1]
    for u in range(1, nodes):
        parents.append(0 if u <= 10 else (u - 10) * 3 // 5)
    return parents


def children_of(parents):
    children = [[] for _ in parents]
    for u, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(u)
    return children


def walk_one_hot(p, ids, children):
    """Target-only: a number per node against the cumulative p of its children."""
    path, u = [0], 0
    while children[u]:
        coin, below, chosen = torch.rand(()).item(), 0.0, None
        for c in children[u]:
            below += p[u, ids[c]].item()
            if coin < below:
                chosen = c
                break
        if chosen is None:
            rest = p[u].clone()
            rest[[ids[c] for c in children[u]]] = 0.0
            return path, torch.multinomial(rest, 1)
        path.append(chosen)
        u = chosen
    return path, torch.multinomial(p[u], 1)


def walk_sampled(p, q, ids, children):
    """Recursive rejection without replacement."""
    path, u = [0], 0
    while children[u]:
        rest, law, chosen = p[u], q[u], None
        for c in children[u]:
            token = ids[c]
            if torch.rand(()).item() * law[token].item() < rest[token].item():
                chosen = c
                break
            rest = (rest - law).clamp_(min=0.0)
            rest = rest / rest.sum()
            law = law.clone()
            law[token] = 0.0
            law = law / law.sum()
        if chosen is None:
            return path, torch.multinomial(rest, 1)
        path.append(chosen)
        u = chosen
    return path, torch.multinomial(p[u], 1)


def bench(harness):
    on = harness.device
    g = torch.Generator().manual_seed(0)
    position = torch.zeros(1, dtype=torch.int64, device=on)

    def measure(name, parents, sampled):
        nodes, children = len(parents), children_of(parents)
        depth = [0] * nodes
        for u in range(1, nodes):
            depth[u] = depth[parents[u]] + 1
        max_depth = max(depth)
        options = {"vocab_size": VOCAB}
        if sampled:
            options["children"] = "sampled"
        cases = []
        for i in range(3):
            target = torch.randn(nodes, VOCAB, generator=g) * 5
            draft = target + 0.7 * torch.randn(nodes, VOCAB, generator=g) if sampled else None
            ids = torch.zeros(nodes, dtype=torch.int64)
            for u, some in enumerate(children):
                if not some:
                    continue
                if sampled:
                    law = torch.softmax(draft[u], -1)
                    ids[some] = torch.multinomial(law, len(some), generator=g)
                else:
                    noisy = target[u] + 0.5 * torch.randn(VOCAB, generator=g)
                    ids[some] = noisy.topk(len(some)).indices
            case = {
                "arguments": [
                    target.to(on),
                    ids.to(on),
                    torch.tensor(parents, dtype=torch.int32, device=on),
                    torch.tensor([0, nodes], dtype=torch.int32, device=on),
                    torch.tensor([i], device=on),
                    position,
                ],
                "options": dict(options),
                "ids": ids.tolist(),
            }
            if sampled:
                case["options"]["draft_logits"] = draft.to(on)
            cases.append(case)

        def ours(c):
            return specdec_ext.verify_tree(*c["arguments"], max_depth, **c["options"])

        def theirs(c):
            p = torch.softmax(c["arguments"][0], -1)
            if not sampled:
                return walk_one_hot(p, c["ids"], children)
            q = torch.softmax(c["options"]["draft_logits"], -1)
            return walk_sampled(p, q, c["ids"], children)

        def check():
            got, allowed = [], []
            for c in cases:
                tokens, path, accepted, status, *_ = (t.cpu() for t in ours(c))
                a = int(accepted)
                got.append((tuple(path[0, : a + 1].tolist()), int(tokens[0, a]), int(status)))
                on_cpu = {k: v.cpu() if torch.is_tensor(v) else v for k, v in c["options"].items()}
                allowed += oracle.outcomes(
                    *(t.cpu() for t in c["arguments"]), max_depth, **on_cpu, band=DECISION_BAND
                )
            assert_decisions(got, allowed)

        # At least: the rows of the accepted path once; where a child is rejected both rows again, which
        # happens at the last node of a path that ends before a leaf.
        rows = 0
        for c in cases:
            path = [u for u in ours(c)[1][0].tolist() if u >= 0]
            with_children = sum(1 for u in path if children[u])
            rows += len(path) + (with_children if sampled else 0)
            rows += (2 if sampled else 1) * bool(children[path[-1]])
        accepted = sum(int(ours(c)[2]) for c in cases) / len(cases)
        harness.case(
            "verify_tree",
            f"{name}, V={VOCAB} float32, accepts {accepted:.1f}",
            inputs=cases,
            ours=ours,
            peers={"torch softmax and walk": theirs},
            bytes=rows / len(cases) * VOCAB * 4,
            check=check,
            target=5.0,
        )

    measure("64 nodes, deterministic", cut_tree(64), False)
    measure("4x4 nodes, sampled", wide_tree([4, 4]), True)
