"""Nemotron-4 and Minitron: LayerNorm with weights stored minus one, a squared ReLU, half of each head rotates."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = sizes(256000, 6144, 24576, 32, 48, None, None, 4096)
_ACTIVATIONS: Mapping[str, Activation] = {"relu2": "relu_squared", "relu": "relu", "silu": "silu"}


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` nemotron."""
    reader = ConfigReader(config, family="nemotron")
    decoder = read_llama_keys(
        reader,
        "nemotron",
        _DEFAULTS,
        bos_token_id=2,
        eos_token_ids=(3,),
        activation=reader.choice("hidden_act", _ACTIVATIONS, default="relu2"),
        norm_eps=("norm_eps", 1e-5),
        rope=partial(read_rope, partial=0.5),
    )
    bias, mlp_bias = (reader.boolean(key, default=False) for key in ("attention_bias", "mlp_bias"))
    biases = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias}
    return reader.finish(replace(decoder, norm="layer_plus_one", gated_mlp=False, **biases))


NEMOTRON = Family("nemotron", ("NemotronForCausalLM",), translate, tensor_names)
