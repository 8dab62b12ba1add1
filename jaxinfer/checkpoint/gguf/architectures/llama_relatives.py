"""Architectures of Llama's relatives: seed_oss, arcee, ernie4_5, hunyuan-dense, jais2, nemotron, exaone and olmo."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.checkpoint.gguf.architectures.architecture import Architecture
from jaxinfer.checkpoint.gguf.architectures.llama import BLOCK, LLAMA, TOP
from jaxinfer.checkpoint.gguf.config import (
    FileTensors,
    read_derived_head_dim,
    read_head_dim,
    read_rotary,
    read_rotated_part,
    read_sizes,
)
from jaxinfer.checkpoint.gguf.metadata import MetadataReader

_UNGATED: Mapping[str, str] = MappingProxyType({part: name for part, name in BLOCK.items() if part != "ffn_gate"})
_LAYER_NORM_TOP: Mapping[str, str] = MappingProxyType({**TOP, "output_norm.bias": "model.norm.bias"})
HUNYUAN_NORMS: Mapping[str, str] = MappingProxyType(
    {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
)
_EXAONE: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "ln_1",
        "ffn_norm": "ln_2",
        **{f"attn_{part}": f"attn.attention.{part}_proj" for part in ("q", "k", "v")},
        "attn_output": "attn.attention.out_proj",
        "ffn_gate": "mlp.c_fc_0",
        "ffn_up": "mlp.c_fc_1",
        "ffn_down": "mlp.c_proj",
    }
)


def has_bias(tensors: FileTensors, part: str) -> bool:
    """Tell whether a part of the first block has a bias."""
    return f"blk.0.{part}.bias" in tensors.names


def read_relative(reader: MetadataReader, tensors: FileTensors, model_type: str, architecture: str) -> dict[str, Any]:
    """Return what a relative with RMSNorm has whose heads are rotated as a whole."""
    head_dim = read_head_dim(reader)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, head_dim),
        "head_dim": head_dim,
        "rms_norm_eps": reader.positive_float("attention.layer_norm_rms_epsilon"),
        "attention_bias": has_bias(tensors, "attn_q"),
    }


def _seed_oss(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    biases = {"attention_out_bias": has_bias(tensors, "attn_output"), "mlp_bias": has_bias(tensors, "ffn_up")}
    return {**read_relative(reader, tensors, "seed_oss", "SeedOssForCausalLM"), "hidden_act": "silu", **biases}


def _arcee(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_relative(reader, tensors, "arcee", "ArceeForCausalLM")
    return {**config, "hidden_act": "relu2", "mlp_bias": has_bias(tensors, "ffn_up")}


def _ernie(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    config = read_relative(reader, tensors, "ernie4_5", "Ernie4_5ForCausalLM")
    bias = config.pop("attention_bias")
    return {**config, "hidden_act": "silu", "use_bias": bias}


def _hunyuan(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {**read_relative(reader, tensors, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"), "hidden_act": "silu"}


def _exaone(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    return {**read_relative(reader, tensors, "exaone", "ExaoneForCausalLM"), "hidden_act": "silu"}


def _olmo(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    epsilon = reader.positive_float("attention.layer_norm_epsilon", default=1e-5)
    if epsilon != 1e-5:
        raise reader.refuse("attention.layer_norm_epsilon", "norms without weights have 1e-05")
    return {
        "architectures": ["OlmoForCausalLM"],
        "model_type": "olmo",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, read_derived_head_dim(reader)),
        "attention_bias": False,
        "hidden_act": "silu",
        "clip_qkv": reader.optional_float("attention.clamp_kqv") or None,
    }


def _jais2(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    head_dim = read_head_dim(reader)
    return {
        "architectures": ["Jais2ForCausalLM"],
        "model_type": "jais2",
        **read_sizes(reader, tensors),
        **read_rotary(reader, tensors, head_dim),
        "head_dim": head_dim,
        **_squared(reader, tensors, "layer_norm_eps"),
    }


def _nemotron(reader: MetadataReader, tensors: FileTensors) -> dict[str, Any]:
    reader.skip("attention.layer_norm_rms_epsilon")  # the other epsilon again
    return {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        **read_sizes(reader, tensors),
        # The converter counts rotated lanes by the model's width: with wider heads, they are not the model's.
        **read_rotated_part(reader, read_derived_head_dim(reader)),
        **_squared(reader, tensors, "norm_eps"),
    }


def _squared(reader: MetadataReader, tensors: FileTensors, epsilon: str) -> dict[str, Any]:
    """Return what jais2 and nemotron share: LayerNorm, and a squared ReLU without a gate."""
    return {
        epsilon: reader.positive_float("attention.layer_norm_epsilon"),
        "hidden_act": "relu2",
        "attention_bias": has_bias(tensors, "attn_q"),
        "mlp_bias": has_bias(tensors, "ffn_up"),
    }


_SEED_OSS_PARTS = {part: name for part, name in BLOCK.items() if part != "ffn_norm"}
_EXAONE_TOP = {"token_embd.weight": "transformer.wte.weight", "output_norm.weight": "transformer.ln_f.weight"}
_LINEARS = MappingProxyType({part: name for part, name in BLOCK.items() if not part.endswith("_norm")})
LLAMA_RELATIVES = (
    Architecture(
        "seed_oss", _seed_oss, TOP, MappingProxyType({**_SEED_OSS_PARTS, "post_attention_norm": BLOCK["ffn_norm"]})
    ),
    Architecture("arcee", _arcee, TOP, _UNGATED, interleaved=LLAMA.interleaved),
    Architecture("ernie4_5", _ernie, TOP, BLOCK),
    Architecture("hunyuan-dense", _hunyuan, TOP, MappingProxyType({**BLOCK, **HUNYUAN_NORMS})),
    Architecture("exaone", _exaone, MappingProxyType({**TOP, **_EXAONE_TOP}), _EXAONE, layers="transformer.h"),
    Architecture("olmo", _olmo, TOP, _LINEARS, interleaved=LLAMA.interleaved, rope_divisors=()),
    Architecture("jais2", _jais2, _LAYER_NORM_TOP, _UNGATED, rope_divisors=()),
    Architecture("nemotron", _nemotron, _LAYER_NORM_TOP, _UNGATED, norm_shift=1.0, rope_divisors=()),
)
