"""Cases of verify_tree for the tests: building them, running the op, comparing with the oracle."""

import torch
from chains import logits_of
from compare import DECISION_BAND, assert_decisions, assert_same
from control_cases import assert_logprobs, random_controls
from oracles import verify_tree as oracle
from oracles.controls import PER_REQUEST

NAMES = ["tokens", "path", "num_accepted", "status", "logprobs", "top_ids", "top_logprobs"]
POSITIONAL = [
    "target_logits",
    "input_ids",
    "parents",
    "cu_rows",
    "seeds",
    "positions",
    "max_depth",
]


def repeated(p, parents, tokens, seeds, **options):
    """The same tree once per seed; p [N, V] are probabilities."""
    seeds = torch.as_tensor(seeds, dtype=torch.int64)
    batch, nodes = len(seeds), len(parents)
    return {
        "target_logits": logits_of(p).repeat(batch, 1),
        "input_ids": torch.tensor(tokens).repeat(batch),
        "parents": torch.tensor(parents, dtype=torch.int32).repeat(batch),
        "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * nodes,
        "seeds": seeds,
        "positions": torch.zeros(batch, dtype=torch.int64),
        "max_depth": nodes - 1,
        "vocab_size": len(p[0]),
        **options,
    }


def run(backend, case):
    """Results on the CPU. Tensors keep their strides."""
    return backend.call("verify_tree", POSITIONAL, case)


def assert_equal(got, wanted, what=""):
    for name, mine, theirs in zip(NAMES, got, wanted, strict=True):
        assert_same(mine, theirs, f"{name} {what}")


def check(backend, case):
    """The op against the oracle given its random numbers; returns the op's results."""
    out = run(backend, case)
    tokens, path, num_accepted, status, *reported = out
    batch, width = case["cu_rows"].shape[0] - 1, case["max_depth"] + 1
    n = max(case.get("num_logprobs", -1), 0)
    assert tokens.dtype == reported[1].dtype == case["input_ids"].dtype
    assert path.dtype == num_accepted.dtype == status.dtype == torch.int32
    assert tokens.shape == path.shape == reported[0].shape == (batch, width)
    assert reported[1].shape == reported[2].shape == (batch, width, n)
    positional = [case[name] for name in POSITIONAL]
    options = {k: v for k, v in case.items() if k not in POSITIONAL}
    allowed = oracle.outcomes(*positional, **options, band=DECISION_BAND)
    got = []
    for b in range(batch):
        if allowed[b] == [None]:
            assert tokens[b].tolist() == path[b].tolist() == [-1] * width, f"inactive request {b}"
            assert (int(num_accepted[b]), int(status[b])) == (0, 0), f"inactive request {b}"
            got.append(None)
            continue
        a = int(num_accepted[b])
        nodes, row = path[b].tolist(), tokens[b].tolist()
        begin, _ = oracle.span(case["cu_rows"], b, case["target_logits"].shape[0])
        assert nodes[0] == 0 and nodes[a + 1 :] == [-1] * (width - a - 1), f"request {b}"
        assert row[:a] == [int(case["input_ids"][begin + u]) for u in nodes[1 : a + 1]]
        assert row[a + 1 :] == [-1] * (width - a - 1), f"request {b}"
        assert all(0 <= token < case["vocab_size"] for token in row[: a + 1]), f"request {b}"
        got.append((tuple(nodes[: a + 1]), row[a], int(status[b])))
    assert_decisions(got, allowed, "request")
    wanted = oracle.logprobs(tokens, path, case)
    assert_logprobs(reported[0], wanted[0], what="logprobs")
    assert_logprobs(reported[2], wanted[2], reported[1], wanted[1], "top")
    return out


