"""DSpark (arXiv 2607.05147): a DFlash block, a sequential head that makes a draft depend on the one before, and a
confidence head that says how many drafts are worth a row of the target's pass."""

import torch
from torch import Tensor

from drafters.base import TreeShape
from drafters.configs import BlockConfig
from drafters.dflash import DFlash
from drafters.weights import BlockWeights
from engine.batch import BatchState, Drafts
from engine.model import LlamaModel

ops = torch.ops.specdec


class DSpark(DFlash):
    """Draws its drafts at the temperature of the request and hands on the logits they came from.

    With `steps_per_second` (float32 [M+1], passes per second with n rows: `specdec_ext.StepTable`) the whole
    batch's drafts are admitted while they pay; else a request's drafts end before the first of a confidence
    below `threshold`. Both decide about a draft from what came before it, so the target's law is kept.

    With `tree` the drafts are those of the parallel stage, certain and as DFlash's: the sequential head knows chains.
    """

    name = "DSpark"

    def __init__(
        self,
        config: BlockConfig,
        weights: BlockWeights,
        target: LlamaModel,
        *,
        threshold: float = 0.0,
        steps_per_second: Tensor | None = None,
        tree: TreeShape | None = None,
    ):
        super().__init__(config, weights, target, tree=tree)
        if config.markov_rank == 0:
            raise ValueError("DSpark: markov_rank: wanted at least 1, got 0 (a DFlash checkpoint)")
        if not config.has_confidence and (threshold > 0 or steps_per_second is not None):
            raise ValueError("DSpark: the checkpoint has no confidence head to decide by")
        if tree is not None and (threshold > 0 or steps_per_second is not None):
            raise ValueError("DSpark: confidences are those of chains, they say nothing of a tree")
        self.threshold, self.steps_per_second = threshold, steps_per_second

    def draw(self, state: BatchState, hidden: Tensor, base_logits: Tensor) -> Drafts:
        if self.tree is not None:
            return self.draw_tree(state, base_logits)
        w, confidence_head = self.weights.markov, self.weights.confidence
        tokens, _, _, confidence, logits = ops.markov_draft(
            base_logits,
            state.anchor_ids,
            w.w1,
            w.w2,
            state.seeds,
            state.anchor_positions,
            vocab_size=self.config.layers.vocab_size,
            head=self.config.markov_head,
            hidden=hidden,
            gate_weight=w.gate_weight,
            gate_bias=w.gate_bias,
            joint_weight=w.joint_weight,
            joint_bias=w.joint_bias,
            confidence_weight=confidence_head.weight if confidence_head else None,
            confidence_bias=confidence_head.bias if confidence_head else 0.0,
            temperature=state.temperature,
            return_logits=True,
        )
        counts = torch.minimum(leading(tokens >= 0), self.plan(state, confidence))
        return Drafts(tokens, counts, logits, state.temperature)

    def plan(self, state: BatchState, confidence: Tensor) -> Tensor:
        """How many drafts of every request to verify, int64 [B], from their confidences [B, G]."""
        if self.steps_per_second is None:
            return leading(confidence >= self.threshold)
        num_drafts, _ = ops.schedule_prefix(confidence, self.steps_per_second, active=state.active)
        return num_drafts.long()


def leading(good: Tensor) -> Tensor:
    """Of every row of bool [B, G], how many come before the first that is false."""
    return good.long().cumprod(1).sum(1)
