"""GGUF files of further architectures, as llama.cpp's converter makes them of random models in a folder's words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.registry import decoder_config, family_of
from jaxinfer.notation import Params
from tests.checkpoint.gguf.files import permute
from tests.toys import random_params

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
RMS = {"rms_norm_eps": 1e-5}
FACTORS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5}
HEADS = {"attention.key_length": 8, "attention.value_length": 8}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None}
GROUPED = {
    "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
GROUPED_KEYS = {
    "block_count": 3, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16,
    "expert_shared_count": 2, "leading_dense_block_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True,
    "expert_group_count": 2, "expert_group_used_count": 1, "expert_gating_func": 2,
}  # fmt: skip
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
LONGROPE = {
    "rope_type": "longrope", "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
    "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
ROTATED = {"rope.dimension_count": 4}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}  # fmt: skip
LATENT_KEYS = {
    "attention.head_count_kv": 4, "attention.kv_lora_rank": 16, "attention.q_lora_rank": 12,
    "attention.key_length": 10, "rope.dimension_count": 4, "rope.freq_base": None,
}  # fmt: skip
TURNED = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0],
    "original_max_position_embeddings": 128,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]
WINDOWS = {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False]}


@dataclass(frozen=True)
class Case:
    """A folder's configuration, and the file's keys beside the common ones.

    ``interleaved`` says whether the converter pairs rows of queries and keys, ``grouped`` whether it takes groups
    apart, ``scaled`` whether matrices stand beside their scales, ``joined`` whether queries, keys and values
    are one. Where ``family`` is set, files do not say which family's names the folder had.
    """

    architecture: str
    config: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    grouped: bool = False
    scaled: bool = False
    joined: bool = False
    family: str | None = None


def _llama(architecture: str, config: dict[str, Any], keys: dict[str, Any] | None = None, **how: Any) -> Case:
    return Case(architecture, {**SIZES, **RMS, **config}, keys or {}, **how)


def _moved(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in {**SIZES, **config}.items() if key not in keys}


CASES: Mapping[str, Case] = {
    "seed_oss": _llama("seed_oss", {"head_dim": 12, "attention_out_bias": True}, dict.fromkeys(HEADS, 12)),
    "arcee": _llama("arcee", {"mlp_bias": True}, HEADS, interleaved=True),
    "ernie4_5": _llama("ernie4_5", {"use_bias": True, "head_dim": 8, "rope_theta": 5e5}, {"rope.freq_base": 5e5}),
    "hunyuan_v1_dense": _llama(
        "hunyuan-dense",
        {"rope_theta": 4641589.0, "max_position_embeddings": 512},
        {
            "rope.freq_base": 4641589.0, "context_length": 512, "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 512,
        },
    ),
    "exaone": _llama("exaone", {"rope_theta": 5e5}, {"rope.freq_base": 5e5, "rope.dimension_count": 8}),
    "exaone4": _llama("exaone4", {"sliding_window": 16, "layer_types": TYPES}, WINDOWS),
    "exaone4 without windows": _llama("exaone4", {"sliding_window": None}),
    "olmo": Case("olmo", SIZES, LAYER_NORM, interleaved=True),
    "olmo3": _llama(
        "olmo2",
        {
            "sliding_window": 16, "layer_types": TYPES, "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        {
            **WINDOWS, "rope.freq_base": 5e5, "rope.freq_base_swa": 5e5, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        },
    ),
    "jais2": Case("jais2", {**SIZES, "layer_norm_eps": 1e-5}, LAYER_NORM),
    "nemotron": Case(
        "nemotron", {**SIZES, "norm_eps": 1e-5}, {**LAYER_NORM, "rope.dimension_count": 4, "rope.scaling.type": "none"}
    ),
    "apertus": _llama("apertus", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope.freq_base": 5e5}),
    "falcon": Case(
        "falcon", {**_moved({}, "intermediate_size"), "multi_query": True},
        {**LAYER_NORM, "feed_forward_length": 128, "attention.head_count_kv": 1}, grouped=True,
    ),
    "falcon in groups": Case(
        "falcon", {**_moved({}, "intermediate_size"), "new_decoder_architecture": True},
        {**LAYER_NORM, "feed_forward_length": 128}, grouped=True,
    ),
    "falcon in groups with one norm": Case(
        "falcon",
        {**_moved({}, "intermediate_size"), "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {**LAYER_NORM, "feed_forward_length": 128}, grouped=True,
    ),
    "gpt_neox": Case(
        "gptneox", _moved({"layer_norm_eps": 1e-5, "rotary_pct": 0.5}, "num_key_value_heads"),
        {**LAYER_NORM, "attention.head_count_kv": None, "rope.dimension_count": 4, "use_parallel_residual": True},
        grouped=True,
    ),
    "gpt_bigcode": Case(
        "starcoder",
        {
            "vocab_size": 40, "n_embd": 32, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 128,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        },
        {**LAYER_NORM, "attention.head_count_kv": 1, "rope.freq_base": None},
    ),
    "bloom": Case(
        "bloom",
        {
            **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")},
            "n_layer": 2, "n_head": 4, "seq_length": 128, "tie_word_embeddings": True,
        },
        {**LAYER_NORM, "attention.head_count_kv": 4, "feed_forward_length": 128, "rope.freq_base": None}, grouped=True,
    ),
    "mpt": Case(
        "mpt",
        {
            **{key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")},
            "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128, "tie_word_embeddings": True,
            "attn_config": {"alibi_bias_max": 16},
        },
        {
            **LAYER_NORM, "attention.head_count_kv": None, "feed_forward_length": 128, "rope.freq_base": None,
            "attention.max_alibi_bias": 16.0,
        },
    ),
    "granitemoehybrid": _llama(
        "granitehybrid",
        {
            **FACTORS, "shared_intermediate_size": 28, "num_local_experts": 0, "layer_types": ["attention"] * 2,
            "position_embedding_type": "nope",
        },
        {
            "attention.head_count_kv": [2, 2], "expert_shared_feed_forward_length": 28, "ssm.inner_size": 64,
            "rope.scaling.finetuned": False, "attention.scale": 0.25, "residual_scale": 0.5, "embedding_scale": 12.0,
        },
        interleaved=True,
    ),
    "granitemoehybrid saved as granite": _llama(
        "granite",
        {
            **FACTORS, "shared_intermediate_size": 28, "num_local_experts": 0, "layer_types": ["attention"] * 2,
            "position_embedding_type": "rope",
        },
        {
            "expert_shared_feed_forward_length": 28, "ssm.inner_size": 64, "rope.scaling.finetuned": True,
            "attention.scale": 0.25, "residual_scale": 0.5, "embedding_scale": 12.0,
        },
        interleaved=True,
        family="granite",
    ),
    "glm4_moe": _llama(
        "glm4moe", {**GROUPED, "attention_bias": True, "use_qk_norm": True},
        {**GROUPED_KEYS, "rope.dimension_count": 4, "nextn_predict_layers": 1, "block_count": 4},
    ),
    "dots1": _llama("dots1", {**GROUPED, "layer_types": ["full_attention"] * 3}, GROUPED_KEYS),
    "ernie4_5_moe": _llama(
        "ernie4_5-moe",
        {
            "num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "rope_theta": 5e5,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        },
        {
            **EXPERT_KEYS, "block_count": 3, "expert_feed_forward_length": 16, "rope.freq_base": 5e5,
            "expert_shared_count": 2, "expert_shared_feed_forward_length": 12, "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "hunyuan_v1_moe": _llama(
        "hunyuan-moe", {"num_experts": 4, "moe_topk": 2},
        {**EXPERT_KEYS, "expert_shared_count": 1, "expert_shared_feed_forward_length": 24},
    ),
    "minimax_m2": _llama(
        "minimax-m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "rotary_dim": 6, "rope_theta": 5e6},
        {**EXPERT_KEYS, **dict.fromkeys(HEADS, 12), "rope.dimension_count": 6, "rope.freq_base": 5e6},
    ),
    "llama4_text": _llama(
        "llama4",
        {
            "intermediate_size": 16, "intermediate_size_mlp": 24, "num_hidden_layers": 4, "num_local_experts": 4,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "head_dim": 12, "rope_theta": 5e5,
        },
        {
            **EXPERT_KEYS, **dict.fromkeys(HEADS, 12), "block_count": 4, "expert_feed_forward_length": 16,
            "expert_used_count": 1, "interleave_moe_layer_step": 2, "rope.freq_base": 5e5,
        },
    ),
    "llama4_text scaled by a step": _llama(
        "llama4",
        {
            "intermediate_size": 16, "intermediate_size_mlp": 24, "num_local_experts": 4, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "head_dim": 12, "rope_theta": 1e3, "num_hidden_layers": 4,
            "rope_scaling": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 64},
        },
        {
            **EXPERT_KEYS, **dict.fromkeys(HEADS, 12), "block_count": 4, "expert_feed_forward_length": 16,
            "expert_used_count": 1, "interleave_moe_layer_step": 2, "rope.freq_base": 1e3,
        },
    ),
    "phimoe": _llama(
        "phimoe",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
            "sliding_window": 16, "rope_theta": 1e4, "max_position_embeddings": 131072,
            "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 4096},
        },
        {
            "expert_count": 4, "expert_used_count": 2, "attention.sliding_window": 16, "context_length": 131072,
            "rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.1902380714238083,
        },
    ),
    "exaone_moe": _llama(
        "exaone-moe",
        {
            **GROUPED, "sliding_window": 16, "layer_types": [*TYPES, "full_attention"], "head_dim": 12,
            "rope_theta": 1e6,
        },
        {
            **GROUPED_KEYS, **WINDOWS, **dict.fromkeys(HEADS, 12), "rope.freq_base": 1e6, "rope.scaling.type": "none",
            "attention.sliding_window_pattern": [True, False, False], "expert_shared_feed_forward_length": 32,
            "nextn_predict_layers": 1, "block_count": 4,
        },
    ),
    "afmoe": _llama(
        "afmoe",
        {
            "num_hidden_layers": 5, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 12,
            "moe_intermediate_size": 16, "num_shared_experts": 2, "route_scale": 1.5, "mup_enabled": True,
            "sliding_window": 16,
        },
        {
            "block_count": 5, "leading_dense_block_count": 1, "expert_count": 4, "expert_used_count": 2,
            "expert_feed_forward_length": 16, "expert_shared_count": 2, "expert_weights_scale": 1.5,
            "expert_weights_norm": True, "expert_gating_func": 2, "attention.sliding_window": 16,
            **dict.fromkeys(HEADS, 12),
        },
    ),
    "bitnet": _llama(
        "bitnet", {"tie_word_embeddings": True, "rope_theta": 5e5},
        {"hidden_activation": "relu2", "rope.freq_base": 5e5, **LINEAR},
    ),
    "bitnet beside scales": _llama(
        "bitnet", {"tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 1e4}, LINEAR, scaled=True
    ),
    "minicpm3": _llama("minicpm3", {**LATENT, "rope_scaling": TURNED}, LATENT_KEYS),
    "llama as xverse": _llama("xverse", {}, interleaved=True),
    "llama as internlm2": _llama("internlm2", {"rope_theta": 1e6}, {"rope.freq_base": 1e6}, interleaved=True),
    "llama as baichuan": _llama("baichuan", {}, {"rope.dimension_count": 8}, interleaved=True),
    "llama as pangu-embedded": _llama("pangu-embedded", {"attention_bias": True}, HEADS),
    "qwen2 as qwen": _llama(
        "qwen", {"num_key_value_heads": 4}, {"feed_forward_length": 48, "attention.head_count_kv": None}, joined=True
    ),
    "glm as chatglm": _llama("chatglm", {"head_dim": 8, "attention_bias": True}, ROTATED, joined=True),
    "glm as chatglm apart": _llama("chatglm", {"head_dim": 8, "attention_bias": False}, ROTATED),
    "granite as minicpm": _llama(
        "minicpm",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 0.25,
            "attention_multiplier": 8**-0.5,
            "rope_scaling": {**TURNED, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
        },
        {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 0.25}, interleaved=True,
    ),
    "stablelm as orion": Case("orion", {**SIZES, "layer_norm_eps": 1e-5, "partial_rotary_factor": 1.0}, LAYER_NORM),
    "starcoder2 as codeshell": Case(
        "codeshell", {**SIZES, "norm_epsilon": 1e-5, "sliding_window": None}, {**LAYER_NORM, **LINEAR}, joined=True
    ),
    "dbrx": Case(
        "dbrx",
        {
            **{key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "tie_word_embeddings")},
            "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
        {
            **LAYER_NORM, "expert_count": 4, "expert_used_count": 2, "attention.clamp_kqv": 8.0,
            "rope.freq_base": 5e5,
        },
    ),
    "ministral3": _llama(
        "mistral3",
        {
            "head_dim": 12, "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
                "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.125,
            },
        },
        {
            **dict.fromkeys(HEADS, 12), "rope.freq_base": 1e6, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
            "attention.temperature_scale": 0.125, "rope.scaling.yarn_log_multiplier": 1.0,
        },
        interleaved=True,
    ),
    "mistral as mistral3": _llama(
        "mistral3", {"head_dim": 12, "sliding_window": None}, dict.fromkeys(HEADS, 12), interleaved=True
    ),
    "qwen3_moe beside images": _llama(
        "qwen3vlmoe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 12,
            "norm_topk_prob": True,
        },
        {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16, **dict.fromkeys(HEADS, 12),
            "rope.dimension_sections": [2, 2, 2, 0], "n_deepstack_layers": 3,
        },
    ),
    "qwen2_5_vl": _llama(
        "qwen2vl", {"rope_theta": 1e6}, {"rope.freq_base": 1e6, "rope.dimension_sections": [2, 2, 0, 0]}, family="qwen2"
    ),
    "qwen3_vl": _llama(
        "qwen3vl", {"head_dim": 12, "rope_theta": 5e6},
        {
            **dict.fromkeys(HEADS, 12), "rope.freq_base": 5e6, "rope.dimension_sections": [2, 2, 2, 0],
            "n_deepstack_layers": 3,
        },
        family="qwen3",
    ),
}  # fmt: skip
# Where the names of GGUF files stand among those of a family.
_IN_GGUF = {"granitemoehybrid": 0}


def write(
    path: Path, name: str, changes: Mapping[str, Any] | None = None, kind: str = "F32"
) -> tuple[Path, DecoderConfig, Params]:
    """Write a random model, matrices in blocks of a kind; return the path, its configuration and its parameters."""
    case = CASES[name]
    config, params, tensors = _random_model(name)
    writer = gguf.GGUFWriter(path, case.architecture)
    keys = {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 24,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0, "vocab_size": 40, **case.keys, **(changes or {}),
    }  # fmt: skip
    for key, value in keys.items():
        if value is not None:
            unsigned = type(value) is int and value >= 0
            form = gguf.GGUFValueType.UINT32 if unsigned else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"{case.architecture}.{key}", value, form)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    made = {hf_name: tensors.read(hf_name, np.dtype(np.float32)) for hf_name in tensors.shapes()}
    for tensor, values in gguf_tensors(case, config, _without_activations(writer, made)).items():
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 and values.shape[-1] % 32 == 0 else "F32"]
        writer.add_tensor(tensor, gguf.quants.quantize(np.ascontiguousarray(values), stored), raw_dtype=stored)
    for tensor, numbers in divisors(case).items():
        writer.add_tensor(tensor, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, config if case.family is None else replace(config, family=case.family), params


@cache
def _random_model(name: str) -> tuple[DecoderConfig, Params, LoadedTensors]:
    """Return a random model, and its tensors by the folder's names or, of experts, by those of GGUF files."""
    model_type = name.partition(" ")[0]
    described = {**CASES[name].config, "model_type": model_type}
    if model_type.endswith("_vl"):
        described = {"model_type": model_type, "text_config": described | {"model_type": f"{model_type}_text"}}
    config = decoder_config(described)
    # Whole 256ths, to which one can be added without rounding.
    params = jax.tree.map(lambda leaf: np.round(np.asarray(leaf) * 256) / np.float32(256), random_params(config, 2))
    names = family_of(described).tensor_names(config)
    in_gguf = names.others[_IN_GGUF.get(model_type, -1)] if names.others else {}
    return config, params, LoadedTensors(params, replace(names, block={**names.block, **in_gguf}), None)


