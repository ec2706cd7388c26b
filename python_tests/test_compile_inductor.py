"""Every op under torch.compile with its default backend, inductor: fullgraph; one static graph per
op (compiling takes seconds), dynamic shapes where something is mutated and where nothing is."""

import chains
import pytest
import torch
import tree_cases
import trees
from compare import assert_same
from oracles import append_kv as append_oracle
from oracles import compact_kv as compact_oracle
from oracles import fuse_features as fuse_oracle
from oracles import inject_kv as inject_oracle
from oracles import next_round as round_oracle
from oracles import verify_attention as attention_oracle
from test_sample import random_case as sample_case

ops = torch.ops.specdec


def has_compiler():
    try:
        return bool(torch._inductor.cpp_builder.get_cpp_compiler())
    except Exception:
        return False


pytestmark = pytest.mark.skipif(not has_compiler(), reason="inductor finds no C++ compiler")


def append_step(k, v, k_cache, v_cache, slots):
    ops.append_kv(k * 2, v + 1, k_cache, v_cache, slots + 1)
    return k_cache.sum((1, 2)) - 1, v_cache * 2


def compact_step(k_cache, v_cache, slots, cu_rows, path, num_accepted):
    ops.compact_kv([k_cache], [v_cache], slots * 1, cu_rows, path + 0, num_accepted)
    return k_cache - 1, v_cache * 2


def fuse_step(low, middle, high, weight, norm):
    hiddens = [low * 2, middle, high + 1]
    return ops.fuse_features(hiddens, weight, norm) - 1, ops.fuse_features(hiddens, weight).relu()


def inject_step(kv, weight, cos, sin, positions, slots, k_cache, v_cache):
    ops.inject_kv(kv * 2, weight, cos, sin, positions + 0, slots, [k_cache], [v_cache], eps=1e-6)
    return k_cache - 1, v_cache * 2


def round_step(tokens, num_accepted, seq_lens, block_table, max_len):
    ids, positions, slots, lens, emitted, finished = ops.next_round(
        tokens + 0, num_accepted, seq_lens + 1, block_table, page_size=4, block_len=6,
        mask_token_id=7, max_len=max_len,
    )  # fmt: skip
    return ids + 1, positions * 2, slots, lens - emitted, ~finished


def attention_step(q, k_cache, v_cache, table, cu_rows, seq_lens):
    out, lse = ops.verify_attention(q * 2, k_cache, v_cache, table, cu_rows, seq_lens, max_rows=3)
    return out.flatten(1) + 1, lse - 1


def linear_step(x, weight, bias):
    return ops.row_linear(x * 2, weight, bias + 1).relu(), ops.row_linear(x, weight) - 1


def sample_step(logits, seeds, positions):
    tokens, logprob, *_ = ops.sample(logits * 0.5, seeds, positions + 1, vocab_size=50)
    return tokens + 1, logprob.exp()


def chain_step(target, ids, cu_rows, seeds, positions, draft):
    tokens, accepted, *_ = ops.verify_chain(
        target * 0.5, ids, cu_rows, seeds, positions + 1, 3, vocab_size=40, draft_logits=draft * 2
    )
    return tokens + 1, accepted * 2


def tree_step(target, ids, parents, cu_rows, seeds, positions):
    tokens, path, accepted, *_ = ops.verify_tree(
        target * 0.5, ids, parents, cu_rows, seeds, positions + 1, 4, vocab_size=40
    )
    return tokens + 1, path + 1, accepted * 2


def links_step(parents, cu_rows):
    mask, depth, child, sibling, status = ops.tree_links(parents + 0, cu_rows, 40)
    again = ops.tree_from_mask(mask, cu_rows)
    return mask * 1, depth + 1, child + sibling, status, again[0] - parents


def cases():
    g = torch.Generator().manual_seed(1)
    attention = attention_oracle.random_case(
        g, [3, 0, 2], [70, 0, 20], head_dim=64, v_dim=128, dtype=torch.float32
    )
    chain = chains.random_case(5, 40, 3, seed=1)
    names = ["target_logits", "input_ids", "cu_rows", "seeds", "positions", "draft_logits"]
    chain["draft_logits"] = chain["draft_logits"][:1].repeat(5, 1, 1)
    tree = trees.random_case(4, 40, 6, seed=2, children="deterministic", method="token")
    turn = round_oracle.random_case(g)
    links = tree_cases.ragged([[-1, 0, 0, 1], [-1, 0]])
    hiddens, fc_weight, norm = fuse_oracle.random_case(g)
    inject = inject_oracle.random_case(g, layers=1, head_dim=8)
    return {
        "append_kv": (append_step, append_oracle.random_case(g)),
        "compact_kv": (
            compact_step,
            (*torch.randn(2, 10, 4, 2, 8, generator=g), *compact_oracle.random_case(g)),
        ),
        "fuse_features": (fuse_step, (*hiddens, fc_weight, norm)),
        "inject_kv": (
            inject_step,
            (
                *[inject[name] for name in inject_oracle.NAMES[:6]],
                inject["k_caches"][0],
                inject["v_caches"][0],
            ),
        ),
        "next_round": (
            round_step,
            tuple(turn[name] for name in [*list(turn)[:4], "max_len"]),
        ),
        "verify_attention": (
            attention_step,
            tuple(t.nan_to_num(0) if t.is_floating_point() else t for t in attention),
        ),
        "row_linear": (
            linear_step,
            tuple(torch.randn(*size, generator=g) for size in ((3, 40), (7, 40), (7,))),
        ),
        "sample": (sample_step, sample_case(3, 50)),
        "verify_chain": (chain_step, tuple(chain[name] for name in names)),
        "verify_tree": (tree_step, tuple(tree[name] for name in trees.POSITIONAL[:-1])),
        "tree_links": (links_step, links),
    }


@pytest.mark.parametrize(
    "op, dynamic",
    [
        *((op, False) for op in cases()),
        ("append_kv", True),
        ("compact_kv", True),
        ("row_linear", True),
        ("sample", True),
    ],
)
def test_inductor(op, dynamic):
    step, case = cases()[op]
    plain = [t.clone() for t in case]
    wanted = step(*plain)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    mine = [t.clone() for t in case]
    got = compiled(*mine)
    for a, b in zip((*got, *mine), (*wanted, *plain), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("where, dynamic", [("outside", True), ("inside", False)])
def test_two_views_of_one_cache(where, dynamic):
    """An interleaved cache. Inside and dynamic=True is miscompiled by inductor of torch 2.13, whatever the
    op: docs/kv_cache.md."""
    g = torch.Generator().manual_seed(2)
    k, v, k_cache, v_cache, slots = append_oracle.random_case(g)
    wanted = append_oracle.append_kv(k * 2, v + 1, k_cache, v_cache, slots + 1)
    both = torch.stack([k_cache, v_cache], dim=1)

    def inside(k, v, both, slots):
        return append_step(k, v, both[:, 0], both[:, 1], slots)

    torch._dynamo.reset()
    if where == "inside":
        torch.compile(inside, fullgraph=True, dynamic=dynamic)(k, v, both, slots)
    else:
        compiled = torch.compile(append_step, fullgraph=True, dynamic=dynamic)
        compiled(k, v, both[:, 0], both[:, 1], slots)
    assert_same(both[:, 0], wanted[0], "k_cache")
    assert_same(both[:, 1], wanted[1], "v_cache")
