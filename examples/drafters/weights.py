"""Tensors of a drafter's checkpoint, by the names of its exporter."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafters.configs import (
    BlockConfig,
    Eagle3Config,
    LayerConfig,
    read_block_config,
    read_eagle3_config,
)
from drafters.files import CheckpointError, TensorFiles


@dataclass
class DraftLayer:
    """Projections that read the same input are one matrix."""

    input_norm: Tensor  # [d]
    q: Tensor  # [Hq * D, in]
    kv: Tensor  # [2 * Hkv * D, in], K first
    attention_out: Tensor  # [d, Hq * D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    ffn_norm: Tensor  # [d]
    gate_up: Tensor  # [2 * ffn, d]
    ffn_down: Tensor  # [d, ffn]


@dataclass
class MarkovHead:
    """w1 goes by target id, w2 by column of the logits."""

    w1: Tensor  # [V, r]
    w2: Tensor  # [V, r]
    gate_weight: Tensor | None = None  # [r, d + r]
    gate_bias: Tensor | None = None  # [r]
    joint_weight: Tensor | None = None  # [3 r, 2 r + d]
    joint_bias: Tensor | None = None  # [3 r]


@dataclass
class ConfidenceHead:
    """Read in float32, whatever the rest of the model is."""

    weight: Tensor  # float32 [d + r] or [d]
    bias: float


@dataclass
class BlockWeights:
    fc: Tensor  # [d, features * d_target]
    hidden_norm: Tensor  # [d]
    layers: list[DraftLayer]
    final_norm: Tensor  # [d]
    markov: MarkovHead | None = None
    confidence: ConfidenceHead | None = None


@dataclass
class Eagle3Weights:
    fc: Tensor  # [d, features * d_target]
    hidden_norm: Tensor  # [d]
    layer: DraftLayer  # reads [embedding; hidden], in = 2 d
    final_norm: Tensor  # [d]
    lm_head: Tensor | None  # [Vd, d]; None: the target's
    d2t: Tensor | None  # int64 [Vd], offsets: column c is the target id c + d2t[c]
    embedding: Tensor | None  # [V, d]; None: the target's


def move(value, device: torch.device, dtype: torch.dtype):
    """Weights, or a list of them, on the device. Integers and the confidence head keep their type."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, list):
        return [move(item, device, dtype) for item in value]
    if isinstance(value, ConfidenceHead):
        return ConfidenceHead(value.weight.to(device), value.bias)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: move(x, device, dtype) for name, x in vars(value).items()})
    return value


def load_block_drafter(
    folder: Path, sample_from_anchor: bool | None = None
) -> tuple[BlockConfig, BlockWeights]:
    """DSpark and DFlash. Copies of the target's embedding and output projection, which DeepSpec exports and z-lab
    does not, are left out: the target has them."""
    config = read_block_config(folder, sample_from_anchor)
    files, c = TensorFiles(folder), config.layers
    for copied in ("embed_tokens.weight", "lm_head.weight"):
        files.take_if_there(copied, c.vocab_size, c.hidden_size)
    # The width of the target is that of the drafter, which reads through the target's output projection.
    weights = BlockWeights(
        fc=files.take("fc.weight", c.hidden_size, len(config.target_layer_ids) * c.hidden_size),
        hidden_norm=files.take("hidden_norm.weight", c.hidden_size),
        layers=[
            _layer(files, f"layers.{index}.", c, c.hidden_size, normed=True)
            for index in range(c.num_layers)
        ],
        final_norm=files.take("norm.weight", c.hidden_size),
        markov=_markov(files, config) if config.markov_rank else None,
        confidence=_confidence(files, config) if config.has_confidence else None,
    )
    files.finish()
    return config, weights


