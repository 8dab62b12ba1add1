"""K-EXAONE and Hunyuan 3: GLM-4.5's experts beside attention with norms of heads, K-EXAONE with windows too."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families import glm_moe
from jaxinfer.models.families.exaone import with_rotating_windows
from jaxinfer.models.families.family import Family, TensorNames, each_name, renamed
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.grouped_experts import Usual, read_grouped_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_rope

_EXAONE = sizes(102400, 4096, 16384, 32, 32, 32, None, 2048)
_HUNYUAN = sizes(120832, 4096, 13312, 80, 64, 8, 128, 131072)
_EXAONE_EXPERTS = Usual((64, 8, 1024), dense=1, scale=2.5)
_HUNYUAN_EXPERTS = Usual((192, 8, 1536), dense=1, scale=2.826)
_WORDS = MappingProxyType(
    {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    }
)
_EXAONE_NAMES = MappingProxyType({"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"})
_HUNYUAN_NAMES = MappingProxyType(
    {
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        "mlp.gate": "mlp.router.gate",
        "mlp.shared_experts": "mlp.shared_mlp",
    }
)


def translate_exaone(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` exaone_moe."""
    reader, decoder = _read("exaone_moe", config, _EXAONE, _EXAONE_EXPERTS, theta=1e4, tokens=(1, 53))
    return reader.finish(with_rotating_windows(reader, decoder))


def translate_hunyuan(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` hy_v3."""
    reader, decoder = _read("hy_v3", config, _HUNYUAN, _HUNYUAN_EXPERTS, theta=11158840.0)
    reader.boolean("enable_moe_fp32_combine", default=True)  # how wide one sum is
    return reader.finish(decoder)


def exaone_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: GLM-4.5's, but for the correction of the choice."""
    return _renamed(config, _EXAONE_NAMES, r"mtp\..*")


def hunyuan_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: GLM-4.5's, but for the router and the shared expert."""
    return _renamed(config, _HUNYUAN_NAMES, r"model\.mtp\..*")


def _read(
    family: str,
    config: Mapping[str, Any],
    defaults: Mapping[str, int],
    usual: Usual,
    *,
    theta: float,
    tokens: tuple[int | None, int | None] = (None, None),
) -> tuple[ConfigReader, DecoderConfig]:
    reader = ConfigReader({_WORDS.get(key, key): value for key, value in config.items()}, family)
    rope, (first, last) = partial(read_rope, theta=theta), tokens
    ends = () if last is None else (last,)
    decoder = read_llama_keys(reader, family, defaults, first, ends, norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    experts = read_grouped_experts(reader, decoder.num_layers, usual, "sigmoid")
    bias = reader.boolean("attention_bias", default=False)
    return reader, replace(decoder, experts=experts, qk_norm="head", qkv_bias=bias, output_bias=bias)


def _renamed(config: DecoderConfig, words: Mapping[str, str], ignored: str) -> TensorNames:
    names = glm_moe.tensor_names(config)
    block = {path: each_name(source, lambda name: renamed(name, words)) for path, source in names.block.items()}
    modules = {theirs: ours for ours, theirs in words.items()}
    return replace(names, block=block, ignored=(*names.ignored, ignored), modules=modules)


EXAONE_MOE = Family("exaone_moe", ("ExaoneMoeForCausalLM",), translate_exaone, exaone_names)
HY_V3 = Family("hy_v3", ("HYV3ForCausalLM",), translate_hunyuan, hunyuan_names)
