"""Ernie 4.5's mixtures of experts: a corrected choice of softmax scores, beside a shared expert."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, Part, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import with_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = sizes(103424, 2560, 12288, 28, 20, 4, None, 131072)
_SIZES = (("moe_num_experts", 64), ("moe_k", 6), ("moe_intermediate_size", 1536))
_CORRECTION = "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` ernie4_5_moe."""
    last = config.get("moe_layer_end_index")  # null and -1 are those of the last layer
    reader = ConfigReader({**config, "moe_layer_end_index": None if last == -1 else last}, family="ernie4_5_moe")
    rope = partial(read_rope, theta=5e5)
    decoder = read_llama_keys(
        reader, "ernie4_5_moe", _DEFAULTS, 1, (2,), tied=True, norm_eps=("rms_norm_eps", 1e-5), rope=rope
    )
    if reader.boolean("use_bias", default=False):
        raise reader.refuse("use_bias", True, "experts have no biases")
    reader.choice("moe_gate", {"topk": None}, default="topk")
    experts = read_experts(reader, _SIZES, _read_sparse_layers(reader, decoder.num_layers))
    shared = reader.natural_int("moe_num_shared_experts", default=2)
    if experts is not None:
        experts = replace(experts, correction_bias=True, shared_dim=shared * experts.ffn_dim)
    return reader.finish(replace(decoder, experts=experts))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: those of Ernie 4.5, and those of the experts."""
    names = llama_names.interleaved(config, llama_names.tensor_names(config))
    names = replace(names, ignored=(*names.ignored, r"model\.mtp_.*"))
    if config.experts is None:
        return names
    names = with_experts(config, names, shared="mlp.shared_experts")
    correction = Part(_CORRECTION, shape=(1, config.experts.num_experts))
    return replace(names, block={**names.block, "mlp.router.correction": correction})


def _read_sparse_layers(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: of those from a first to a last one, every so manieth."""
    first, interval = (reader.natural_int("moe_layer_start_index", 1), reader.positive_int("moe_layer_interval", 1))
    last = reader.natural_int("moe_layer_end_index") if reader.has("moe_layer_end_index") else num_layers
    return tuple(first <= layer <= last and (layer + 1) % interval == 0 for layer in range(num_layers))


ERNIE_MOE = Family("ernie4_5_moe", ("Ernie4_5_MoeForCausalLM",), translate, tensor_names)
