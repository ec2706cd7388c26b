"""EAGLE-3: one layer that reads [embedding of a token; features of the target at the token before it].

A draft's own hidden state takes the place of features that the target has not computed yet. Once it has, the layer
runs over the accepted tokens again, and keys and values made of recycled states are written over.
"""

from dataclasses import replace

import torch
from torch import Tensor

from drafters.base import MAX_CANDIDATES, TreeShape
from drafters.configs import Eagle3Config, eagle3_taps
from drafters.layers import check_target, finish_layer, rms_norm, turned_heads
from drafters.weights import Eagle3Weights, move
from engine.batch import BatchState, Drafts, tree_drafts
from engine.kv_cache import PagedKvCache, slots_of
from engine.layout import TargetPass
from engine.model import LlamaModel, PassRows, rotary_tables

ops = torch.ops.specdec


class Eagle3:
    """Proposes a chain of the most likely tokens, or with `tree` the dynamic tree of EAGLE-2 (arXiv 2406.16858): at
    every depth the `topk` best continuations go on, and of all continuations looked at the best `num_nodes - 1` are
    verified. Certain drafts, whatever the temperature.

    Place i of the drafter's cache is token i + 1 with the features of place i. Angles are those of place i; the
    exporters that count from the token turn every query and key by one more, which changes no score.
    """

    name = "EAGLE-3"

    def __init__(
        self,
        config: Eagle3Config,
        weights: Eagle3Weights,
        target: LlamaModel,
        max_drafts: int = 7,
        *,
        tree: TreeShape | None = None,
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
        if tree is not None and tree.topk * (1 + tree.topk * (max_drafts - 1)) > MAX_CANDIDATES:
            raise ValueError(
                f"EAGLE-3: topk {tree.topk} at {max_drafts} depths: more than {MAX_CANDIDATES} candidates"
            )
        self.config, self.target, self.max_drafts, self.tree = config, target, max_drafts, tree
        self.weights = w = move(weights, target.device, target.dtype)
        self._embedding = target.weights.embedding if w.embedding is None else w.embedding
        self._lm_head = target.weights.embedding if w.lm_head is None else w.lm_head
        self._cos, self._sin = rotary_tables(
            config.layers.head_dim,
            config.layers.rope_theta,
            target.config.max_positions + max_drafts,
            target.device,
        )

    @property
    def lookahead(self) -> int:
        if self.tree is None:
            return self.max_drafts
        return max(self.tree.num_nodes, self.tree.topk * (self.max_drafts - 1))

    def start(self, state: BatchState, cache: PagedKvCache) -> None:
        c, device = self.config.layers, self.target.device
        self._cache = PagedKvCache(
            1,
            cache.num_pages,
            cache.page_size,
            c.num_kv_heads,
            c.head_dim,
            self.target.dtype,
            device,
        )
        # Of every request the output at the place before its anchor; there is none behind a prompt of one token.
        self._hidden = torch.zeros(
            state.batch_size, c.hidden_size, dtype=self.target.dtype, device=device
        )
        self._ready = torch.zeros(state.batch_size, dtype=torch.bool, device=device)

    def admit(self, index: int) -> None:
        self._ready[index] = False

    def observe(self, state: BatchState, seen: TargetPass) -> None:
        """Runs the layer over the rows of the pass with the features that the target has now. Rejected rows are
        among them: the next pass writes over their places, and nothing reads these before."""
        rows = seen.rows
        features = ops.fuse_features(
            seen.hiddens, self.weights.fc, None, self.config.layers.norm_eps
        )
        followers = state.history[seen.requests, rows.positions + 1].clamp(min=0)
        out = self._run(features, replace(rows, token_ids=followers))
        kept = seen.num_committed > 0
        last = (rows.cu_rows[:-1] + seen.num_committed - 1).clamp(min=0)
        self._hidden[seen.members] = torch.where(
            kept[:, None], out[last], self._hidden[seen.members]
        )
        self._ready[seen.members] |= kept

    def propose(self, state: BatchState, num_drafts: int) -> Drafts:
        num_drafts = min(num_drafts, self.max_drafts)
        if self.tree is not None:
            return self.grow_tree(state, num_drafts)
        hidden, tokens = self._hidden, []
        for step in range(num_drafts):
            tokens.append(self.pick(hidden))
            if step + 1 < num_drafts:
                rows = self._draft_rows(state, tokens[-1][:, None], begin=step)
                hidden = self._run(hidden, rows)
        counts = torch.full_like(state.num_tokens, num_drafts).where(self._ready, 0)
        return Drafts(torch.stack(tokens, 1), counts)

    def grow_tree(self, state: BatchState, depth: int) -> Drafts:
        """Every depth is one pass of the layer over the topk frontier nodes. Nodes of the depths before are among the
        rows that attend, as only rows can be hidden from each other, but nothing else is computed of them again."""
        topk, batch = self.tree.topk, state.batch_size
        device = state.history.device
        hidden = self._hidden[:, None]  # [B, F, d] of the frontier F, at first the anchor
        scores = torch.zeros(batch, 1, device=device)
        # Of every frontier node the candidate that it is.
        above = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
        seen_by = torch.zeros(batch, 1, -(-topk * depth // 32), dtype=torch.int32, device=device)
        queries, masks, candidates, num_candidates = [], [], [], 0
        for level in range(depth):
            logits = self.logits(hidden.flatten(0, 1)).view(batch, hidden.size(1), -1)
            tokens, slot, scores, found, found_scores, index = ops.expand_tree(
                logits, scores, topk, vocab_size=self.config.layers.vocab_size, d2t=self.weights.d2t
            )
            candidates.append((found, found_scores, above.repeat_interleave(topk, dim=1)))
            if level + 1 == depth:
                break
            above = num_candidates + index
            num_candidates += found.size(1)
            slot = slot.long()[:, :, None]
            hidden = hidden.gather(1, slot.expand(-1, -1, hidden.size(2)))
            seen_by = seen_by.gather(1, slot.expand(-1, -1, seen_by.size(2)))
            seen_by = seen_by | own_bits(level * topk, topk, seen_by.size(2), device)
            masks.append(seen_by)
            rows = self._draft_rows(state, tokens.clamp(min=0), begin=level * topk, depth=level)
            hidden = self._run_frontier(hidden, rows, queries, torch.cat(masks, dim=1))
        tokens, path_scores, parents = (
            torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True)
        )
        built = ops.build_tree(
            tokens,
            path_scores,
            parents,
            state.anchor_ids,
            state.anchor_positions,
            self.tree.num_nodes,
        )
        return tree_drafts(built, state.anchor_positions, state.active & self._ready, depth)

    def pick(self, hidden: Tensor) -> Tensor:
        """The most likely target ids [B] after hidden states [B, d]."""
        columns = self.logits(hidden).argmax(-1)
        return columns if self.weights.d2t is None else columns + self.weights.d2t[columns]

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, Vd], by column of the draft vocabulary."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.layers.norm_eps)
        return self.target.linear(normed, self._lm_head)

    def _draft_rows(
        self, state: BatchState, token_ids: Tensor, begin: int, depth: int | None = None
    ) -> PassRows:
        """Rows [B * n] of drafts [B, n], at the places from `begin` behind the context of their request on. Their
        positions count on from it or, of a tree, are all `depth` behind it."""
        batch, count = token_ids.shape
        takes_part, anchors = state.active & self._ready, state.anchor_positions
        column = torch.arange(begin, begin + count, device=anchors.device)
        requests = torch.arange(batch, device=anchors.device).repeat_interleave(count)
        places = (anchors[:, None] + column).flatten()
        slots = slots_of(state.block_table, requests, places, self._cache.page_size)
        return PassRows(
            token_ids=token_ids.flatten(),
            positions=places if depth is None else anchors[requests] + depth,
            slots=slots.where(takes_part[requests], -1),
            cu_rows=torch.arange(batch + 1, dtype=torch.int32, device=anchors.device) * count,
            seq_lens=(anchors + begin + count).where(takes_part, 0).to(torch.int32),
            block_table=state.block_table,
            max_rows=count,
        )

    def _run(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """The layer over rows of hidden states [R, d] and the tokens that follow them; its output, before any norm."""
        attended = self._attend(self._project(hidden, rows), rows)
        return finish_layer(
            self.weights.layer, self.target.linear, self.config.layers.norm_eps, hidden, attended
        )

    def _run_frontier(
        self, hidden: Tensor, rows: PassRows, queries: list[Tensor], tree_mask: Tensor
    ) -> Tensor:
        """The same for the frontier [B, F, d] of a tree, whose earlier nodes have left their `queries` [B, n, Hq, D];
        `tree_mask` [B, n + F, W] is that of all nodes."""
        layer, eps, (batch, count, _) = (
            self.weights.layer,
            self.config.layers.norm_eps,
            hidden.shape,
        )
        hidden = hidden.flatten(0, 1)
        queries.append(self._project(hidden, rows).unflatten(0, (batch, count)))
        q = torch.cat(queries, dim=1)
        num_nodes = q.size(1)
        rows = replace(
            rows,
            cu_rows=rows.cu_rows // count * num_nodes,
            max_rows=num_nodes,
            tree_mask=tree_mask.flatten(0, 1),
        )
        attended = self._attend(q.flatten(0, 1), rows).unflatten(0, (batch, num_nodes))
        attended = attended[:, -count:].flatten(0, 1)
        out = finish_layer(layer, self.target.linear, eps, hidden, attended)
        return out.unflatten(0, (batch, count))

    def _project(self, hidden: Tensor, rows: PassRows) -> Tensor:
        """Queries [R, Hq, D]; keys and values go into the cache."""
        c, w, linear = self.config.layers, self.weights, self.target.linear
        embedded = rms_norm(self._embedding[rows.token_ids], w.layer.input_norm, c.norm_eps)
        x = torch.cat([embedded, rms_norm(hidden, w.hidden_norm, c.norm_eps)], dim=1)
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        q = linear(x, w.layer.q).view(-1, c.num_heads, c.head_dim)
        k, v = linear(x, w.layer.kv).view(-1, 2, c.num_kv_heads, c.head_dim).unbind(1)
        k = turned_heads(k, w.layer.k_norm, c.norm_eps, cos, sin)
        ops.append_kv(k, v, self._cache.keys[0], self._cache.values[0], rows.slots)
        return turned_heads(q, w.layer.q_norm, c.norm_eps, cos, sin)

    def _attend(self, q: Tensor, rows: PassRows) -> Tensor:
        return rows.attend(q, self._cache.keys[0], self._cache.values[0])


def own_bits(begin: int, count: int, num_words: int, device: torch.device) -> Tensor:
    """Mask rows [1, count, num_words] of nodes `begin` and on, each with its own bit alone."""
    node = torch.arange(begin, begin + count, device=device)[:, None]
    word = torch.arange(num_words, device=device)
    return ((node // 32 == word).long() << node % 32).to(torch.int32)[None]
