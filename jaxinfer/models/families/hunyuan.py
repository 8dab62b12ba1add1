"""Hunyuan's dense models and mixtures of experts: Llama with norms of queries and keys after their rotation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import renamed
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = sizes(290943, 4096, 11008, 32, 32, None, None, 2048)
_SIZES = (("num_experts", 1), ("moe_topk", 1), ("intermediate_size", 11008))
_PER_LAYER = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
_BESIDE = ("type", "rope_type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_NORMS: Mapping[str, Source] = {
    "attention.query_norm.scale": "self_attn.query_layernorm.weight",
    "attention.key_norm.scale": "self_attn.key_layernorm.weight",
}


def translate_dense(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` hunyuan_v1_dense."""
    reader, decoder = _read(config, "hunyuan_v1_dense")
    return reader.finish(decoder)


def translate_moe(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` hunyuan_v1_moe; lists of numbers for each layer must be alike."""
    alike = {key: _only(config[key]) for key in _PER_LAYER if key in config}
    reader, decoder = _read({**config, **alike}, "hunyuan_v1_moe")
    experts = read_experts(reader, _SIZES)
    if reader.positive_int("num_shared_expert", default=1) != 1:
        raise reader.refuse("num_shared_expert", config["num_shared_expert"], "transformers has one")
    if reader.positive_int("moe_intermediate_size", default=decoder.ffn_dim) != decoder.ffn_dim:
        raise reader.refuse("moe_intermediate_size", config["moe_intermediate_size"], "it must be intermediate_size")
    return reader.finish(replace(decoder, experts=experts and replace(experts, shared_dim=decoder.ffn_dim)))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, norms by other names, and those of the experts, if any."""
    names = renamed(config, _NORMS)
    if config.experts is None:
        return names
    return with_experts(config, names, router="gate.wg.weight", shared="mlp.shared_mlp")


def _read(config: Mapping[str, Any], family: str) -> tuple[ConfigReader, DecoderConfig]:
    reader = ConfigReader(_with_stretched_base(config, family), family)
    decoder = read_llama_keys(reader, family, _DEFAULTS, 1, (2,), norm_eps=("rms_norm_eps", 1e-5), rope=read_rope)
    reader.positive_int("attention_head_dim", default=decoder.head_dim)
    if not reader.boolean("use_qk_norm", default=True):
        raise reader.refuse("use_qk_norm", False, "transformers has norms whatever it says")
    bias = reader.boolean("attention_bias", default=False)
    return reader, replace(decoder, qk_norm="head", norm_after_rotation=True, qkv_bias=bias, output_bias=bias)


def _with_stretched_base(config: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """Say a fixed ``alpha`` by what it comes to: a larger base (NTK-aware scaling). Beside it other keys do nothing."""
    for name in ("rope_scaling", "rope_parameters"):
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("alpha"):
            reader = ConfigReader({"rope_theta": config.get("rope_theta", 1e4), **section}, family, f"{name}.")
            theta, alpha = reader.positive_float("rope_theta"), reader.positive_float("alpha")
            for key in section.keys() - {"rope_theta", "alpha", *_BESIDE}:
                raise reader.refuse(key, section[key], "it is not known beside alpha")
            whole = ConfigReader(config, family)
            usual = whole.positive_int("hidden_size", 4096) // whole.positive_int("num_attention_heads", 32)
            head_dim = whole.positive_int("head_dim", usual)
            if head_dim <= 2:
                raise whole.refuse("head_dim", head_dim, "alpha stretches the base of more than two lanes")
            return {**config, name: None, "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
    return config


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value


HUNYUAN_DENSE = Family("hunyuan_v1_dense", ("HunYuanDenseV1ForCausalLM",), translate_dense, tensor_names)
HUNYUAN_MOE = Family("hunyuan_v1_moe", ("HunYuanMoEV1ForCausalLM",), translate_moe, tensor_names)
