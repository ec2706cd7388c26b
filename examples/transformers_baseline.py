"""The same weights under `transformers`: the reference for correctness and for speed."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model import LlamaConfig, LlamaWeights


@dataclass(frozen=True)
class BaselineGeneration:
    output_ids: list[list[int]]
    decode_seconds: float  # from the end of the prompt pass on
    decoded_tokens: int  # tokens that came out in that time

    @property
    def tokens_per_second(self) -> float | None:
        """None where the prompt pass ended every request: there was nothing to time."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else None


class _StepClock:
    """A stopping criterion that stops nothing: it is called after every token of `generate`, the first
    time when the prompt pass is over, so it tells decoding from prefill."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, _scores, **_) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.size(0), dtype=torch.bool, device=input_ids.device)

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]


def build_transformers_model(config: LlamaConfig, weights: LlamaWeights):
    """A LlamaForCausalLM whose parameters are views of our merged weights: no second copy."""
    from transformers import LlamaConfig as HfConfig
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf_config = HfConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_size,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(hf_config)
    model.load_state_dict(hf_state_dict(config, weights), assign=True)
    model.tie_weights()
    # The rotary frequencies are computed, not loaded: on the meta device there was nothing to compute.
    model.model.rotary_emb = LlamaRotaryEmbedding(hf_config).to(weights.embedding.device)
    return model.eval()


def hf_state_dict(config: LlamaConfig, weights: LlamaWeights) -> dict[str, Tensor]:
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "lm_head.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
    }
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([q_rows, kv_rows, kv_rows])
        gate, up = layer.gate_up.split(config.ffn_size)
        parts = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_out,
            "post_attention_layernorm": layer.ffn_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.ffn_down,
        }
        state |= {f"model.layers.{index}.{name}.weight": value for name, value in parts.items()}
    return state


@torch.inference_mode()
def transformers_generate(
    model,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: list[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> BaselineGeneration:
    """`generate` on a left-padded batch, timed from its first token to its last."""
    longest = max(map(len, prompts))
    pad = stop_ids[0]
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]).to(model.device)
    sampling = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
    clock = _StepClock()
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_ids,
        pad_token_id=pad,
        stopping_criteria=[clock],
        **sampling,
    )
    generated = [until_stop(row, stop_ids) for row in output[:, longest:].tolist()]
    later = sum(max(len(row) - 1, 0) for row in generated)
    return BaselineGeneration(generated, clock.seconds, later)


def until_stop(ids: list[int], stop_ids: list[int]) -> list[int]:
    """`ids` up to and with the first stop token; what `generate` pads behind it is cut off."""
    for index, token in enumerate(ids):
        if token in stop_ids:
            return ids[: index + 1]
    return ids
