"""Persimmon: GPT-NeoX's fused tensors, parts one after the other, LayerNorms of heads, and a squared ReLU."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxinfer.models.config import Activation, DecoderConfig
from jaxinfer.models.families.family import Family, Source, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.fused_names import rows_by_group
from jaxinfer.models.families.keys.llama_keys import read_llama_keys, sizes
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = sizes(262144, 4096, 16384, 36, 64, None, None, 16384)
_ACTIVATIONS: Mapping[str, Activation] = {"relu2": "relu_squared", "relu": "relu", "gelu": "gelu", "silu": "silu"}
_LINEARS = {"attention.output": "self_attn.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
_LAYER = "model.layers.{layer}"


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` persimmon."""
    reader = ConfigReader(config, family="persimmon")
    decoder = read_llama_keys(
        reader,
        "persimmon",
        _DEFAULTS,
        bos_token_id=1,
        eos_token_ids=(2,),
        activation=reader.choice("hidden_act", _ACTIVATIONS, default="relu2"),
        norm_eps=("layer_norm_eps", 1e-5),
        rope=partial(read_rope, partial=0.5),
    )
    if decoder.num_kv_heads != decoder.num_heads:
        raise reader.refuse("num_key_value_heads", decoder.num_kv_heads, f"there are {decoder.num_heads} heads")
    return reader.finish(
        replace(
            decoder,
            norm="layer",
            gated_mlp=False,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            qk_norm="biased_head" if reader.boolean("qk_layernorm", default=True) else None,
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a persimmon checkpoint."""
    names = llama_names.tensor_names(config)
    top = {path: source for path, source in names.top.items() if not path.startswith("final_norm")}
    block: dict[str, Source] = {path: source for path, source in names.block.items() if path.endswith("_norm.bias")}
    block |= {
        "attention_norm.scale": names.block["attention_norm.scale"],
        "mlp_norm.scale": names.block["mlp_norm.scale"],
    }
    for kind, word, norm_kind in (("kernel", "weight", "scale"), ("bias", "bias", "bias")):
        top[f"final_norm.{norm_kind}"] = f"model.final_layernorm.{word}"
        block |= {f"{ours}.{kind}": f"{_LAYER}.{theirs}.{word}" for ours, theirs in _LINEARS.items()}
        fused = rows_by_group(config, f"{_LAYER}.self_attn.query_key_value.{word}")
        block |= {f"attention.{name}.{kind}": part for name, part in fused.items()}
        for name in ("query", "key") if config.qk_norm is not None else ():
            block[f"attention.{name}_norm.{norm_kind}"] = f"{_LAYER}.self_attn.{name[0]}_layernorm.{word}"
    return replace(names, top=top, block=block)


PERSIMMON = Family("persimmon", ("PersimmonForCausalLM",), translate, tensor_names)
