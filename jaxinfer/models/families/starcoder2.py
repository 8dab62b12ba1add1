"""StarCoder2: Llama with LayerNorm, biases, GELU without a gate, and in most models a window."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.llama_names import renamed
from jaxinfer.models.families.keys.windows import read_window

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
)
_LINEARS = MappingProxyType({"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` starcoder2."""
    reader = ConfigReader(config, family="starcoder2")
    reader.choice("hidden_act", {"gelu_pytorch_tanh": None}, default="gelu_pytorch_tanh")
    decoder = read_llama_keys(
        reader,
        "starcoder2",
        _DEFAULTS,
        bos_token_id=50256,
        eos_token_ids=(50256,),
        activation="gelu_tanh",
        tied=True,
        norm_eps=("norm_epsilon", 1e-5),
    )
    (kind,) = decoder.layer_pattern
    windowed = LayerKind(kind.rope, read_window(reader, default=None))
    bias = reader.boolean("use_bias", default=True)
    biases = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}
    return reader.finish(replace(decoder, norm="layer", gated_mlp=False, layer_pattern=(windowed,), **biases))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's but for the feed-forward layer."""
    kinds = {"kernel": "weight", "bias": "bias"}
    return renamed(
        config,
        {f"{ours}.{kind}": f"{theirs}.{word}" for ours, theirs in _LINEARS.items() for kind, word in kinds.items()},
    )


STARCODER2 = Family("starcoder2", ("Starcoder2ForCausalLM",), translate, tensor_names)
