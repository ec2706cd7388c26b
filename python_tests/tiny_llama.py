"""A random Llama of a few thousand weights for the tests of examples/: real architecture, no download."""

import importlib
import pathlib
import sys

import torch

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

from engine.model import LayerWeights, LlamaConfig, LlamaModel, LlamaWeights  # noqa: E402

CONFIG = LlamaConfig(
    vocab_size=67,
    hidden_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=160,
    rope_theta=10000.0,
    norm_eps=2.0**-17,
    max_positions=256,
)


def random_weights(config=CONFIG, seed=0):
    """Scaled so that activations stay near 1 and next-token laws are neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns, gain=1.0):
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def norm():
        return 1.0 + 0.1 * torch.randn(config.hidden_size, generator=generator)

    d, q_rows = config.hidden_size, config.num_heads * config.head_dim
    layers = [
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(q_rows + 2 * config.num_kv_heads * config.head_dim, d, 1.5),
            attention_out=matrix(d, q_rows),
            ffn_norm=norm(),
            gate_up=matrix(2 * config.ffn_size, d),
            ffn_down=matrix(d, config.ffn_size),
        )
        for _ in range(config.num_layers)
    ]
    embedding = matrix(config.vocab_size, d, 2.5)
    return LlamaWeights(embedding=embedding, layers=layers, final_norm=norm())


def random_model(device="cpu", dtype=torch.float32):
    return LlamaModel(CONFIG, random_weights().to(torch.device(device), dtype))


def use_ops(monkeypatch, backend):
    """Lets the engine call the operators of one test backend."""
    for name in (
        "engine.batch",
        "engine.layout",
        "engine.linear",
        "engine.model",
        "engine.decode",
        "drafters.dflash",
        "drafters.dspark",
        "drafters.eagle3",
    ):
        monkeypatch.setattr(importlib.import_module(name), "ops", backend.ops)


def random_prompts(count, seed=0, vocab_size=CONFIG.vocab_size):
    """Prompts of different lengths, each with a phrase that comes twice so that lookup has matches."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for index in range(count):
        words = torch.randint(3, vocab_size, (5 + 3 * index,), generator=generator).tolist()
        prompts.append(words + words[: 3 + index])
    return prompts
