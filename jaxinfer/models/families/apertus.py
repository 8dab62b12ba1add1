"""Apertus: Llama with norms of heads, and xIELU, whose parameters each layer has, without a gate."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, Part, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import renamed
from jaxinfer.models.families.keys.rope import read_rope, with_rope_section

_DEFAULTS = sizes(131072, 4096, 14336, 32, 32, None, None, 65536)
# Transformers stretches positions so where a file does not say how.
_STRETCHED = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)
_NAMES = MappingProxyType(
    {
        "attention_norm.scale": "attention_layernorm.weight",
        "mlp_norm.scale": "feedforward_layernorm.weight",
        "mlp.activation.curvature": "mlp.act_fn.alpha_p",
        "mlp.activation.saturation": "mlp.act_fn.alpha_n",
        "mlp.activation.slope": Part("mlp.act_fn.beta", shape=()),
    }
)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` apertus."""
    reader = ConfigReader(with_rope_section(config, _STRETCHED), family="apertus")
    reader.choice("hidden_act", {"xielu": None}, default="xielu")
    decoder = read_llama_keys(
        reader,
        "apertus",
        _DEFAULTS,
        bos_token_id=1,
        eos_token_ids=(2,),
        activation="xielu",
        norm_eps=("rms_norm_eps", 1e-5),
        rope=partial(read_rope, theta=12e6),
    )
    for key, only in (("qk_norm", True), ("post_norm", False)):
        if reader.boolean(key, default=only) != only:
            raise reader.refuse(key, not only, "transformers has the other form, whatever it says")
    bias = reader.boolean("attention_bias", default=False)
    return reader.finish(replace(decoder, gated_mlp=False, qk_norm="head", qkv_bias=bias, output_bias=bias))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, but for norms and for the parameters of xIELU."""
    names = renamed(config, _NAMES)
    # The bound that keeps a float16 exponential below zero.
    return replace(names, ignored=(*names.ignored, r"model\.layers\.\d+\.mlp\.act_fn\.eps"))


APERTUS = Family("apertus", ("ApertusForCausalLM",), translate, tensor_names)
