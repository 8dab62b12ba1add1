"""Command R, Command R+, Aya and Command R7B: parallel parts, LayerNorm without a bias, neighbouring lanes rotated."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.families.family import Family, Part, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.gemma_keys import read_window_layers
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.llama_names import interleaved, renamed
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
    }
)
_PERIOD = 4


def translate_cohere(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` cohere."""
    reader = ConfigReader(config, family="cohere")
    decoder = _read(reader, "cohere", 5e5)
    has_norms = reader.boolean("use_qk_norm", default=False)
    return reader.finish(replace(decoder, qk_norm="own_head" if has_norms else None))


def translate_cohere2(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` cohere2: layers with a window rotate, the others do not."""
    reader = ConfigReader(config, family="cohere2")
    decoder = _read(reader, "cohere2", 1e4)
    (kind,) = decoder.layer_pattern
    period = reader.positive_int("sliding_window_pattern", default=_PERIOD)
    unrotated = replace(decoder, layer_pattern=(LayerKind(rope=None),))
    return reader.finish(read_window_layers(reader, unrotated, period, kind.rope))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, with norms of heads as ``[N, H]``."""
    counts = {"query": config.num_heads, "key": config.num_kv_heads}
    norms = {
        f"attention.{name}_norm.scale": Part(f"self_attn.{name[0]}_norm.weight", shape=(count, config.head_dim))
        for name, count in counts.items()
    }
    return interleaved(config, renamed(config, norms))


def read_cohere_keys(
    reader: ConfigReader,
    family: str,
    defaults: Mapping[str, int],
    rope: Callable[[ConfigReader, int, int], Rope],
    logit_scale: float | None,
) -> DecoderConfig:
    """Return a decoder whose parts stand side by side behind one LayerNorm without a bias."""
    decoder = read_llama_keys(
        reader,
        family,
        defaults,
        bos_token_id=5,
        eos_token_ids=(255001,),
        tied=True,
        norm_eps=("layer_norm_eps", 1e-5),
        rope=rope,
    )
    bias = reader.boolean("attention_bias", default=False)
    biases = {"qkv_bias": bias, "output_bias": bias}
    return replace(decoder, norm="scaled_layer", block="parallel", logit_scale=logit_scale, **biases)


def _read(reader: ConfigReader, family: str, theta: float) -> DecoderConfig:
    scale = reader.positive_float("logit_scale", default=0.0625)
    return read_cohere_keys(reader, family, _DEFAULTS, partial(read_rope, theta=theta), scale)


COHERE = Family("cohere", ("CohereForCausalLM",), translate_cohere, tensor_names)
COHERE2 = Family("cohere2", ("Cohere2ForCausalLM",), translate_cohere2, tensor_names)
