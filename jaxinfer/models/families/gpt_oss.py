"""gpt-oss: experts in every layer, learned attention sinks, biases, and a window in every other layer (2508.10925)."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, Rope, RopeScaling
from jaxinfer.models.families.family import Family, Source, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import single_matrices, single_stacks, transposed_stacks
from jaxinfer.models.families.keys.gemma_keys import read_window_layers
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
    }
)
_SIZES = (("num_local_experts", 128), ("num_experts_per_tok", 4), ("intermediate_size", 2880))
_THETA, _SCALING = 150000.0, RopeScaling("yarn", 32.0, 4096, truncate=False)
_PERIOD, _WINDOW = 2, 128
_MLP = "model.layers.{layer}.mlp."


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gpt_oss."""
    reader = ConfigReader(config, family="gpt_oss")
    decoder = read_llama_keys(
        reader, "gpt_oss", _DEFAULTS, norm_eps=("rms_norm_eps", 1e-5), rope=_read_rope, activation="quick_gelu"
    )
    reader.choice("hidden_act", {"silu": "silu"}, default="silu")
    alpha = reader.positive_float("swiglu_alpha", default=1.702)
    if alpha != 1.702:
        raise reader.refuse("swiglu_alpha", alpha, "only 1.702 is known")
    experts = read_experts(reader, _SIZES, scoring="chosen_softmax", normalised=False)
    assert experts is not None
    limit = reader.positive_float("swiglu_limit", default=7.0)
    bias = reader.boolean("attention_bias", default=True)
    decoder = read_window_layers(reader, decoder, _PERIOD, width=_WINDOW)
    experts = replace(experts, bias=True, limit=limit)
    return reader.finish(replace(decoder, experts=experts, attention_sinks=True, qkv_bias=bias, output_bias=bias))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: those of all experts in one, or a matrix for each, as files of MXFP4 are read; or as GGUF's."""
    names = llama_names.tensor_names(config)
    block: dict[str, Source] = {
        **transposed_stacks(config, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        "attention.sink_logits": "model.layers.{layer}.self_attn.sinks",
        "mlp.router.weights": f"{_MLP}router.weight",
        "mlp.router.bias": f"{_MLP}router.bias",
    }
    in_gguf: dict[str, Source] = {
        **single_stacks(config),
        **{f"mlp.expert_biases.{part}": f"{_MLP}experts.{part}_proj.bias" for part in ("gate", "up", "down")},
        "attention.sink_logits": "model.layers.{layer}.self_attn.sinks.weight",
    }
    return replace(names, block={**names.block, **block}, others=(single_matrices(config, _MLP), in_gguf))


def _read_rope(reader: ConfigReader, max_position: int, head_dim: int) -> Rope:
    """Return the rotary positions; where no key says how they are scaled, those of the published models."""
    rope = read_rope(reader, max_position, head_dim, theta=_THETA)
    stated = reader.has("rope_scaling") or reader.has("rope_parameters")
    return rope if stated else replace(rope, scaling=_SCALING)


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM",), translate, tensor_names)
