"""DFlash (arXiv 2602.06036): all drafts of a request in one pass over a block of the anchor and masks.

Context enters the drafter's caches from hidden states of the target, without attention or feed-forward. The
block attends to it and, in both directions, to itself; its own keys and values last for one pass.
"""

import torch
from torch import Tensor

import specdec_ext
from drafters.base import TreeShape
from drafters.configs import BlockConfig
from drafters.layers import check_target, finish_layer, rms_norm, turned_heads
from drafters.weights import BlockWeights, move
from engine.batch import BatchState, Drafts, tree_drafts
from engine.kv_cache import PagedKvCache
from engine.layout import TargetPass
from engine.model import LlamaModel, rotary_tables

ops = torch.ops.specdec


class DFlash:
    """Proposes the most likely token at every place, or with `tree` the best paths through the likeliest tokens of all
    places: certain drafts, whatever the temperature."""

    name = "DFlash"

    def __init__(
        self,
        config: BlockConfig,
        weights: BlockWeights,
        target: LlamaModel,
        *,
        tree: TreeShape | None = None,
    ):
        check_target(
            target,
            hidden_size=config.layers.hidden_size,
            vocab_size=config.layers.vocab_size,
            num_layers=config.num_target_layers,
        )
        self.config, self.target, self.tree = config, target, tree
        self.weights = move(weights, target.device, target.dtype)
        self.tapped_layers = config.target_layer_ids
        layers = self.weights.layers
        self._kv_weight = torch.cat([layer.kv for layer in layers])  # [L * 2 * Hkv * D, d]
        self._k_norms = torch.stack([layer.k_norm for layer in layers])
        # A block at the end of a request reaches past the target's last position.
        self._cos, self._sin = rotary_tables(
            config.layers.head_dim,
            config.layers.rope_theta,
            target.config.max_positions + config.block_size,
            target.device,
        )

    @property
    def lookahead(self) -> int:
        return max(self.config.block_size, self.tree.num_nodes if self.tree else 0)

    def start(self, state: BatchState, cache: PagedKvCache) -> None:
        c = self.config.layers
        self._cache = PagedKvCache(
            c.num_layers, cache.num_pages, cache.page_size, c.num_kv_heads, c.head_dim,
            self.target.dtype, self.target.device,
        )  # fmt: skip

    def admit(self, index: int) -> None:
        """Nothing is kept outside of the cache."""

    def observe(self, state: BatchState, seen: TargetPass) -> None:
        """Keys and values of the committed rows, of all layers at once. Rejected rows leave nothing."""
        w, eps = self.weights, self.config.layers.norm_eps
        features = ops.fuse_features(seen.hiddens, w.fc, w.hidden_norm, eps)
        self._inject(
            features, self._kv_weight, slice(None), seen.rows.positions, seen.rows.slots,
            cu_rows=seen.rows.cu_rows, commit_rows=seen.num_committed.to(torch.int32),
        )  # fmt: skip

    def propose(self, state: BatchState, num_drafts: int) -> Drafts:
        hidden = self.run_block(state, min(num_drafts, self.config.max_drafts))
        base_logits = self.target.linear(hidden.flatten(0, 1), self.target.weights.embedding)
        return self.draw(state, hidden, base_logits.view(*hidden.shape[:2], -1))

    def draw(self, state: BatchState, hidden: Tensor, base_logits: Tensor) -> Drafts:
        """Drafts from the block's final hidden states [B, G, d] and logits [B, G, V] of its drafts' rows."""
        if self.tree is not None:
            return self.draw_tree(state, base_logits)
        tokens = base_logits.argmax(-1)
        return Drafts(tokens, torch.full_like(state.num_tokens, tokens.size(1)))

    def draw_tree(self, state: BatchState, base_logits: Tensor) -> Drafts:
        """The best tree under the laws of the block's places, which do not know each other's tokens."""
        built = ops.block_tree(
            base_logits,
            state.anchor_ids,
            state.anchor_positions,
            self.tree.num_nodes,
            self.tree.topk,
            vocab_size=self.config.layers.vocab_size,
            temperature=state.temperature,
        )
        return tree_drafts(built, state.anchor_positions, state.active, base_logits.size(1))

    def run_block(self, state: BatchState, num_drafts: int) -> Tensor:
        """Normed hidden states [B, G, d] of the rows that predict drafts 1 to G."""
        config, c, linear = self.config, self.config.layers, self.target.linear
        starts = state.anchor_positions.to(torch.int32)
        input_ids, positions, slots, draft_rows = specdec_ext.draft_block(
            state.anchor_ids.where(state.active, -1),
            starts,
            state.block_table,
            page_size=self._cache.page_size,
            num_drafts=num_drafts,
            mask_token_id=config.mask_token_id,
            sample_from_anchor=config.sample_from_anchor,
        )
        batch, length = input_ids.shape
        positions, slots = positions.flatten(), slots.flatten()
        cos, sin = self._cos[positions], self._sin[positions]
        cu_rows = torch.arange(batch + 1, dtype=torch.int32, device=positions.device) * length
        seq_lens = (starts + length).where(state.active, 0)
        x = self.target.weights.embedding[input_ids.flatten()]
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(x, layer.input_norm, c.norm_eps)
            q = linear(normed, layer.q).view(-1, c.num_heads, c.head_dim)
            self._inject(normed, layer.kv, slice(index, index + 1), positions, slots)
            attended, _ = ops.verify_attention(
                turned_heads(q, layer.q_norm, c.norm_eps, cos, sin),
                self._cache.keys[index],
                self._cache.values[index],
                state.block_table,
                cu_rows,
                seq_lens,
                max_rows=length,
                mask="full",
            )
            x = finish_layer(layer, linear, c.norm_eps, x, attended)
        return rms_norm(x[draft_rows], self.weights.final_norm, c.norm_eps)

    def _inject(
        self, x: Tensor, kv_weight: Tensor, layers: slice, positions: Tensor, slots: Tensor, **rows
    ) -> None:
        c = self.config.layers
        norms = self._k_norms[layers]
        kv = self.target.linear(x, kv_weight)
        ops.inject_kv(
            kv.view(-1, norms.size(0), 2, c.num_kv_heads, c.head_dim),
            norms,
            self._cos,
            self._sin,
            positions,
            slots,
            self._cache.keys[layers],
            self._cache.values[layers],
            eps=c.norm_eps,
            **rows,
        )
