"""StableLM: Llama with LayerNorm and a quarter of each head rotated; the 12B has parallel parts and norms of heads."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Family, TensorNames
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.families.keys.llama_names import renamed
from jaxinfer.models.families.keys.rope import read_rope

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    }
)


def translate(config: Mapping[str, Any]) -> DecoderConfig:
    """Translate a ``config.json`` of ``model_type`` stablelm."""
    reader = ConfigReader(config, family="stablelm")
    decoder = read_llama_keys(
        reader,
        "stablelm",
        _DEFAULTS,
        bos_token_id=0,
        eos_token_ids=(0,),
        norm_eps=("layer_norm_eps", 1e-5),
        rope=partial(read_rope, partial=0.25),
    )
    return reader.finish(
        replace(
            decoder,
            norm="layer",
            block="parallel" if reader.boolean("use_parallel_residual", default=False) else "pre_norm",
            qkv_bias=reader.boolean("use_qkv_bias", default=False),
            qk_norm="own_head" if reader.boolean("qk_layernorm", default=False) else None,
        )
    )


def tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors: each head's norm is one of its own."""
    counts = {"query": config.num_heads, "key": config.num_kv_heads}
    norms = {
        f"attention.{name}_norm.scale": tuple(
            f"self_attn.{name[0]}_layernorm.norms.{head}.weight" for head in range(count)
        )
        for name, count in counts.items()
    }
    return renamed(config, norms)


STABLELM = Family("stablelm", ("StableLmForCausalLM",), translate, tensor_names)
