"""BitNet: Llama with a squared ReLU beside its gate, and norms of what the output and the down matrices read."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import renamed
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = sizes(128256, 2560, 6912, 30, 20, 5, None, 2048)
_ACTIVATIONS: Mapping[str, Activation] = {"relu2": "relu_squared", "silu": "silu"}


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` bitnet."""
    reader = ConfigReader(config, family="bitnet")
    activation = reader.choice("hidden_act", _ACTIVATIONS, default="relu2")
    rope = partial(read_rope, theta=5e5)
    decoder = read_llama_keys(
        reader,
        "bitnet",
        _DEFAULTS,
        128000,
        (128001,),
        activation=activation,
        norm_eps=("rms_norm_eps", 1e-5),
        rope=rope,
    )
    if decoder.num_heads * decoder.head_dim != decoder.model_dim:
        raise reader.refuse("head_dim", decoder.head_dim, "the norm of attention's result is as wide as the model")
    bias = reader.boolean("attention_bias", default=False)
    return reader.finish(replace(decoder, inner_norms=True, qkv_bias=bias, output_bias=bias))


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: Llama's, and the norms inside both parts."""
    inner = {
        "attention.inner_norm.scale": "self_attn.attn_sub_norm.weight",
        "mlp.inner_norm.scale": "mlp.ffn_sub_norm.weight",
    }
    return renamed(config, inner)


BITNET = Family("bitnet", ("BitNetForCausalLM",), translate, tensor_names)