def random_case(
    batch,
    vocab,
    max_nodes,
    *,
    seed=0,
    dtype=torch.float32,
    children="deterministic",
    method="token",
    reduced=False,
    with_controls=True,
    bad=True,
    scale=2.0,
):
    """Ragged random trees with everything mixed."""
    g = torch.Generator().manual_seed(seed)

    def randint(low, high, shape=(1,)):
        return torch.randint(low, high, shape, generator=g)

    nodes = randint(0, max_nodes + 1, (batch,))
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), nodes.cumsum(0)]).int()
    rows = int(cu_rows[-1]) + 2
    target = (torch.randn(rows, vocab, generator=g) * scale).to(dtype)
    case = {
        "target_logits": target,
        "input_ids": randint(0, vocab, (rows,)),
        "parents": torch.full((rows,), -1, dtype=torch.int32),
        "cu_rows": cu_rows,
        "seeds": randint(-(2**63), 2**63 - 1, (batch,)),
        "positions": randint(0, 2**40, (batch,)),
        "max_depth": int(randint(1, max_nodes + 1)),
        "vocab_size": vocab,
        "children": children,
        "method": method,
    }
    columns, target_id = vocab, torch.arange(vocab)
    if children != "deterministic":
        if reduced:
            columns = max(1, (2 * vocab) // 3)
            target_id = torch.randperm(vocab, generator=g)[:columns]
            if randint(0, 2):
                target_id = target_id.sort().values
            offset = bool(randint(0, 2))
            case["d2t"] = target_id - torch.arange(columns) if offset else target_id.clone()
            case["d2t_is_offset"] = offset
        draft = torch.randn(rows, columns + 2, generator=g) * scale
        for r in range(rows):
            if randint(0, 2):
                draft[r, :columns] = target[r, target_id].float()
                draft[r] += torch.randn(columns + 2, generator=g) * 0.3
        case["draft_logits"] = draft.to(dtype)
        case["draft_temperature"] = torch.rand(batch, generator=g) + 0.5
        case["draft_temperature"][randint(0, batch)] = 0.0
        case["draft_controls"] = bool(randint(0, 2))
    for b in range(batch):
        begin, count = int(cu_rows[b]), int(nodes[b])
        for u in range(1, count):
            # Wide and deep ones.
            parent = int(randint(max(0, u - 3), u)) if randint(0, 2) else int(randint(0, u))
            case["parents"][begin + u] = parent
            if children != "deterministic":
                law = torch.softmax(case["draft_logits"][begin + parent, :columns].float(), -1)
                token = target_id[int(torch.multinomial(law, 1, generator=g))]
            else:
                order = target[begin + parent].float().argsort(descending=True)
                token = order[int(randint(0, min(4, vocab)))]
            case["input_ids"][begin + u] = token
            if bad and randint(0, 15) == 0:
                case["input_ids"][begin + u] = [-1, vocab, -7][int(randint(0, 3))]
            if bad and randint(0, 25) == 0:
                case["parents"][begin + u] = [-1, u, u + 1, 2**30][int(randint(0, 4))]
    if with_controls:
        case.update(random_controls(batch, rows, vocab, seed=seed, joint=seed % 2 == 1))
        case["num_logprobs"] = [-1, 0, 3][seed % 3]
        case["logprobs_mode"] = ["raw", "processed"][seed // 2 % 2]
    return case


def rejecting_case(batch, vocab, *, children, method, seed=0):
    """Bushy trees of a drafter that likes what the target does not: most paths pass several rejections,
    among the children of one node and, by traversal, on the way up."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.tensor([-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 5, 5])
    nodes = len(parents)
    draft = torch.randn(batch * nodes, vocab, generator=g) * 1.5
    target = torch.randn(batch * nodes, vocab, generator=g) - 0.6 * draft
    ids = torch.zeros(batch * nodes, dtype=torch.int64)
    again = children == "sampled_with_replacement"
    for b in range(batch):
        for parent in range(nodes):
            own = (parents == parent).nonzero()[:, 0]
            if len(own):
                law = torch.softmax(draft[b * nodes + parent], -1)
                ids[b * nodes + own] = torch.multinomial(law, len(own), again, generator=g)
    return {
        "target_logits": target,
        "input_ids": ids,
        "parents": parents.repeat(batch).int(),
        "cu_rows": (torch.arange(batch + 1) * nodes).int(),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch,), generator=g),
        "positions": torch.arange(batch),
        "max_depth": 4,
        "vocab_size": vocab,
        "draft_logits": draft,
        "children": children,
        "method": method,
    }


def take(case, order):
    """The same requests in another order, or some of them."""
    cu = case["cu_rows"].tolist()
    rows = [torch.arange(cu[b], cu[b + 1]) for b in order]
    index = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    out = dict(case)
    for name in ("target_logits", "input_ids", "parents", "draft_logits", "bitmask_rows"):
        if case.get(name) is not None:
            out[name] = case[name][index]
    out["cu_rows"] = torch.tensor([0] + [len(r) for r in rows]).cumsum(0).int()
    for name in ["seeds", "positions", "draft_temperature", *PER_REQUEST]:
        if case.get(name) is not None:
            out[name] = case[name][list(order)]
    if case.get("bias_offsets") is not None:
        offsets = case["bias_offsets"].tolist()
        parts = [torch.arange(offsets[b], offsets[b + 1]) for b in order]
        index = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        out["bias_ids"], out["bias_values"] = case["bias_ids"][index], case["bias_values"][index]
        out["bias_offsets"] = torch.tensor([0] + [len(p) for p in parts]).cumsum(0).int()
    return out
