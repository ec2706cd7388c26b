"""block_tree against log_softmax and topk of torch with a heap on the host, as tree drafters on top of block drafters
are published."""

import heapq

import torch
from compare import assert_same
from oracles import block_tree as oracle

import specdec_ext

TOPK, VOCAB = 8, 151936


def heap_on_the_host(logits, anchors, positions, num_nodes):
    """(ids, parents, masks as booleans, positions) of every request."""
    value, token = torch.log_softmax(logits.float(), -1).topk(TOPK, -1)
    out = []
    for b in range(logits.shape[0]):
        scores, tokens = value[b].tolist(), token[b].tolist()
        ids, parents, depths, sums = [int(anchors[b])], [-1], [0], [0.0]
        ready = [(-scores[0][0], 1, 0, 0)]
        while ready and len(ids) < num_nodes:
            score, depth, parent, rank = heapq.heappop(ready)
            node = len(ids)
            ids.append(tokens[depth - 1][rank])
            parents.append(parent)
            depths.append(depth)
            sums.append(-score)
            if rank + 1 < TOPK:
                following = sums[parent] + scores[depth - 1][rank + 1]
                heapq.heappush(ready, (-following, depth, parent, rank + 1))
            if depth < len(scores):
                heapq.heappush(ready, (score - scores[depth][0], depth + 1, node, 0))
        mask = torch.eye(len(ids), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        out.append(
            (torch.tensor(ids), torch.tensor(parents), mask, positions[b] + torch.tensor(depths))
        )
    return out


def bench(harness):
    on = harness.device
    for batch, rows, num_nodes in [(1, 7, 32), (1, 15, 64), (4, 7, 32)]:
        g = torch.Generator().manual_seed(rows)
        inputs = []
        for _ in range(8):
            logits = 2.0 * torch.randn(batch, rows, VOCAB, generator=g)
            inputs.append((logits.bfloat16().to(on), torch.arange(batch, device=on)))

        def ours(case, num_nodes=num_nodes):
            return specdec_ext.block_tree(*case, case[1], num_nodes, TOPK, vocab_size=VOCAB)

        def heap(case, num_nodes=num_nodes):
            return heap_on_the_host(*case, case[1], num_nodes)

        def check(ours=ours, num_nodes=num_nodes, rows=rows):
            case = oracle.random_case(
                torch.Generator().manual_seed(1), 2, rows, VOCAB, TOPK, num_nodes
            )
            got = specdec_ext.block_tree(
                **{k: v.to(on) if torch.is_tensor(v) else v for k, v in case.items()}
            )
            for mine, theirs in zip(got, oracle.block_tree(**case), strict=True):
                assert_same(mine.cpu(), theirs)
            lists = heap_on_the_host(
                case["logits"].to(on), case["anchor_ids"], case["positions"], num_nodes
            )
            for b, (ids, parents, *_) in enumerate(lists):
                assert ids.tolist() == got[0][b].tolist()
                assert parents.tolist() == got[1][b].tolist()

        harness.case(
            "block_tree",
            f"{batch} x {rows} positions, {num_nodes} nodes, V={VOCAB} bfloat16",
            inputs=inputs,
            ours=ours,
            peers={"torch log_softmax + topk, heap on the host": heap},
            bytes=batch * (rows * VOCAB * 2 + num_nodes * 36),
            check=check,
            target=20.0,
        )
