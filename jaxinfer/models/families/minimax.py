"""MiniMax-M2: Mixtral with a corrected choice by sigmoids, norms of all query and all key heads, partial rotation."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = sizes(200064, 3072, 1536, 62, 48, 8, 128, 196608)
_SIZES = (("num_local_experts", 256), ("num_experts_per_tok", 8), ("intermediate_size", 1536))
_LINEARS = MappingProxyType({"gate": "w1", "up": "w3", "down": "w2"})
_INSIDE = "model.layers.{layer}.block_sparse_moe."


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` minimax_m2; its layers that predict further tokens are left out."""
    reader = ConfigReader(config, family="minimax_m2")
    head_dim = reader.positive_int("head_dim", default=128)
    part = reader.positive_int("rotary_dim", default=head_dim) / head_dim
    rope = partial(read_rope, theta=5e6, partial=part)
    decoder = read_llama_keys(reader, "minimax_m2", _DEFAULTS, 200034, (200020,), rope=rope)
    for key, value in (("use_qk_norm", True), ("use_routing_bias", True), ("attention_bias", False)):
        if reader.boolean(key, default=value) != value:
            raise reader.refuse(key, not value, "transformers does without this key, whatever it says")
    reader.choice("qk_norm_type", {"per_layer": None}, default="per_layer")
    reader.choice("scoring_func", {"sigmoid": None}, default="sigmoid")
    if reader.natural_int("shared_intermediate_size", default=0):
        raise reader.refuse("shared_intermediate_size", config["shared_intermediate_size"], "no expert is shared")
    if reader.has("attn_type_list") and not all(reader.flags("attn_type_list", decoder.num_layers)):
        raise reader.refuse("attn_type_list", 0, "every layer must attend to all tokens")
    experts = read_experts(reader, _SIZES, scoring="sigmoid")
    return reader.finish(
        replace(decoder, experts=experts and replace(experts, correction_bias=True), qk_norm="all_heads")
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Mixtral's, norms, and the correction of the choice."""
    names = with_experts(config, llama_names.tensor_names(config), mlp="block_sparse_moe", linears=_LINEARS)
    block = {**names.block, "mlp.router.correction": f"{_INSIDE}e_score_correction_bias"}
    return replace(names, block=block, ignored=(*names.ignored, r"model\.mtp\..*"))


MINIMAX_M2 = Family("minimax_m2", ("MiniMaxM2ForCausalLM",), translate, tensor_names)
