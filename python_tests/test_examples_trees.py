"""Draft trees in the engine of examples/: EAGLE-3's grow as a plain reading of the checkpoint says, those of block
drafters are the best paths, and the output is that without drafts, or has the target's law."""

import itertools
from dataclasses import replace

import draft_models
import pytest
import torch
from draft_models import requests_of
from oracles.build_tree import eagle_paths

pytest.importorskip("safetensors")

from drafters.base import TreeShape  # noqa: E402
from drafters.dflash import DFlash  # noqa: E402
from drafters.dspark import DSpark  # noqa: E402
from drafters.eagle3 import Eagle3, own_bits  # noqa: E402
from engine.batch import Drafts, DraftTree, Request, prune_tree  # noqa: E402
from engine.decode import Engine  # noqa: E402

SHAPE = TreeShape(topk=3, num_nodes=11)
DEPTH = 4
KINDS = ("eagle3", "deepspec_eagle3", "dflash", "deepspec_dflash", "dspark")


@pytest.fixture
def target(backend, monkeypatch):
    return draft_models.target_on(backend, monkeypatch)


@pytest.fixture
def make(tmp_path, target):
    """A drafter of trees, and the tensors of its checkpoint."""

    def make(kind, base=None, model=None, shape=SHAPE, **options):
        drafter = draft_models.load_drafter(
            tmp_path, kind, model or target, base, tree=shape, **options
        )
        return drafter, draft_models.tensors_of(kind)

    return make


def paths_of(tokens, parents, count):
    """The path of every node but the root, as tokens behind the anchor, in their order."""
    paths = [()]
    for token, parent in zip(tokens[:count], parents[:count], strict=True):
        assert 0 <= parent < len(paths), "parents come first"
        paths.append((*paths[parent], token))
    return paths[1:]


def steering(base):
    """A drafter that notes its trees, and puts good[b] true tokens and wrong ones behind them on a path: always to the
    last child, so that rows of the path have to move."""

    class Steering(base):
        def follow(self, requests, outputs, good):
            self.texts = [r.prompt_ids + ids for r, ids in zip(requests, outputs, strict=True)]
            self.good, self.rounds = good, []
            return self

        def propose(self, state, num_drafts):
            drafts = super().propose(state, num_drafts)
            begins, active = state.num_tokens.tolist(), state.active.tolist()
            self.rounds.append((begins, active, state.history.cpu().clone(), drafts))
            tokens = drafts.tokens.tolist()
            rows = zip(drafts.tree.parents.tolist(), drafts.counts.tolist(), strict=True)
            for b, (parents, count) in enumerate(rows):
                node = 0
                for depth, token in enumerate(self.texts[b][begins[b] :]):
                    children = [j for j in range(count) if parents[j] == node]
                    if not children:
                        break
                    wrong = (token + 1) % draft_models.TARGET.vocab_size
                    tokens[b][children[-1]] = token if depth < self.good[b] else wrong
                    node = children[-1] + 1
            return replace(drafts, tokens=torch.tensor(tokens, device=drafts.tokens.device))

    return Steering


@pytest.mark.parametrize(
    "kind, shape",
    [("eagle3", SHAPE), ("deepspec_eagle3", TreeShape(12, 40))],  # the latter: 36 rows, two words
)
def test_trees_of_eagle3_are_what_the_checkpoint_says(target, make, kind, shape):
    """Of every round the paths, after rejections and accepted paths that had to move, too."""
    depth = 3 if shape is SHAPE else 4
    requests, engine = requests_of(), Engine(target, [], page_size=4)
    plain = engine.generate(requests).output_ids
    drafter, tensors = make(kind, steering(Eagle3), shape=shape)
    got = engine.generate(requests, drafter.follow(requests, plain, good=[2, 0, 1]), depth)
    assert got.output_ids == plain and 0 < got.accepted < got.drafted

    t = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    weights = target.weights.to("cpu").to(torch.float64)
    rounds = drafter.rounds if shape is SHAPE else drafter.rounds[2:3]  # the others would take long
    compared = 0
    for begins, active, history, drafts in rounds:
        for b in range(len(requests)):
            if not active[b] or drafts.counts[b] == 0:
                continue

            def law(prefix, tokens=history[b, : begins[b]]):
                path = torch.tensor([*prefix, 0])
                row = draft_models.eagle3_chain(t, kind, weights, tokens, path)[-1].log_softmax(-1)
                if kind == "deepspec_eagle3":
                    return row.tolist()
                columns = torch.arange(len(row))
                whole = torch.full((draft_models.TARGET.vocab_size,), -torch.inf).double()
                return whole.index_copy(0, columns + t["d2t"], row).tolist()

            wanted = eagle_paths(law, shape.topk, depth, shape.num_nodes)
            tree, count = drafts.tree, int(drafts.counts[b])
            paths = paths_of(drafts.tokens[b].tolist(), tree.parents[b].tolist(), count)
            assert set(paths) == set(wanted) and len(paths) == len(wanted)
            assert tree.depths[b, :count].tolist() == [len(path) for path in paths]
            compared += 1
    # Every round of every request but the first of the one without features.
    assert compared == (got.request_passes - 1 if shape is SHAPE else sum(rounds[0][1]))


