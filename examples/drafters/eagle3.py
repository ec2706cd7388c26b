"""EAGLE-3: one layer that reads [embedding of a token; features of the target at the token before it].

A draft's own hidden state takes the place of features that the target has not computed yet. Once it has, the layer
runs over the accepted tokens again, and keys and values made of recycled states are written over.
"""

import torch
from torch import Tensor

from drafters.configs import Eagle3Config, eagle3_taps
from drafters.layers import check_target, finish_layer, rms_norm, turned_heads
from drafters.weights import Eagle3Weights, move
from engine.batch import BatchState, Drafts, TargetPass
from engine.kv_cache import PagedKvCache, slots_of
from engine.model import LlamaModel, rotary_tables

ops = torch.ops.specdec


class Eagle3:
    """Proposes a chain of the most likely tokens: certain drafts, whatever the temperature.

    Place i of the drafter's cache is token i + 1 with the features of place i. Angles are those of place i; the
    exporters that count from the token turn every query and key by one more, which changes no score.
    """

    name = "EAGLE-3"

    def __init__(
        self, config: Eagle3Config, weights: Eagle3Weights, target: LlamaModel, max_drafts: int = 7
    ):
        check_target(
            target,
            hidden_size=config.target_hidden_size,
            vocab_size=config.layers.vocab_size,
        )
        num_layers = target.config.num_layers
        self.tapped_layers = config.target_layer_ids or eagle3_taps(num_layers)
        if not all(-1 <= layer < num_layers for layer in self.tapped_layers):
            raise ValueError(
                f"EAGLE-3: target layers {self.tapped_layers}: wanted ids of -1 to {num_layers - 1}"
            )
        self.config, self.target, self.max_drafts = config, target, max_drafts
        self.weights = w = move(weights, target.device, target.dtype)
        self._embedding = target.weights.embedding if w.embedding is None else w.embedding
        self._lm_head = target.weights.embedding if w.lm_head is None else w.lm_head
        self._cos, self._sin = rotary_tables(
            config.layers.head_dim,
            config.layers.rope_theta,
            target.config.max_positions + max_drafts,
            target.device,
        )

    def start(self, state: BatchState, page_size: int) -> None:
        c, device = self.config.layers, self.target.device
        lengths = [length + self.max_drafts for length in state.max_tokens.tolist()]
        num_pages = sum(-(-length // page_size) for length in lengths)
        self._cache = PagedKvCache(
            1, num_pages, page_size, c.num_kv_heads, c.head_dim, self.target.dtype, device
        )
        self._block_table, _ = self._cache.take(lengths)
        # Of every request the output at the place before its anchor; there is none behind a prompt of one token.
        self._hidden = torch.zeros(
            state.batch_size, c.hidden_size, dtype=self.target.dtype, device=device
        )
        self._ready = torch.zeros(state.batch_size, dtype=torch.bool, device=device)

    def observe(self, state: BatchState, seen: TargetPass) -> None:
        """Runs the layer over the rows of the pass with the features that the target has now. Rejected rows are
        among them: the next pass writes over their places, and nothing reads these before."""
        rows = seen.rows
        features = ops.fuse_features(
            seen.hiddens, self.weights.fc, None, self.config.layers.norm_eps
        )
        followers = state.history[seen.requests, rows.positions + 1].clamp(min=0)
        slots = slots_of(
            self._block_table, seen.requests, rows.positions, self._cache.page_size
        ).where(rows.slots >= 0, -1)
        out = self._run(
            features, followers, rows.positions, slots, self._block_table[seen.members],
            rows.cu_rows, rows.seq_lens, rows.max_rows,
        )  # fmt: skip
        kept = seen.num_committed > 0
        last = (rows.cu_rows[:-1] + seen.num_committed - 1).clamp(min=0)
        self._hidden[seen.members] = torch.where(
            kept[:, None], out[last], self._hidden[seen.members]
        )
        self._ready[seen.members] |= kept

    def propose(self, state: BatchState, num_drafts: int) -> Drafts:
        num_drafts = min(num_drafts, self.max_drafts)
        requests = torch.arange(state.batch_size, device=state.history.device)
        cu_rows = torch.arange(state.batch_size + 1, dtype=torch.int32, device=state.history.device)
        takes_part = state.active & self._ready
        hidden, tokens = self._hidden, []
        for step in range(num_drafts):
            tokens.append(self.pick(hidden))
            if step + 1 == num_drafts:
                break
            places = state.anchor_positions + step
            slots = slots_of(self._block_table, requests, places, self._cache.page_size)
            seq_lens = (places + 1).where(takes_part, 0).to(torch.int32)
            hidden = self._run(
                hidden, tokens[-1], places, slots.where(takes_part, -1), self._block_table,
                cu_rows, seq_lens, 1,
            )  # fmt: skip
        counts = torch.full_like(state.num_tokens, num_drafts).where(self._ready, 0)
        return Drafts(torch.stack(tokens, 1), counts)

    def pick(self, hidden: Tensor) -> Tensor:
        """The most likely target ids [B] after hidden states [B, d]."""
        columns = self.logits(hidden).argmax(-1)
        return columns if self.weights.d2t is None else columns + self.weights.d2t[columns]

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, Vd], by column of the draft vocabulary."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.layers.norm_eps)
        return self.target.linear(normed, self._lm_head)

    def _run(
        self, hidden: Tensor, token_ids: Tensor, places: Tensor, slots: Tensor,
        block_table: Tensor, cu_rows: Tensor, seq_lens: Tensor, max_rows: int,
    ) -> Tensor:  # fmt: skip
        """The layer over rows of hidden states [R, d] and the tokens that follow them; its output, before any norm."""
        c, w, linear = self.config.layers, self.weights, self.target.linear
        embedded = rms_norm(self._embedding[token_ids], w.layer.input_norm, c.norm_eps)
        x = torch.cat([embedded, rms_norm(hidden, w.hidden_norm, c.norm_eps)], dim=1)
        cos, sin = self._cos[places], self._sin[places]
        q = linear(x, w.layer.q).view(-1, c.num_heads, c.head_dim)
        k, v = linear(x, w.layer.kv).view(-1, 2, c.num_kv_heads, c.head_dim).unbind(1)
        k = turned_heads(k, w.layer.k_norm, c.norm_eps, cos, sin)
        keys, values = self._cache.keys[0], self._cache.values[0]
        ops.append_kv(k, v, keys, values, slots)
        attended, _ = ops.verify_attention(
            turned_heads(q, w.layer.q_norm, c.norm_eps, cos, sin),
            keys,
            values,
            block_table,
            cu_rows,
            seq_lens,
            max_rows=max_rows,
            mask="causal",
        )
        return finish_layer(w.layer, linear, c.norm_eps, hidden, attended)
