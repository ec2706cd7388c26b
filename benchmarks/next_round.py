"""next_round against the operations of torch that an engine would use between two passes."""

import torch
from compare import assert_same
from oracles import next_round as oracle

import specdec_ext

PAGE, BLOCK, DRAFTS, MASK = 16, 8, 7, 3


def from_torch(tokens, num_accepted, seq_lens, block_table, stop_token_ids, max_len):
    """The same results, one operation after the other."""
    number = torch.arange(tokens.shape[1], device=tokens.device)
    active = tokens[:, 0] >= 0
    room = (max_len - seq_lens - 1).clamp(min=0)
    most = torch.minimum(num_accepted + 1, room) * active
    stops = torch.isin(tokens, stop_token_ids) & (number < most[:, None])
    stopped = stops.any(1)
    emitted = torch.where(stopped, stops.int().argmax(1) + 1, most).int()
    new_lens = seq_lens + emitted
    finished = active & (stopped | (new_lens + 1 >= max_len))
    going = (active & ~finished)[:, None]
    places = new_lens[:, None] + torch.arange(BLOCK, device=tokens.device)
    column = places // PAGE
    page = block_table.gather(1, column.clamp(max=block_table.shape[1] - 1).long()).long()
    here = going & (page >= 0) & (column < block_table.shape[1]) & (places < max_len[:, None])
    slots = torch.where(here, page * PAGE + places % PAGE, -1)
    positions = torch.where(going, torch.minimum(places, max_len[:, None] - 1), 0).long()
    input_ids = torch.full_like(positions, MASK)
    anchor = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None].long())
    input_ids[:, :1] = torch.where(going, anchor, MASK)
    return input_ids, positions, slots, new_lens, emitted, finished


def bench(harness):
    on = harness.device
    for batch in (1, 8, 64, 256):
        g = torch.Generator().manual_seed(batch)
        case = oracle.random_case(g, batch=batch, width=DRAFTS + 1, block_len=BLOCK, page_size=PAGE)
        case = {k: v.to(on) if torch.is_tensor(v) else v for k, v in case.items()}
        names = ["tokens", "num_accepted", "seq_lens", "block_table"]
        stops, limits = case["stop_token_ids"], case["max_len"]
        inputs = [[case[name] for name in names]]

        def ours(call, stops=stops, limits=limits):
            return specdec_ext.next_round(
                *call, page_size=PAGE, block_len=BLOCK, mask_token_id=MASK,
                stop_token_ids=stops, max_len=limits,
            )  # fmt: skip

        def torch_ops(call, stops=stops, limits=limits):
            return from_torch(*call, stops, limits)

        def check(call=inputs[0], case=case, ours=ours, torch_ops=torch_ops):
            case = {k: v.cpu() if torch.is_tensor(v) else v for k, v in case.items()}
            wanted = oracle.next_round(**case | {"mask_token_id": MASK})
            for out in (ours(call), torch_ops(call)):
                for got, want in zip(out, wanted, strict=True):
                    assert_same(got.cpu(), want)

        harness.case(
            "next_round",
            f"{batch} requests, {DRAFTS} drafts, block of {BLOCK}",
            inputs=inputs,
            ours=ours,
            peers={"torch, one op after the other": torch_ops},
            bytes=batch * (8 * (DRAFTS + 1) + 4 * 4 + (8 * 3) * BLOCK + 9),
            check=check,
        )