@pytest.mark.parametrize("kind", ["dflash", "deepspec_dflash", "dspark"])
def test_trees_of_block_drafters_are_the_best_paths(target, make, kind):
    requests, engine = requests_of(), Engine(target, [], page_size=4)
    plain = engine.generate(requests).output_ids
    drafter, tensors = make(kind, steering(DSpark if kind == "dspark" else DFlash))
    got = engine.generate(requests, drafter.follow(requests, plain, good=[2, 0, 1]), DEPTH)
    assert got.output_ids == plain and 0 < got.accepted < got.drafted

    t = {name: x.double() for name, x in tensors.items()}
    weights = target.weights.to("cpu").to(torch.float64)
    first = 0 if drafter.config.sample_from_anchor else 1
    compared = 0
    for begins, active, history, drafts in drafter.rounds:
        for b in range(len(requests)):
            if not active[b]:
                continue
            hidden = draft_models.block_hidden(t, weights, history[b, : begins[b]], DEPTH + first)
            laws = (hidden[first:] @ weights.embedding.T).log_softmax(-1)
            best = [law.topk(SHAPE.topk).indices.tolist() for law in laws]
            scores = {
                path: sum(float(law[token]) for law, token in zip(laws, path, strict=False))
                for depth in range(1, DEPTH + 1)
                for path in itertools.product(*best[:depth])
            }
            wanted = sorted(scores, key=lambda path: -scores[path])[: SHAPE.num_nodes - 1]
            count = int(drafts.counts[b])
            paths = paths_of(drafts.tokens[b].tolist(), drafts.tree.parents[b].tolist(), count)
            assert set(paths) == set(wanted) and len(paths) == len(wanted)
            compared += 1
    assert compared == got.request_passes


@pytest.mark.parametrize(
    "kind, linear",
    [*((kind, "specdec") for kind in KINDS), ("eagle3", "torch"), ("dflash", "torch")],
)
def test_greedy_output_with_trees_is_the_plain_one(backend, make, kind, linear):
    """At batch 1 and ragged, with the drafter's own trees; torch's linears have padding rows. Rows of a tree are not rounded as those of a chain are, but
    scores of this model are far enough from each other."""
    model = draft_models.target_model(backend.device, linear=linear)
    drafter, _ = make(kind, model=model)
    requests, engine = requests_of(), Engine(model, [], page_size=4)
    plain = engine.generate(requests).output_ids
    got = engine.generate(requests, drafter, DEPTH)
    assert got.output_ids == plain and got.drafted > 0 and not any(got.status)
    for request, output in zip(requests, plain, strict=True):
        assert engine.generate([request], drafter, DEPTH).output_ids == [output]


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_a_stop_token_on_an_accepted_path_ends_the_request(target, make, stop_at):
    requests = requests_of()
    full = Engine(target, []).generate(requests).output_ids
    stop = full[0][stop_at]
    engine = Engine(target, [stop], page_size=4)
    drafter, _ = make("deepspec_eagle3", steering(Eagle3))
    records = []
    got = engine.generate(
        requests, drafter.follow(requests, full, good=[3, 3, 3]), DEPTH, records.append
    )
    assert got.output_ids == engine.generate(requests).output_ids
    assert got.output_ids[0] == full[0][: full[0].index(stop) + 1]
    for record in records:
        for drafts, committed, accepted in zip(
            record.drafts, record.committed, record.num_accepted, strict=True
        ):
            assert drafts[:accepted] == committed[:accepted], "the path comes first"


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_trees_do_not_depend_on_the_batch(target, make, kind):
    """Greedy and sampled requests together, alone and in another order."""
    requests = [
        replace(request, temperature=temperature)
        for request, temperature in zip(requests_of(), (0.0, 1.0, 0.8), strict=True)
    ]
    drafter, _ = make(kind)
    engine = Engine(target, [], page_size=4)
    together = engine.generate(requests, drafter, DEPTH)
    alone = [engine.generate([request], drafter, DEPTH) for request in requests]
    backwards = engine.generate(requests[::-1], drafter, DEPTH)
    assert together.output_ids == [one.output_ids[0] for one in alone]
    assert together.output_ids == backwards.output_ids[::-1]
    assert together.accepted == sum(one.accepted for one in alone)


