"""The ``config.json`` keys of latent attention, and the tensors that hold its matrices."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.models.config import DecoderConfig, RopeScaling
from jaxinfer.models.families.family import Part, Source, TensorNames
from jaxinfer.models.families.keys import llama_names
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.expert_names import single_stacks, with_experts
from jaxinfer.models.families.keys.llama_keys import read_llama_keys
from jaxinfer.models.latent import Latent

_ATTENTION = "model.layers.{layer}.self_attn."


def read_latent_keys(
    reader: ConfigReader, family: str, defaults: Mapping[str, int], norm_eps: float, tokens: tuple[int, int]
) -> DecoderConfig:
    """Return a decoder with latent attention.

    ``defaults``, ``norm_eps``, and ``tokens`` that begin and end a text, are the family's values for absent keys.
    """
    turning = reader.positive_int("qk_rope_head_dim", defaults["qk_rope_head_dim"])
    latent = Latent(
        reader.positive_int("kv_lora_rank", defaults["kv_lora_rank"]),
        reader.positive_int("qk_nope_head_dim", defaults["qk_nope_head_dim"]),
        reader.positive_int("v_head_dim", defaults["v_head_dim"]),
        reader.optional_int("q_lora_rank", defaults["q_lora_rank"]),
    )
    decoder = read_llama_keys(
        reader, family, {**defaults, "head_dim": turning}, tokens[0], tokens[1:], norm_eps=("rms_norm_eps", norm_eps)
    )
    if decoder.head_dim != turning:
        raise reader.refuse("head_dim", decoder.head_dim, f"qk_rope_head_dim is {turning}")
    if decoder.num_kv_heads != decoder.num_heads:
        raise reader.refuse("num_key_value_heads", decoder.num_kv_heads, f"there are {decoder.num_heads} heads")
    width = latent.content_dim + turning
    if reader.positive_int("qk_head_dim", width) != width:
        raise reader.refuse("qk_head_dim", "...", f"its parts are {width} wide")
    if not reader.boolean("rope_interleave", default=True):
        raise reader.refuse("rope_interleave", False, "published weights rotate neighbouring lanes")
    bias = reader.boolean("attention_bias", default=False)
    (rope,) = {kind.rope for kind in decoder.kinds}
    scale = width**-0.5 * _magnitude(rope.scaling if rope is not None else None) ** 2
    row = {"num_kv_heads": 1, "head_dim": turning + latent.rank}
    return replace(decoder, latent=latent, attention_scale=scale, qkv_bias=bias, output_bias=bias, **row)


def _magnitude(scaling: RopeScaling | None) -> float:
    """Return by what YaRN multiplies queries and keys, those lanes too that do not rotate."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0


def latent_tensor_names(config: DecoderConfig) -> TensorNames:
    """Name the tensors of a checkpoint with latent attention; layers after the last one are left out."""
    names = llama_names.tensor_names(config)
    others = {path: source for path, source in names.block.items() if not path.startswith("attention.")}
    later = rf"model\.layers\.{re.escape(str(config.num_layers))}\..*"
    names = replace(names, block={**others, **_attention(config)}, ignored=(*names.ignored, later))
    if config.experts is None:
        return names
    names = with_experts(config, names, shared="mlp.shared_experts")
    return replace(names, others=(*_in_gguf(config), *names.others))


def _in_gguf(config: DecoderConfig) -> tuple[dict[str, Source], dict[str, Source]]:
    """Name what GGUF files name otherwise, with the matrices of keys and of values apart and, in older ones, as one."""
    latent = config.latent
    assert latent is not None
    assert config.experts is not None
    block = single_stacks(config)
    if config.experts.correction_bias:
        block["mlp.router.correction"] = "model.layers.{layer}.mlp.gate.e_score_correction.bias"
    heads: dict[str, Source] = {
        f"attention.{ours}_heads.weights": Part(f"{_ATTENTION}{theirs}_b_proj.weight", shape=(config.num_heads, *shape))
        for ours, theirs, shape in (
            ("key", "k", (latent.rank, latent.content_dim)),
            ("value", "v", (latent.value_dim, latent.rank)),
        )
    }
    return {**block, **heads}, block


def _attention(config: DecoderConfig) -> dict[str, Source]:
    latent = config.latent
    assert latent is not None
    rank, content, turning = latent.rank, latent.content_dim, config.head_dim - latent.rank
    heads, of_head = config.num_heads, latent.content_dim + turning
    queries = f"{_ATTENTION}{'q_proj' if latent.query_rank is None else 'q_b_proj'}.weight"
    block: dict[str, Source] = {
        "attention.content.kernel": Part(queries, 0, heads * of_head, heads=(content, of_head)),
        "attention.query.kernel": Part(
            queries, content, heads * of_head, heads=(turning, of_head), rotary=(turning, turning)
        ),
        "attention.latent_norm.scale": f"{_ATTENTION}kv_a_layernorm.weight",
        "attention.output.kernel": f"{_ATTENTION}o_proj.weight",
    }
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))[: 1 + config.qkv_bias]:
        shared = f"{_ATTENTION}kv_a_proj_with_mqa.{theirs}"
        block[f"attention.latent.{ours}"] = Part(shared, 0, rank + turning)
        block[f"attention.key.{ours}"] = Part(shared, rank, rank + turning, rotary=(turning, turning))
        if latent.query_rank is not None:
            block[f"attention.query_latent.{ours}"] = f"{_ATTENTION}q_a_proj.{theirs}"
    if config.output_bias:
        block["attention.output.bias"] = f"{_ATTENTION}o_proj.bias"
    if latent.query_rank is not None:
        block["attention.query_norm.scale"] = f"{_ATTENTION}q_a_layernorm.weight"
    both = f"{_ATTENTION}kv_b_proj.weight"
    of_both = content + latent.value_dim
    shape = heads * of_both, rank
    block["attention.key_heads.weights"] = Part(both, heads=(content, of_both), shape=shape, across=True)
    block["attention.value_heads.weights"] = Part(both, content, heads=(latent.value_dim, of_both), shape=shape)
    return block
