"""GLM-4: Llama with half of each head rotated by neighbouring lanes; the models of 2025 norm both sides of a part."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, Part, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.llama_names import interleaved, renamed
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    }
)
_ENDS = (151329, 151336, 151338)
_NORMS = MappingProxyType(
    {
        "attention_post_norm.scale": "post_self_attn_layernorm.weight",
        "mlp_post_norm.scale": "post_mlp_layernorm.weight",
    }
)


def translate_glm(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` glm: the models of 2024."""
    return _translate(config, "glm")


def translate_glm4(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` glm4: the models of 2025."""
    return replace(_translate(config, "glm4"), block="sandwich")


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: gate and up are fused."""
    fused, both = "mlp.gate_up_proj.weight", 2 * config.ffn_dim
    parts = {"mlp.gate.kernel": Part(fused, 0, both), "mlp.up.kernel": Part(fused, config.ffn_dim, both)}
    return interleaved(config, renamed(config, {**parts, **_NORMS}))


def _translate(config: Mapping[str, Any], family: str) -> DecoderConfig:
    reader = ConfigReader(config, family=family)
    rope = partial(read_rope, partial=0.5)
    decoder = read_llama_keys(
        reader, family, _DEFAULTS, eos_token_ids=_ENDS, norm_eps=("rms_norm_eps", 1.5625e-7), rope=rope
    )
    return reader.finish(replace(decoder, qkv_bias=reader.boolean("attention_bias", default=True)))


GLM = Family("glm", ("GlmForCausalLM",), translate_glm, tensor_names)
GLM4 = Family("glm4", ("Glm4ForCausalLM",), translate_glm4, tensor_names)
