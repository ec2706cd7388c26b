"""schedule_prefix against the operations of torch that an engine would use: a product along the drafts, a
sort over the batch, sums, and the first candidate that does not pay. torch's plan is read from it without a
copy to the host, as ours is."""

import torch
from compare import assert_same
from oracles import schedule_prefix as oracle

import specdec_ext

DRAFTS = 7


def from_torch(confidence, table, budget):
    """The same results, one operation after the other; every request is active."""
    batch, drafts = confidence.shape
    survival = confidence.clamp(0, 1).cumprod(1)
    # By place, then request: a stable sort of the transposed survivals.
    order = survival.t().reshape(-1).sort(descending=True, stable=True)
    rank = torch.arange(1, batch * drafts + 1, device=confidence.device)
    if budget is None:
        tau = batch + order.values.double().cumsum(0)
        theta = tau * table[(batch + rank).clamp(max=len(table) - 1)]
        before = torch.cat([batch * table[min(batch, len(table) - 1)][None].double(), theta[:-1]])
        admitted = (theta > before).int().cumprod(0).bool()
    else:
        admitted = rank <= budget
    admitted = admitted & (order.values > 0)
    num_drafts = torch.zeros(batch, dtype=torch.int32, device=confidence.device)
    num_drafts.scatter_add_(0, order.indices % batch, admitted.int())
    cu_rows = torch.nn.functional.pad((num_drafts + 1).cumsum(0, dtype=torch.int32), (1, 0))
    return num_drafts, cu_rows


def bench(harness):
    on = harness.device
    for batch in (1, 8, 64, 512):
        g = torch.Generator().manual_seed(batch)
        confidence = 0.45 + 0.5 * torch.rand(batch, DRAFTS, generator=g)
        table = 1.0 / (20.0 + torch.arange(batch * (DRAFTS + 1) + 1))
        for budget in (None, batch * 3):
            case = {"confidence": confidence, "steps_per_second": table}
            if budget is not None:
                case["budget"] = torch.tensor([budget], dtype=torch.int32)
            there = {k: v.to(on) for k, v in case.items()}

            def ours(call):
                return specdec_ext.schedule_prefix(**call)

            def torch_ops(call):
                return from_torch(call["confidence"], call["steps_per_second"], call.get("budget"))

            def check(case=case, there=there, ours=ours, torch_ops=torch_ops):
                wanted = oracle.schedule_prefix(**case)
                for plan in (ours(there), torch_ops(there)):
                    for mine, theirs in zip(plan, wanted, strict=True):
                        assert_same(mine.cpu(), theirs)

            harness.case(
                "schedule_prefix",
                f"{batch} requests, {DRAFTS} drafts, {'early stop' if budget is None else 'budget'}",
                inputs=[there],
                ours=ours,
                peers={"torch, one op after the other": torch_ops},
                bytes=4 * batch * DRAFTS + 8 * batch,
                check=check,
            )
