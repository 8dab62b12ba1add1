"""GLM-4.5 to 4.7: the first layers are dense, the others have experts in groups, beside a shared one."""

import re
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
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
)
_SIZES = (("n_routed_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 1408))


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` glm4_moe; its layers that predict further tokens are left out."""
    reader = ConfigReader(config, family="glm4_moe")
    decoder = read_llama_keys(
        reader, "glm4_moe", _DEFAULTS, norm_eps=("rms_norm_eps", 1e-5), rope=partial(read_rope, partial=0.5)
    )
    dense = reader.natural_int("first_k_dense_replace", default=1)
    layers = tuple(layer >= dense for layer in range(decoder.num_layers))
    normalised = reader.boolean("norm_topk_prob", default=True)
    experts = read_experts(reader, _SIZES, layers, scoring="sigmoid", normalised=normalised)
    groups, kept = reader.positive_int("n_group", default=1), reader.positive_int("topk_group", default=1)
    scale = reader.positive_float("routed_scaling_factor", default=1.0)
    shared = reader.positive_int("n_shared_experts", default=1)
    reader.natural_int("num_nextn_predict_layers", default=1)
    if experts is not None:
        size = experts.num_experts // groups
        if experts.num_experts % groups or (groups > 1 and size < 2):
            raise reader.refuse("n_group", groups, f"{experts.num_experts} experts are no groups of two or more")
        if not kept <= groups or experts.per_token > kept * size:
            raise reader.refuse("topk_group", kept, f"of {groups} groups it leaves too few for a token's experts")
        shared_dim = shared * experts.ffn_dim
        shares = {"shared_dim": shared_dim, "scale": scale, "groups": groups, "kept_groups": kept}
        experts = replace(experts, correction_bias=True, **shares)
    bias = reader.boolean("attention_bias", default=False)
    norm = "head" if reader.boolean("use_qk_norm", default=False) else None
    return reader.finish(replace(decoder, experts=experts, qkv_bias=bias, qk_norm=norm))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and those of the experts."""
    names = llama_names.tensor_names(config)
    later = rf"model\.layers\.{re.escape(str(config.num_layers))}\..*"
    names = replace(names, ignored=(*names.ignored, later))
    return names if config.experts is None else with_experts(config, names, shared="mlp.shared_experts")


GLM4_MOE = Family("glm4_moe", ("Glm4MoeForCausalLM",), translate, tensor_names)
