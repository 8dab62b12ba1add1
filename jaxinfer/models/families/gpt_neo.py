"""GPT-Neo, and TinyStories, saved as GPT-Neo: GPT-2 with windows in every second layer and unscaled scores."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, shortest_pattern
from jaxinfer.models.families import gpt2
from jaxinfer.models.families.family import Family, Source, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader

_WORDS = MappingProxyType(
    {
        "num_heads": "n_head",
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    }
)
_DEFAULTS = MappingProxyType({"n_embd": 2048, "n_layer": 24, "n_head": 16, "n_positions": 2048})
_KINDS = MappingProxyType({"global": False, "local": True})
_EVERY_SECOND = [[["global", "local"], 12]]


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` gpt_neo."""
    words = {_WORDS.get(key, key): value for key, value in config.items() if key != "attention_types"}
    layers = {"attention_layers": _spelled_out(config.get("attention_types", _EVERY_SECOND))}
    reader = ConfigReader({**_DEFAULTS, **words, **layers}, family="gpt_neo")
    decoder = gpt2.read_gpt2_keys(reader, "gpt_neo")
    width = reader.positive_int("window_size", default=256)
    are_local = reader.choices("attention_layers", _KINDS, decoder.num_layers)
    kinds = tuple(LayerKind(None, width if is_local else None) for is_local in are_local)
    return reader.finish(replace(decoder, layer_pattern=shortest_pattern(kinds), attention_scale=1.0, qkv_bias=False))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: GPT-2's, none of them transposed, but for attention and the feed-forward layer."""
    names, layer = gpt2.tensor_names(config), "transformer.h.{layer}"
    attention = f"{layer}.attn.attention"
    block: dict[str, Source] = {path: source for path, source in names.block.items() if isinstance(source, str)}
    for name, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "out")):
        block[f"attention.{name}.kernel"] = f"{attention}.{theirs}_proj.weight"
    block["attention.output.bias"] = f"{attention}.out_proj.bias"
    for ours, theirs in (("mlp.up", "c_fc"), ("mlp.down", "c_proj")):
        block |= {f"{ours}.kernel": f"{layer}.mlp.{theirs}.weight", f"{ours}.bias": f"{layer}.mlp.{theirs}.bias"}
    ignored = (*names.ignored, r"(transformer\.)?h\.\d+\.attn\.attention\.(masked_)?bias")
    return replace(names, block=block, ignored=ignored)


def _spelled_out(types: Any) -> Any:
    """Return the kind of each layer of ``[[kinds, repeats], ...]``; what is not of that form as it is."""
    try:
        return [kind for kinds, repeats in types for kind in list(kinds) * min(repeats, 1000)]
    except (TypeError, ValueError):
        return types


GPT_NEO = Family("gpt_neo", ("GPTNeoForCausalLM",), translate, tensor_names)
