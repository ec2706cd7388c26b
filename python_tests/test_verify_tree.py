"""verify_tree: paths, tokens, status and log-probabilities against the oracle, on every backend."""

import json
import pathlib

import chains
import pytest
import torch
import trees
from compare import assert_same

CASES = pathlib.Path(__file__).parent / "cases"
RULES = [
    ("deterministic", "token"),
    ("sampled", "token"),
    ("sampled_with_replacement", "token"),
    ("sampled", "traversal"),
    ("sampled_with_replacement", "traversal"),
    ("deterministic", "traversal"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("children, method", RULES)
@pytest.mark.parametrize("with_controls", [False, True])
def test_random_trees(backend, children, method, with_controls):
    for seed in range(4 if backend.emulated else 40):
        case = trees.random_case(
            4,
            [5, 40, 300, 1][seed % 4],
            [12, 6, 9, 3][seed % 4],
            seed=seed,
            dtype=DTYPES[seed % 3],
            children=children,
            method=method,
            reduced=seed % 2 == 1,
            with_controls=with_controls,
        )
        trees.check(backend, case)


@pytest.mark.parametrize("children, method", RULES)
def test_many_rejections(backend, children, method):
    batch = 24 if backend.name in ("emu_hooks", "emu_asan") else 200
    case = trees.rejecting_case(batch, 8, children=children, method=method)
    _, path, num_accepted, *_ = trees.check(backend, case)
    assert 0.1 < num_accepted.double().mean() < 2.5


@pytest.mark.parametrize("children, method", RULES)
def test_several_tiles(backend, children, method):
    for seed, vocab in enumerate([4095, 4097] if backend.emulated else [4095, 4096, 4097, 9001]):
        case = trees.random_case(
            3, vocab, 6, seed=seed, children=children, method=method, reduced=seed % 2 == 1
        )
        trees.check(backend, case)


@pytest.mark.parametrize("method", ["token", "block"])
@pytest.mark.parametrize("one_hot", [False, True])
def test_a_chain_is_verify_chain(backend, method, one_hot):
    """Bitwise, in all fields; block verification is traversal of a tree with one path."""
    if one_hot and method == "block":
        pytest.skip("traversal with deterministic children is target-only")
    for seed in range(3 if backend.emulated else 20):
        case = chains.random_case(5, 300, 4, seed=seed)
        case.pop("draft_is_one_hot")
        draft_rows = case.pop("draft_rows").clamp(min=0)
        draft, batch = case.pop("draft_logits"), len(case["seeds"])
        rows = case["target_logits"].shape[0]
        wide = torch.zeros(rows, draft.shape[2])
        parents = torch.full((rows,), -1, dtype=torch.int32)
        for b in range(batch):
            begin, end = int(case["cu_rows"][b]), int(case["cu_rows"][b + 1])
            parents[begin:end] = torch.arange(-1, end - begin - 1)
            for j in range(min(end - begin, 4)):
                wide[begin + j] = draft[draft_rows[b], j]
        chain = dict(case, method=method, num_logprobs=2)
        if not one_hot:
            chain.update(draft_logits=draft, draft_rows=draft_rows)
        tree = dict(case, parents=parents, max_depth=case["max_drafts"], num_logprobs=2)
        tree.pop("max_drafts")
        tree["method"] = "token" if method == "token" else "traversal"
        if not one_hot:
            tree.update(draft_logits=wide, children="sampled")
        else:
            chain["draft_temperature"] = tree["draft_temperature"] = None
        wanted, got = chains.run(backend, chain), trees.run(backend, tree)
        path = got.pop(1)
        for name, mine, theirs in zip(chains.NAMES, got, wanted, strict=True):
            assert_same(mine, theirs, name)
        for b in range(batch):
            count = int(got[1][b]) + 1 if case["cu_rows"][b] < case["cu_rows"][b + 1] else 0
            steps = list(range(count)) + [-1] * (path.shape[1] - count)
            assert path[b].tolist() == steps


def test_siblings_with_the_same_id(backend):
    """The later one is absent: a number between p(5) and p(5) + p(6) accepts the 6."""
    batch, nodes, vocab = 24, 4, 8
    logits = torch.full((batch * nodes, vocab), -torch.inf)
    logits[:, 5], logits[:, 6], logits[:, 7] = 0.4, 0.3, 0.1
    case = {
        "target_logits": logits,
        "input_ids": torch.tensor([0, 5, 5, 6]).repeat(batch),
        "parents": torch.tensor([-1, 0, 0, 0], dtype=torch.int32).repeat(batch),
        "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * nodes,
        "seeds": torch.arange(batch),
        "positions": torch.arange(batch),
        "max_depth": 2,
        "vocab_size": vocab,
    }
    path = trees.check(backend, case)[1]
    assert set(path[:, 1].tolist()) == {-1, 1, 3}


@pytest.mark.parametrize("method", ["token", "traversal"])
def test_draft_ids_outside_the_vocabulary(backend, method):
    """They take no part in q's law where the controls act on it."""
    for seed in range(3 if backend.emulated else 12):
        case = trees.random_case(
            4,
            60,
            8,
            seed=seed,
            children="sampled",
            method=method,
            reduced=True,
            with_controls=False,
        )
        target_id = case["d2t"] + torch.arange(len(case["d2t"])) * case["d2t_is_offset"]
        target_id[::3] = torch.tensor([-1, 60, 2**40])[seed % 3]
        case.update(d2t=target_id, d2t_is_offset=False, draft_controls=True)
        trees.check(backend, case)


@pytest.mark.parametrize("children, method", RULES)
def test_wrong_cu_rows_stay_inside(backend, children, method):
    """Offsets outside 0 .. R or decreasing: requests that share rows are inactive, the others as ever."""
    case = trees.random_case(5, 20, 6, seed=11, children=children, method=method)
    rows = len(case["parents"])
    for cu in (
        [-5, 0, 3, 3, 100, 2**31 - 1],
        [rows] * 6,
        [20, 30, 40, 50, 60, 70],
        [8, 2, 9, 1, 5, 0],
        [0, 2, 9, 4, 9, rows],
        [0, 9, 3, 6, 9, 11],
        [5, 9, 0, 6, 2, 9],
    ):
        trees.check(backend, {**case, "cu_rows": torch.tensor(cu, dtype=torch.int32)})


@pytest.mark.slow
def test_a_request_depends_on_itself_alone(backend):
    for children, method in RULES:
        case = trees.random_case(6, 500, 9, seed=5, children=children, method=method)
        whole = trees.run(backend, case)
        for order in ([5, 4, 3, 2, 1, 0], [2], [1, 4]):
            some = trees.run(backend, trees.take(case, order))
            for name, mine, all_of_them in zip(trees.NAMES, some, whole, strict=True):
                assert_same(mine, all_of_them[order], f"{name} {children} {method} {order}")


@pytest.mark.parametrize("children, method", RULES)
def test_threads_change_nothing(children, method):
    import backends

    backend = backends.get("cpu")
    case = trees.random_case(2, 40000, 6, seed=9, children=children, method=method)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(trees.run(backend, case))
    finally:
        torch.set_num_threads(before)
    trees.assert_equal(*results)


def test_greedy_paths_of_sglang(backend):
    """tree_verify_greedy_sglang.json: links there, parents here."""
    case = json.loads((CASES / "tree_verify_greedy_sglang.json").read_text())
    inputs, expected = case["inputs"], case["expected"]
    ids = torch.tensor(inputs["candidates"])
    batch, nodes = ids.shape
    parents = torch.full((batch, nodes), -1, dtype=torch.int32)
    for b in range(batch):
        for u in range(nodes):
            child = inputs["retrieve_next_token"][b][u]
            while child >= 0:
                parents[b, child] = u
                child = inputs["retrieve_next_sibling"][b][child]
    best = torch.tensor(inputs["target_argmax"])
    logits = torch.nn.functional.one_hot(best, 20).float().view(batch * nodes, 20)
    # A parent must come before its child, which these trees do not all keep: number them anew.
    order, new_parents = [], []
    for b in range(batch):
        depth = [0] * nodes
        for u in range(nodes):
            v = u
            while parents[b, v] >= 0:
                v, depth[u] = int(parents[b, v]), depth[u] + 1
        by_depth = sorted(range(nodes), key=lambda u, depth=depth: (depth[u], u))
        order += [b * nodes + u for u in by_depth]
        place = {u: i for i, u in enumerate(by_depth)}
        new_parents += [place.get(int(parents[b, u]), -1) for u in by_depth]
    order = torch.tensor(order)
    out = trees.run(
        backend,
        {
            "target_logits": logits[order],
            "input_ids": ids.view(-1)[order],
            "parents": torch.tensor(new_parents, dtype=torch.int32),
            "cu_rows": torch.arange(batch + 1, dtype=torch.int32) * nodes,
            "seeds": torch.zeros(batch, dtype=torch.int64),
            "positions": torch.zeros(batch, dtype=torch.int64),
            "max_depth": inputs["max_path"] - 1,
            "vocab_size": 20,
            "temperature": torch.zeros(batch),
        },
    )
    tokens, path, num_accepted, status = out[:4]
    assert num_accepted.tolist() == expected["accept_token_num"]
    assert status.tolist() == [0, 0]
    for b in range(batch):
        nodes_of = [int(order[b * nodes + u]) if u >= 0 else -1 for u in path[b].tolist()]
        assert nodes_of == expected["accept_index"][b]
        emitted = [expected["predicts"][n] for n in nodes_of if n >= 0]
        assert tokens[b, : len(emitted)].tolist() == emitted


def test_errors_name_op_argument_wanted_got(backend):
    case = trees.random_case(3, 20, 4, seed=4, children="sampled", with_controls=False, bad=False)
    rows = case["target_logits"].shape[0]
    bad = [
        ("children", "topk", r'verify_tree: children: wanted "deterministic", "sampled" or'),
        ("method", "block", r'method: wanted "token" or "traversal", got "block"'),
        ("parents", case["parents"].long(), r"parents: wanted dtype int32, got int64"),
        ("parents", case["parents"][1:], rf"parents: wanted size {rows} \(R of target_logits\)"),
        ("max_depth", -1, r"max_depth: wanted a number from 0 to"),
        ("draft_logits", None, r"draft_logits: wanted the law of the children"),
        ("draft_logits", case["draft_logits"][1:], rf"draft_logits: wanted size {rows}"),
        ("draft_logits", case["draft_logits"][:, :19], r"draft_logits: wanted at least 20"),
        ("top_k", torch.ones(3), r"top_k: wanted dtype int32, got float32"),
        ("frequency_penalty", torch.ones(3), r"token_counts: wanted int32 .* got none"),
        ("bias_ids", torch.zeros(1).long(), r"bias_offsets: wanted bias_offsets, bias_ids and"),
        ("bitmask_rows", torch.zeros(rows).int(), r"bitmask_rows: wanted token_bitmask with it"),
        ("filter_order", "both", r'filter_order: wanted "sequential" or "joint"'),
        ("logprobs_mode", "log", r'logprobs_mode: wanted "raw" or "processed"'),
        ("num_logprobs", 1025, r"num_logprobs: wanted a number from -1 to 1024"),
    ]
    for name, value, message in bad:
        with pytest.raises(RuntimeError, match=message):
            trees.run(backend, {**case, name: value})


def test_empty_batches(backend):
    case = trees.random_case(2, 20, 4, seed=4, with_controls=False)
    nobody = trees.take(case, [])
    out = trees.run(backend, nobody)
    assert [tuple(t.shape[:1]) for t in out] == [(0,)] * len(out)
    inactive = {**case, "cu_rows": torch.zeros(3, dtype=torch.int32), "max_depth": 0}
    tokens, path, num_accepted, status, *_ = trees.run(backend, inactive)
    assert tokens.tolist() == path.tolist() == [[-1], [-1]]
    assert num_accepted.tolist() == status.tolist() == [0, 0]


def test_opcheck_and_compile():
    op = torch.ops.specdec.verify_tree.default
    for children in ("deterministic", "sampled"):
        case = trees.random_case(4, 50, 5, seed=17, children=children, bad=False)
        case["num_logprobs"] = 2
        positional = [case.pop(name) for name in trees.POSITIONAL]
        torch.library.opcheck(op, positional, case)

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def step(target, ids, parents, cu_rows, seeds, positions):
        tokens, path, accepted, *_ = torch.ops.specdec.verify_tree(
            target * 1.0, ids, parents, cu_rows, seeds, positions, 4, vocab_size=50
        )
        return tokens + 1, path, accepted

    for batch in (4, 3):
        case = trees.random_case(batch, 50, 5, seed=18, with_controls=False)
        arguments = [case[name] for name in trees.POSITIONAL[:-1]]
        wanted = op(*arguments, 4, vocab_size=50)
        tokens, path, accepted = step(*arguments)
        assert_same(tokens, wanted[0] + 1)
        assert_same(path, wanted[1])
        assert_same(accepted, wanted[2])
