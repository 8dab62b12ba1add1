"""Granite 3 and the dense models of Granite 4: Llama with factors for embedding, scores, residuals and logits.

Granite 4's dense models are saved as hybrids with experts, of which they have none.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import LLAMA_SIZES, read_llama_keys
from jaxinfer.models.families.keys.llama_names import renamed, tensor_names

# Whether a layer is attention; the others are state-space layers.
_LAYERS = MappingProxyType({"attention": True, "full_attention": True, "mamba": False, "linear_attention": False})


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` granite."""
    reader = ConfigReader(config, family="granite")
    decoder = read_granite_keys(reader, "granite")
    return reader.finish(replace(decoder, mlp_bias=reader.boolean("mlp_bias", default=False)))


def translate_hybrid(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` granitemoehybrid without experts and state-space layers."""
    reader = ConfigReader(config, family="granitemoehybrid")
    if experts := reader.natural_int("num_local_experts", default=8):
        raise reader.refuse("num_local_experts", experts, "hybrids with experts are not supported")
    decoder = read_granite_keys(reader, "granitemoehybrid")
    if not reader.has("layer_types") or not all(reader.choices("layer_types", _LAYERS, decoder.num_layers)):
        raise reader.refuse("layer_types", config.get("layer_types"), "state-space layers are not supported")
    rotates = reader.choice("position_embedding_type", {"rope": True, "nope": False}, default="nope")
    (kind,) = decoder.layer_pattern
    kind = kind if rotates else LayerKind(rope=None)
    width = reader.positive_int("shared_intermediate_size", default=1024)
    return reader.finish(replace(decoder, ffn_dim=width, layer_pattern=(kind,)))


def hybrid_tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a hybrid without experts: the feed-forward layer is the one that experts would share."""
    fused, both = "shared_mlp.input_linear.weight", 2 * config.ffn_dim
    parts = {
        "mlp.gate.kernel": Part(fused, 0, both),
        "mlp.up.kernel": Part(fused, config.ffn_dim, both),
        "mlp.down.kernel": "shared_mlp.output_linear.weight",
    }
    apart: Mapping[str, Source] = {  # in GGUF files
        f"mlp.{part}.kernel": f"model.layers.{{layer}}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    return replace(renamed(config, parts), others=(apart,))


def read_granite_keys(reader: ConfigReader, family: str) -> DecoderConfig:
    """Return a decoder of Llama's keys and Granite's factors."""
    decoder = read_llama_keys(reader, family, LLAMA_SIZES, bos_token_id=1, eos_token_ids=(2,))
    bias = reader.boolean("attention_bias", default=False)
    return replace(
        decoder,
        qkv_bias=bias,
        output_bias=bias,
        attention_scale=reader.positive_float("attention_multiplier", default=1.0),
        embedding_scale=reader.positive_float("embedding_multiplier", default=1.0),
        residual_scale=reader.positive_float("residual_multiplier", default=1.0),
        logit_scale=1 / reader.positive_float("logits_scaling", default=1.0),
    )


GRANITE = Family("granite", ("GraniteForCausalLM",), translate, tensor_names)
GRANITE_HYBRID = Family("granitemoehybrid", ("GraniteMoeHybridForCausalLM",), translate_hybrid, hybrid_tensor_names)