class LikelyTree:
    """The four likeliest tokens behind an anchor, and the three likeliest behind each of them; no drafts later."""

    name, lookahead = "likely", 17

    def __init__(self, target, anchor):
        weights = target.weights.to("cpu").to(torch.float64)
        law = draft_models.next_token_law
        first = law(weights, [anchor]).topk(4).indices.tolist()
        second = [law(weights, [anchor, token]).topk(3).indices.tolist() for token in first]
        self.tokens = torch.tensor(first + sum(second, []))
        self.parents = torch.tensor([0] * 4 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3)
        self.depths = torch.tensor([1] * 4 + [2] * 12)

    def propose(self, state, num_drafts):
        def rows(t):
            return t.to(state.history.device).expand(state.batch_size, -1)

        counts = torch.where(state.num_tokens == 1, self.tokens.numel(), 0)
        tree = DraftTree(rows(self.parents), rows(self.depths), num_drafts)
        return Drafts(rows(self.tokens), counts, tree=tree)


def test_output_with_trees_has_the_law_of_the_target(target):
    outputs, accepted = [], 0
    for begin in range(0, 1500, 500):
        requests = [Request([7], 3, 1.0, seed) for seed in range(begin, begin + 500)]
        got = Engine(target, []).generate(requests, LikelyTree(target, 7), 2)
        outputs, accepted = outputs + got.output_ids, accepted + got.accepted
    assert accepted > 500
    draft_models.assert_first_two_tokens_have_their_law(target, [7], outputs)


def test_pruning_leaves_the_nodes_of_the_first_depths():
    """Nodes in any order, as block_tree numbers them."""
    parents = torch.tensor([[0, 1, 2, 0, 4, 4, 2], [0, 1, 2, 3, 4, 5, 6]])
    depths = torch.tensor([[1, 2, 3, 1, 2, 2, 3], [1, 2, 3, 4, 5, 6, 7]])
    tokens = torch.arange(14).view(2, 7)
    drafts = Drafts(tokens, torch.tensor([7, 6]), tree=DraftTree(parents, depths, 7))
    for limit in range(8):
        got = prune_tree(drafts, torch.tensor([limit, 0]))
        count = int(got.counts[0])
        kept = [j for j in range(7) if depths[0, j] <= limit]
        assert got.counts.tolist() == [len(kept), 0]
        assert got.tokens[0].tolist() == kept + [-1] * (7 - len(kept))
        whole = paths_of(tokens[0].tolist(), parents[0].tolist(), 7)
        pruned = paths_of(got.tokens[0].tolist(), got.tree.parents[0].tolist(), count)
        assert pruned == [whole[j] for j in kept]
        assert got.tree.depths[0, :count].tolist() == [len(path) for path in pruned]
    got = prune_tree(drafts, torch.tensor([2, 9]))
    assert got.counts.tolist() == [5, 6] and got.tree.parents[1, :6].tolist() == list(range(6))


def test_own_bits_reach_the_sign():
    bits = own_bits(30, 4, 2, torch.device("cpu"))[0].tolist()
    assert bits == [[1 << 30, 0], [-(2**31), 0], [0, 1], [0, 2]]


def test_impossible_trees_are_refused(make):
    with pytest.raises(ValueError, match="TreeShape: topk: wanted 1 to 32, got 33"):
        TreeShape(33, 8)
    with pytest.raises(ValueError, match="TreeShape: num_nodes: wanted 1 to 256, got 0"):
        TreeShape(4, 0)
    with pytest.raises(ValueError, match="EAGLE-3: topk 32 at 4 depths: more than 2048 candidates"):
        make("eagle3", shape=TreeShape(32, 8), max_drafts=4)
    with pytest.raises(ValueError, match="confidences are those of chains"):
        make("dspark", threshold=0.5)