def load_eagle3(folder: Path) -> tuple[Eagle3Config, Eagle3Weights]:
    """EAGLE-3, of its authors and of DeepSpec. Copies of the target's embedding and output projection, which the
    latter has, are left out; in the former they are the drafter's own."""
    config = read_eagle3_config(folder)
    files, c = TensorFiles(folder), config.layers
    d, columns = c.hidden_size, config.draft_vocab_size
    copies = config.target_layer_ids is not None
    embedding = files.take_if_there("embed_tokens.weight", c.vocab_size, d)
    take_head = files.take_if_there if copies else files.take
    lm_head = take_head("lm_head.weight", columns, d)
    reduced = columns < c.vocab_size
    weights = Eagle3Weights(
        fc=files.take("fc.weight", d, config.num_features * config.target_hidden_size),
        hidden_norm=files.take(config.layer_prefix + "hidden_norm.weight", d),
        layer=_layer(files, config.layer_prefix, c, 2 * d, normed=config.normed_heads),
        final_norm=files.take("norm.weight", d),
        lm_head=None if copies else lm_head,
        d2t=files.take("d2t", columns) if reduced else files.take_if_there("d2t", columns),
        embedding=None if copies else embedding,
    )
    members = files.take_if_there("t2d", c.vocab_size)
    if weights.d2t is not None:
        _check_d2t(files, weights.d2t, members, c.vocab_size)
    if weights.embedding is None and d != config.target_hidden_size:
        wanted = (
            f"a tensor {[c.vocab_size, d]}, as the target's is {config.target_hidden_size} wide"
        )
        raise CheckpointError(files.path, "embed_tokens.weight", wanted, "nothing")
    files.finish()
    return config, weights


def _layer(
    files: TensorFiles, prefix: str, c: LayerConfig, width: int, *, normed: bool
) -> DraftLayer:
    d, q_rows, kv_rows = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def take(name: str, *shape: int) -> Tensor:
        return files.take(f"{prefix}{name}.weight", *shape)

    k, v = (take(f"self_attn.{side}_proj", kv_rows, width) for side in "kv")
    gate, up = (take(f"mlp.{side}_proj", c.ffn_size, d) for side in ("gate", "up"))
    return DraftLayer(
        input_norm=take("input_layernorm", d),
        q=take("self_attn.q_proj", q_rows, width),
        kv=torch.cat([k, v]),
        attention_out=take("self_attn.o_proj", d, q_rows),
        q_norm=take("self_attn.q_norm", c.head_dim) if normed else None,
        k_norm=take("self_attn.k_norm", c.head_dim) if normed else None,
        ffn_norm=take("post_attention_layernorm", d),
        gate_up=torch.cat([gate, up]),
        ffn_down=take("mlp.down_proj", d, c.ffn_size),
    )


def _markov(files: TensorFiles, config: BlockConfig) -> MarkovHead:
    vocab_size, d, r = config.layers.vocab_size, config.layers.hidden_size, config.markov_rank
    w1, w2 = (files.take(f"markov_head.markov_{w}.weight", vocab_size, r) for w in ("w1", "w2"))
    if config.markov_head == "gated":
        gate = files.take("markov_head.gate_proj.weight", r, d + r)
        return MarkovHead(w1, w2, gate, files.take("markov_head.gate_proj.bias", r))
    if config.markov_head == "rnn":
        joint = files.take("markov_head.joint_proj.weight", 3 * r, 2 * r + d)
        bias = files.take("markov_head.joint_proj.bias", 3 * r)
        return MarkovHead(w1, w2, joint_weight=joint, joint_bias=bias)
    return MarkovHead(w1, w2)


def _confidence(files: TensorFiles, config: BlockConfig) -> ConfidenceHead:
    width = config.layers.hidden_size
    width += config.markov_rank if config.confidence_reads_markov else 0
    weight = files.take("confidence_head.proj.weight", 1, width)
    bias = files.take("confidence_head.proj.bias", 1)
    return ConfidenceHead(weight[0].float(), float(bias[0]))


def _check_d2t(files: TensorFiles, d2t: Tensor, members: Tensor | None, vocab_size: int) -> None:
    """Offsets that lead to distinct target ids, and `t2d`, where there is one, marks just these."""
    if d2t.dtype != torch.int64:
        raise CheckpointError(files.path, "d2t", "int64 offsets", d2t.dtype)
    ids = d2t + torch.arange(d2t.numel())
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        wanted = f"offsets to target ids below {vocab_size}"
        raise CheckpointError(files.path, "d2t", wanted, f"id {int(ids[outside][0])}")
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[ids] = True
    if int(marked.sum()) != ids.numel():
        wanted = f"offsets to {ids.numel()} different target ids"
        raise CheckpointError(files.path, "d2t", wanted, int(marked.sum()))
    if members is not None and not torch.equal(members.bool(), marked):
        raise CheckpointError(files.path, "t2d", "the target ids of d2t", "others")
