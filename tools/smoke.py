"""Imports the installed package, checks that every op is registered and runs each once."""

import torch

import specdec_ext

missing = [name for name in specdec_ext.op_names() if not hasattr(torch.ops.specdec, name)]
assert not missing, missing

k = torch.randn(2, 1, 64)
cache = torch.zeros(2, 2, 4, 1, 64)
specdec_ext.append_kv(k, k, cache[0], cache[1], torch.tensor([0, 3]))
assert (cache[0, 0, 3] == k[1]).all()

tokens, *_ = specdec_ext.sample(
    torch.tensor([[0.0, 5.0, 1.0]]),
    torch.tensor([1]),
    torch.tensor([0]),
    vocab_size=3,
    temperature=torch.zeros(1),
)
assert tokens.tolist() == [1]

tokens, accepted, status, *_ = specdec_ext.verify_chain(
    torch.tensor([[0.0, 5.0, 1.0], [3.0, 0.0, 1.0]]),
    torch.tensor([2, 1]),
    torch.tensor([0, 2], dtype=torch.int32),
    torch.tensor([1]),
    torch.tensor([0]),
    1,
    vocab_size=3,
    temperature=torch.zeros(1),
)
assert tokens.tolist() == [[1, 0]] and accepted.tolist() == [1] and status.tolist() == [0]

out, lse = specdec_ext.verify_attention(
    torch.zeros(1, 1, 64),
    cache[0],
    torch.ones_like(cache[1]),
    torch.tensor([[0, 1]], dtype=torch.int32),
    torch.tensor([0, 1], dtype=torch.int32),
    torch.tensor([5], dtype=torch.int32),
    max_rows=1,
)
assert (out == 1).all() and abs(lse.item() - torch.tensor(5.0).log().item()) < 1e-6

parents, ranks = specdec_ext.tree_from_paths([[0], [1], [0, 0]])
rows = torch.tensor([0, 4], dtype=torch.int32)
mask, depth, first_child, next_sibling, status = specdec_ext.tree_links(parents, rows, 4)
assert mask.tolist() == [[1], [3], [5], [11]] and depth.tolist() == [0, 1, 1, 2]
assert specdec_ext.tree_from_mask(mask, rows)[0].tolist() == parents.tolist() == [-1, 0, 0, 1]
accepted = torch.tensor([1], dtype=torch.int32)
path = torch.tensor([[0, 2]], dtype=torch.int32)
slots, k2 = torch.tensor([4, 5, 6, 7]), cache[0].clone()
specdec_ext.compact_kv([k2], [], slots, rows, path, accepted)
assert (k2[1, 1] == cache[0][1, 2]).all()
fused = specdec_ext.fuse_features([torch.ones(1, 2), torch.ones(1, 1)], torch.ones(1, 3))
assert fused.tolist() == [[3.0]]
one, zero = torch.ones(8, 1), torch.zeros(8, 1)
specdec_ext.inject_kv(
    torch.full((1, 1, 2, 1, 64), 3.0), None, one, zero, torch.tensor([5]), torch.tensor([2]), [k2],
    [cache[1]], eps=1e-6,
)  # fmt: skip
assert (k2[0, 2] == 3).all() and (cache[1, 0, 2] == 3).all()
input_ids, positions, slots, seq_lens, *_ = specdec_ext.next_round(
    torch.tensor([[8, 9]]),
    accepted,
    torch.tensor([4], dtype=torch.int32),
    torch.tensor([[0, 1]], dtype=torch.int32),
    page_size=4,
    block_len=2,
    mask_token_id=0,
)
assert input_ids.tolist() == [[9, 0]] and slots.tolist() == [[6, 7]] and seq_lens.tolist() == [6]
print(f"torch {torch.__version__}: {len(specdec_ext.op_names())} ops registered and run")
