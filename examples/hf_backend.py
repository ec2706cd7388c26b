"""Causal language models of transformers on the specdec operators: ragged rows of many requests in one pass, over a paged
cache, in chains or trees. The modelling code stays transformers' own; only attention is replaced.

    model = HfModel(AutoModelForCausalLM.from_pretrained(...))
    Engine(model, stop_ids).generate(requests, drafter, num_drafts=7)
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from engine.kv_cache import PagedKvCache
from engine.linear import LINEARS, Linear
from engine.model import PassRows, Taps

ops = torch.ops.specdec

NAME = "specdec"
MODEL_TYPES = ("llama", "qwen3", "gemma2", "gemma3_text")


@dataclass(frozen=True)
class HfConfig:
    """What the engine and its drafters ask a target for."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int


@dataclass(frozen=True)
class HfWeights:
    embedding: Tensor  # [V, d], also the output projection


@dataclass(frozen=True)
class CachedPass:
    """The rows of a pass and the cache that they go to, on their way through the model to its attention."""

    rows: PassRows
    cache: PagedKvCache


def specdec_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cached_pass: CachedPass | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: query [1, Hq, R, D], key and value [1, Hkv, R, D] of the rows of a pass;
    the result [1, R, Hq, D]. What a row sees is in the pass, not in a mask."""
    if cached_pass is None or attention_mask is not None:
        raise RuntimeError(
            "specdec attention: wanted cached_pass and no mask: call HfModel.forward"
        )
    if not getattr(module, "is_causal", True):
        raise RuntimeError(
            f"specdec attention: wanted a causal layer, got {type(module).__name__} without"
        )
    rows, layer = cached_pass.rows, module.layer_idx
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    keys, values = cached_pass.cache.keys[layer], cached_pass.cache.values[layer]
    ops.append_kv(k, v, keys, values, rows.slots)
    out = rows.attend(
        q,
        keys,
        values,
        scale=scaling,
        positions=rows.positions,  # of a tree's nodes, whose window is not that of their places
        window=sliding_window or -1,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out[None], None


AttentionInterface.register(NAME, specdec_attention)


class HfModel:
    """A model of transformers as the engine's target.

    `model` changes: its attention is `specdec_attention` from here on, and with the row-invariant linear (the default)
    so are its linear layers, without which a row has other bits in a pass of another size.
    """

    def __init__(self, model: PreTrainedModel, linear: Linear = LINEARS["specdec"]):
        config = model.config
        if config.model_type not in MODEL_TYPES:
            raise ValueError(
                f"model_type: wanted one of {', '.join(MODEL_TYPES)}, got {config.model_type!r}"
            )
        model.eval().set_attn_implementation(NAME)
        self.model, self.linear = model, linear
        self.config = HfConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            max_positions=config.max_position_embeddings,
        )
        self.device, self.dtype = model.device, model.dtype
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self._taps = Taps(())
        layers = self._decoder.layers
        layers[0].register_forward_pre_hook(lambda _module, args: self._taps.see(-1, args[0][0]))
        for index, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._see, index))
        if linear is LINEARS["specdec"]:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.forward = partial(row_invariant, module)

    @property
    def weights(self) -> HfWeights:
        """For drafters, which embed and project through one matrix of the target."""
        embedding = self.model.get_input_embeddings()
        if type(embedding) is not nn.Embedding or self._head.weight is not embedding.weight:
            raise ValueError(
                "drafters: wanted a target with plain and tied embeddings, "
                f"got {type(embedding).__name__} and {type(self._head).__name__}"
            )
        return HfWeights(embedding.weight)

    def new_cache(self, num_pages: int, page_size: int) -> PagedKvCache:
        c = self.model.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return PagedKvCache(
            c.num_hidden_layers, num_pages, page_size, c.num_key_value_heads, head_dim,
            self.dtype, self.device,
        )  # fmt: skip

    def cheap_row_count(self, num_rows: int) -> int:
        return self.linear.cheap_row_count(num_rows, self.device, self.dtype)

    @torch.inference_mode()
    def forward(self, rows: PassRows, cache: PagedKvCache, taps: Taps | None = None) -> Tensor:
        """Hidden states [R, d] after the final norm; otherwise as `LlamaModel.forward`."""
        self._taps = taps or Taps(())
        out = self._decoder(
            input_ids=rows.token_ids[None],
            position_ids=rows.positions[None],
            use_cache=False,
            cached_pass=CachedPass(rows, cache),
        )
        return out.last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [R, V] of what `forward` returns."""
        logits = self._head(hidden)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _see(self, index: int, _module: nn.Module, _args: tuple, output: Tensor | tuple) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._taps.see(index, hidden[0])


def row_invariant(module: nn.Linear, x: Tensor) -> Tensor:
    return ops.row_linear(x.flatten(0, -2), module.weight, module.bias).unflatten(0, x.shape[:-1])
