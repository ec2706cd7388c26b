"""What only a real GPU can show: graph capture and replay, streams, several devices, CPU = CUDA.

Everything else about the CUDA kernels runs in the ordinary tests through the `backend` fixture. These
tests are skipped without a GPU, and `tools/gpu_check.sh` runs them.
"""

import pytest
import torch
from compare import assert_close, assert_same
from oracles import compact_kv as compact_oracle
from oracles import inject_kv as inject_oracle
from oracles import next_round as round_oracle
from oracles.tree_links import random_parents

import specdec_ext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(specdec_ext.cuda_reason), reason=f"no GPU: {specdec_ext.cuda_reason}"),
]

VOCAB, DRAFTS, BATCH = 32000, 5, 4


def chain_case(seed, device, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    rows = BATCH * (DRAFTS + 1)
    target = torch.randn(rows, VOCAB, generator=g).to(dtype) * 3
    draft = target.view(BATCH, DRAFTS + 1, VOCAB)[:, :DRAFTS].float()
    draft = (draft + torch.randn(draft.shape, generator=g)).to(dtype)
    noise = torch.rand(draft.shape, generator=g).log().neg()
    picks = (draft.float().softmax(-1) / noise).argmax(-1)
    ids = torch.cat([torch.zeros(BATCH, 1, dtype=torch.int64), picks], 1).reshape(-1)
    case = {
        "target_logits": target,
        "input_ids": ids,
        "cu_rows": torch.arange(0, rows + 1, DRAFTS + 1, dtype=torch.int32),
        "seeds": torch.randint(0, 2**62, (BATCH,), generator=g),
        "positions": torch.randint(0, 1000, (BATCH,), generator=g),
    }
    options = {
        "draft_logits": draft,
        "temperature": torch.tensor([1.0, 0.7, 0.0, 1.3]),
    }
    move = lambda d: {k: v.to(device) for k, v in d.items()}  # noqa: E731
    return move(case), move(options)


def verify(case, options):
    return torch.ops.specdec.verify_chain(*case.values(), DRAFTS, vocab_size=VOCAB, **options)


def attention_case(seed, device, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(600, 2000, (BATCH,), generator=g)
    pages = 128
    return {
        "q": torch.randn(BATCH * 8, 8, 128, generator=g).to(dtype).to(device),
        "k_cache": torch.randn(pages * BATCH, 16, 2, 128, generator=g).to(dtype).to(device),
        "v_cache": torch.randn(pages * BATCH, 16, 2, 128, generator=g).to(dtype).to(device),
        "block_table": torch.randperm(pages * BATCH, generator=g)
        .view(BATCH, pages)
        .int()
        .to(device),
        "cu_rows": torch.arange(0, BATCH * 8 + 1, 8, dtype=torch.int32, device=device),
        "seq_lens": lens.int().to(device),
    }


def graph_of(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # warm-up outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def test_chain_graph_replays_with_new_data():
    """Lengths, seeds, positions and logits change between replays; results follow them."""
    case, options = chain_case(0, "cuda")
    graph, out = graph_of(lambda: verify(case, options))
    for seed in range(1, 6):
        new_case, new_options = chain_case(seed, "cuda")
        if seed == 5:  # one inactive request and a shorter one
            new_case["cu_rows"] = torch.tensor([0, 6, 6, 9, 15], dtype=torch.int32, device="cuda")
        for old, new in ((case, new_case), (options, new_options)):
            for name, tensor in old.items():
                tensor.copy_(new[name])
        graph.replay()
        for got, wanted in zip(out, verify(new_case, new_options), strict=True):
            assert_same(got, wanted)


def test_attention_graph_replays_with_new_lengths():
    case = attention_case(0, "cuda")
    call = lambda c: torch.ops.specdec.verify_attention(*c.values(), max_rows=8)  # noqa: E731
    graph, out = graph_of(lambda: call(case))
    for seed in range(1, 4):
        new = attention_case(seed, "cuda")
        for name, tensor in case.items():
            tensor.copy_(new[name])
        graph.replay()
        for got, wanted in zip(out, call(new), strict=True):
            assert_same(got, wanted)


def test_current_stream_is_used():
    """Work queued behind a long kernel on a side stream must wait for it."""
    case, options = chain_case(3, "cuda")
    wanted = verify(case, options)
    late = case["target_logits"].clone()
    case["target_logits"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case["target_logits"].copy_(late)
        got = verify(case, options)
    stream.synchronize()
    for a, b in zip(got, wanted, strict=True):
        assert_same(a, b)


def test_repeats_are_bitwise_the_same():
    """A06: races would show as differing repeats."""
    case, options = chain_case(4, "cuda")
    first = verify(case, options)
    for _ in range(1000):
        for a, b in zip(verify(case, options), first, strict=True):
            assert_same(a, b)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_second_device():
    case, options = chain_case(5, "cuda:1")
    wanted = verify(*chain_case(5, "cuda:0"))
    with torch.cuda.device(0):
        got = verify(case, options)
    for a, b in zip(got, wanted, strict=True):
        assert_same(a.cpu(), b.cpu())


@pytest.mark.parametrize("seed", range(8))
def test_cpu_and_cuda_decide_alike(seed):
    """Same random numbers; a flip would need a coin within rounding distance of its threshold."""
    cpu = verify(*chain_case(seed, "cpu"))
    cuda = verify(*chain_case(seed, "cuda"))
    for a, b in zip(cuda[:3], cpu[:3], strict=True):
        assert_same(a.cpu(), b)


def test_cpu_and_cuda_attention():
    case = attention_case(7, "cpu")
    out, lse = torch.ops.specdec.verify_attention(*case.values(), max_rows=8)
    on_gpu = {k: v.cuda() for k, v in case.items()}
    out_gpu, lse_gpu = torch.ops.specdec.verify_attention(*on_gpu.values(), max_rows=8)
    assert_close(out_gpu, out.double(), what="out", magnitude=1.0)
    assert_close(lse_gpu, lse.double(), what="lse", magnitude=16.0)


def test_trees_graph_replays_with_new_data():
    """Other trees of other sizes between replays, rows of no request included."""
    g = torch.Generator().manual_seed(9)
    batches = []
    for sizes in ([60, 0, 33], [1, 64, 5]):
        parents = torch.cat([random_parents(g, n) for n in sizes])
        parents = torch.cat([parents, parents.new_zeros(140 - len(parents))])
        cu_rows = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).int()
        batches.append((parents, cu_rows))
    parents, cu_rows = (t.cuda() for t in batches[0])

    def both():
        links = torch.ops.specdec.tree_links(parents, cu_rows, 64)
        return *links, *torch.ops.specdec.tree_from_mask(links[0], cu_rows)

    graph, out = graph_of(both)
    for batch in (batches[1], batches[0]):
        parents.copy_(batch[0])
        cu_rows.copy_(batch[1])
        graph.replay()
        links = torch.ops.specdec.tree_links(*batch, 64)
        wanted = *links, *torch.ops.specdec.tree_from_mask(links[0], batch[1])
        for got, want in zip(out, wanted, strict=True):
            assert_same(got.cpu(), want)


def drafted_trees(logits, scores, anchors):
    """The builders of draft trees on one frontier, and on the same rows as a block."""
    depth = torch.ops.specdec.expand_tree(logits, scores, 8, vocab_size=VOCAB)
    parents = torch.full_like(depth[3], -1, dtype=torch.int32)
    built = torch.ops.specdec.build_tree(depth[3], depth[4], parents, anchors, anchors, 20)
    block = torch.ops.specdec.block_tree(logits, anchors, anchors, 40, 8, vocab_size=VOCAB)
    return *depth, *built, *block


def test_builders_of_trees_replay_with_new_data():
    """Bit for bit what the CPU gives, dead rows and ties included."""
    g = torch.Generator().manual_seed(10)
    batches = []
    for _ in range(2):
        logits = torch.randn(3, 4, VOCAB, generator=g).bfloat16()
        logits[1, 2, 5] = float("nan")
        batches.append((logits, -torch.rand(3, 4, generator=g), torch.arange(3)))
    tensors = [t.cuda() for t in batches[0]]
    graph, out = graph_of(lambda: drafted_trees(*tensors))
    for batch in (batches[1], batches[0]):
        for tensor, value in zip(tensors, batch, strict=True):
            tensor.copy_(value)
        graph.replay()
        for got, want in zip(out, drafted_trees(*batch), strict=True):
            assert_same(got.cpu(), want)


def round_case(seed):
    """Arguments of compact_kv behind its caches, and of next_round."""
    g = torch.Generator().manual_seed(seed)
    lists = compact_oracle.random_case(g)
    case = round_oracle.random_case(g, batch=4)
    return lists, case


def test_round_graph_replays_with_new_data():
    """Paths, counts, slots and lengths change between replays; caches and blocks follow them."""
    lists, case = round_case(0)
    lists = [t.cuda() for t in lists]
    case = {k: v.cuda() if torch.is_tensor(v) else v for k, v in case.items()}
    k, v = torch.randn(2, 10, 4, 2, 64, device="cuda").bfloat16()

    def both():
        torch.ops.specdec.compact_kv([k], [v], *lists)
        return torch.ops.specdec.next_round(
            *[case[name] for name in list(case)[:4]],
            **{name: case[name] for name in list(case)[4:]},
        )

    graph, out = graph_of(both)
    for seed in range(1, 4):
        new_lists, new_case = round_case(seed)
        for old, new in zip(lists, new_lists, strict=True):
            old.copy_(new)
        for name, value in new_case.items():
            if torch.is_tensor(value):
                case[name].copy_(value)
        wanted = compact_oracle.compact_kv([k.cpu(), v.cpu()], *new_lists)
        graph.replay()
        assert_same(k.cpu(), wanted[0])
        assert_same(v.cpu(), wanted[1])
        for got, want in zip(out, round_oracle.next_round(**new_case), strict=True):
            assert_same(got.cpu(), want)


def inject_case(seed, device):
    """Tensors of inject_kv by name, its caches stacked."""
    g = torch.Generator().manual_seed(seed)
    case = inject_oracle.random_case(g, rows=9, dtype=torch.bfloat16, head_dim=128)
    case |= {"cu_rows": torch.tensor([0, 4, 9]).int(), "commit_rows": torch.tensor([seed, 3]).int()}
    case = {k: torch.stack(v) if isinstance(v, list) else v for k, v in case.items()}
    return {k: v.to(device) for k, v in case.items() if torch.is_tensor(v)}


def inject(case):
    lists = {k: list(v) if k.endswith("caches") else v for k, v in case.items()}
    torch.ops.specdec.inject_kv(**lists, eps=1e-6)


def test_inject_graph_replays_with_new_data():
    """Other rows, positions, slots and counts between replays; the CPU has the same bits."""
    case = inject_case(0, "cuda")
    graph, _ = graph_of(lambda: inject(case))
    for seed in range(1, 4):
        new = inject_case(seed, "cpu")
        for name, tensor in case.items():
            tensor.copy_(new[name])
        graph.replay()
        inject(new)
        for name in ("k_caches", "v_caches"):
            assert_same(case[name].cpu(), new[name])


def test_no_host_sync():
    """A call that synchronised would raise in this mode."""
    case, options = chain_case(8, "cuda")
    attention = attention_case(8, "cuda")
    parents = case["input_ids"].int()  # any numbers
    lists, arguments = round_case(8)
    injected = inject_case(8, "cuda")
    weight = torch.zeros(8, 2 * VOCAB, device="cuda").bfloat16()
    round_lists = [t.cuda() for t in lists], [t.cuda() for t in list(arguments.values())[:4]]
    trees = torch.zeros(2, 3, VOCAB).cuda(), torch.zeros(2, 3).cuda(), torch.zeros(2).long().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify(case, options)
        links = torch.ops.specdec.tree_links(parents, case["cu_rows"], 64)
        torch.ops.specdec.tree_from_mask(links[0], case["cu_rows"])
        drafted_trees(*trees)
        torch.ops.specdec.verify_attention(*attention.values(), max_rows=8)
        k = attention["k_cache"][0]
        torch.ops.specdec.append_kv(
            k, k, attention["k_cache"], attention["v_cache"], case["input_ids"][:16]
        )
        lists, plain = round_lists
        torch.ops.specdec.compact_kv([attention["k_cache"]], [attention["v_cache"]], *lists)
        inject(injected)
        torch.ops.specdec.fuse_features(
            [case["target_logits"]] * 2, weight, weight[:, 0].contiguous()
        )
        torch.ops.specdec.next_round(*plain, page_size=4, block_len=6, mask_token_id=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