def gguf_tensors(case: Case, config: DecoderConfig, made: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename tensors, and change them as the converter does."""
    kind = next(key for key, word in gguf.MODEL_ARCH_NAMES.items() if word == case.architecture)
    table = gguf.get_tensor_name_map(kind, config.num_layers)
    renamed, joined = {}, {}
    for hf_name, values in made.items():
        if case.joined and (part := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.(\w+)", hf_name)):
            joined.setdefault(f"blk.{part[1]}.attn_qkv.{part[3]}", {})[part[2]] = values
            continue
        if case.interleaved and (".q_proj." in hf_name or ".k_proj." in hf_name):
            values = permute(values, config.num_heads if ".q_proj." in hf_name else config.num_kv_heads)
        if case.grouped and "query_key_value" in hf_name:
            groups = values.reshape(config.num_kv_heads, -1, config.head_dim, *values.shape[1:])
            parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        if case.architecture == "nemotron" and hf_name.endswith("norm.weight"):
            values = values + np.float32(1)
        plain = hf_name.replace(".language_model", "").replace("e_score_correction_bias", "e_score_correction.bias")
        plain = plain.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm")
        plain = plain.replace(".expert_bias", ".expert_bias.bias")
        plain = plain.removeprefix("transformer.") if case.architecture == "bloom" else plain
        renamed_to = table.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert renamed_to is not None, hf_name
        if case.scaled and "_proj." in hf_name:
            scale = np.float32(2.0) ** (len(renamed) % 5 - 2)
            values = values / scale
            renamed[renamed_to.replace(".weight", ".scale")] = scale.reshape(1)
        renamed[renamed_to] = values
    return renamed | {name: np.concatenate([parts[each] for each in "qkv"]) for name, parts in joined.items()}


def divisors(case: Case) -> dict[str, Any]:
    """Return the tensors that rotary frequencies are divided by."""
    scaling = case.config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "longrope":
        return {f"rope_factors_{word}.weight": scaling[f"{word}_factor"] for word in ("long", "short")}
    if scaling.get("rope_type") != "llama3":
        return {}
    lanes = case.config.get("head_dim", 8) // 2
    frequencies = case.config["rope_theta"] ** (-np.arange(lanes) / lanes)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    width = scaling["high_freq_factor"] - 1
    smooth = np.clip((turns - 1) / width, 0, 1) if width else turns >= 1
    return {"rope_freqs.weight": 1 / ((1 - smooth) / scaling["factor"] + smooth)}


def _without_activations(writer: gguf.GGUFWriter, made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write the parameters of activations among the metadata."""
    for word in ("alpha_n", "alpha_p", "beta"):
        numbers = [float(values.reshape(())) for name, values in made.items() if name.endswith(f"act_fn.{word}")]
        if numbers:
            writer.add_array(f"xielu.{word}", numbers)
    return {name: values for name, values in made.items() if ".act_fn." not in name}
