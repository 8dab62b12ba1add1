"""Granite 3's mixtures of experts: Granite whose layers have experts, in some models beside a shared one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, Part, Source, TensorNames
from jaxinfer.models.families.granite import read_granite_keys
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_keys import read_experts
from jaxinfer.models.families.keys.expert_names import joined_stacks, single_stacks
from jaxinfer.models.families.keys.llama_names import tensor_names

_SIZES = (("num_local_experts", 8), ("num_experts_per_tok", 2), ("intermediate_size", 11008))
_JOINED = (("input", "gate_up_proj"), ("output", "down_proj"))


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` granitemoe."""
    reader = ConfigReader(config, family="granitemoe")
    return reader.finish(_read(reader, "granitemoe"))


def translate_shared(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` granitemoeshared."""
    reader = ConfigReader(config, family="granitemoeshared")
    return reader.finish(read_shared(reader, "granitemoeshared"))


def read_shared(reader: ConfigReader, family: str) -> DecoderConfig:
    """Return a decoder of Granite's keys, and those of experts beside a shared one."""
    decoder = _read(reader, family)
    width = reader.natural_int("shared_intermediate_size", default=0)
    return replace(decoder, experts=decoder.experts and replace(decoder.experts, shared_dim=width))


def expert_tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and those that all experts are in."""
    names, inside = tensor_names(config), "block_sparse_moe"
    block: dict[str, Source] = {
        **joined_stacks(config, f"{inside}.input_linear.weight", f"{inside}.output_linear.weight"),
        "mlp.router.weights": f"model.layers.{{layer}}.{inside}.router.layer.weight",
    }
    width = config.experts.shared_dim if config.experts is not None else 0
    if width:
        fused = "model.layers.{layer}.shared_mlp.input_linear.weight"
        block |= {
            "mlp.shared.gate.kernel": Part(fused, 0, 2 * width),
            "mlp.shared.up.kernel": Part(fused, width, 2 * width),
            "mlp.shared.down.kernel": "model.layers.{layer}.shared_mlp.output_linear.weight",
        }
    single = single_stacks(config)
    for part in ("gate", "up", "down") if width else ():
        single[f"mlp.shared.{part}.kernel"] = f"model.layers.{{layer}}.shared_mlp.{part}_proj.weight"
    modules = {f"{inside}.{tensor}_linear.weight": f"{inside}.experts.{parameter}" for tensor, parameter in _JOINED}
    return replace(names, block={**names.block, **block}, others=(single,), modules=modules)


def _read(reader: ConfigReader, family: str) -> DecoderConfig:
    decoder = read_granite_keys(reader, family)
    return replace(decoder, experts=read_experts(reader, _SIZES, scoring="chosen_softmax", normalised=False))


GRANITE_MOE = Family("granitemoe", ("GraniteMoeForCausalLM",), translate, expert_tensor_names)
GRANITE_MOE_SHARED = Family("granitemoeshared", ("GraniteMoeSharedForCausalLM",), translate_shared, expert_tensor_names)
