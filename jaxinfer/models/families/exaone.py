"""EXAONE 3 and 4: Llama by other names; norms after each part, and windows where layers rotate."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.families.family import Family, Source, TensorNames, each_name
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.gemma_keys import read_window_layers
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_rope
from jaxinfer.models.families.keys.windows import read_layer_types, read_window
from jaxinfer.models.families.olmo import tensor_names

_EXAONE3 = sizes(102400, 4096, 14336, 32, 32, 8, None, 4096)
_EXAONE4 = sizes(102400, 4096, 16384, 32, 32, 32, None, 2048)
_WORDS = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
)
_NAMES = MappingProxyType(
    {
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "model.layers": "transformer.h",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
    }
)


def translate_exaone3(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` exaone."""
    reader = ConfigReader({_WORDS.get(key, key): value for key, value in config.items()}, family="exaone")
    rope = partial(read_rope, theta=5e5)
    decoder = read_llama_keys(reader, "exaone", _EXAONE3, 1, (361,), norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    bias, mlp_bias = (reader.boolean(key, default=False) for key in ("attention_bias", "mlp_bias"))
    return reader.finish(replace(decoder, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias))


def exaone3_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of an exaone checkpoint: Llama's by GPT-2's words."""
    names = llama_names.tensor_names(config)

    def by_other_words(named: Mapping[str, Source]) -> dict[str, Source]:
        return {path: each_name(source, _other_words) for path, source in named.items()}

    ignored = (*names.ignored, r"transformer\.h\.\d+\.attn\.attention\.rotary\.inv_freq")
    return TensorNames(by_other_words(names.top), by_other_words(names.block), ignored)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` exaone4; a null window means none."""
    reader = ConfigReader(config, family="exaone4")
    decoder = read_llama_keys(reader, "exaone4", _EXAONE4, 0, (2,), norm_eps=("rms_norm_eps", 1e-5))
    return reader.finish(with_rotating_windows(reader, replace(decoder, block="output_norm", qk_norm="head")))


def with_rotating_windows(reader: ConfigReader, decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with its windows: where some layers have one, the others do not rotate."""
    if read_window(reader, default=4096) is None:
        if any(read_layer_types(reader, decoder.num_layers) or ()):
            raise reader.refuse("sliding_window", None, "layer_types has layers with a window; write its width")
        return decoder
    # The first files say the pattern in letters, beside a list of the layers.
    period = 4 if reader.has("layer_types") else reader.positive_int("sliding_window_pattern", default=4)
    (kind,) = decoder.layer_pattern
    unrotated = replace(decoder, layer_pattern=(LayerKind(rope=None),))
    return read_window_layers(reader, unrotated, period, kind.rope)


def _other_words(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


EXAONE3 = Family("exaone", ("ExaoneForCausalLM", "LlamaForCausalLM"), translate_exaone3, exaone3_names)
EXAONE4 = Family("exaone4", ("Exaone4ForCausalLM",), translate, tensor_names)
