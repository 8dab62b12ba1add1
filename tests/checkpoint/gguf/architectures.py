"""Tiny models of Hugging Face transformers, and the GGUF files that llama.cpp's converter would make of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.checkpoint.gguf.files import permute

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
ALTERNATING = GEMMA | {"query_pre_attn_scalar": 32, "sliding_window": 24}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FACTORS = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.25,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 1.25, 2.0, 3.0, 4.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 9.5, 16.0],
    "partial_rotary_factor": 0.75,
}


@dataclass(frozen=True)
class Case:
    """A model: its architecture in llama.cpp, its class in transformers, and its configuration beside the sizes."""

    architecture: str
    model: str
    config: Mapping[str, Any]


CASES: Mapping[str, Case] = {
    "llama": Case("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": Case("qwen2", "Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "qwen2-tied": Case("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": Case("qwen3", "Qwen3ForCausalLM", {"head_dim": 32}),
    "gemma": Case("gemma", "GemmaForCausalLM", GEMMA),
    "gemma2": Case("gemma2", "Gemma2ForCausalLM", ALTERNATING | {"num_hidden_layers": 3}),
    "gemma3": Case("gemma3", "Gemma3ForCausalLM", ALTERNATING | {"num_hidden_layers": 7}),
    "gemma3-linear": Case(
        "gemma3",
        "Gemma3ForCausalLM",
        ALTERNATING
        | {
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi2": Case("phi2", "PhiForCausalLM", {"intermediate_size": 256, "num_key_value_heads": 4}),
    "phi2-fused": Case("phi2", "PhiForCausalLM", {"intermediate_size": 256, "num_key_value_heads": 4}),
    "phi3": Case("phi3", "Phi3ForCausalLM", {"sliding_window": 24, "original_max_position_embeddings": 160}),
    "phi3-longrope": Case(
        "phi3", "Phi3ForCausalLM", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
    ),
    "gpt2": Case("gpt2", "GPT2LMHeadModel", {"tie_word_embeddings": True}),
    "olmo2": Case("olmo2", "Olmo2ForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "smollm3": Case("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "granite": Case("granite", "GraniteForCausalLM", FACTORS),
    "glm4": Case("glm4", "Glm4ForCausalLM", {"head_dim": 32, "attention_bias": True}),
    "stablelm": Case("stablelm", "StableLmForCausalLM", {"use_qkv_bias": True, "rope_parameters": HALF}),
    "stablelm-parallel": Case("stablelm", "StableLmForCausalLM", {"use_parallel_residual": True}),
    "starcoder2": Case("starcoder2", "Starcoder2ForCausalLM", {"tie_word_embeddings": True}),
    "command-r": Case("command-r", "CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 2.5}),
    "cohere2": Case(
        "cohere2", "Cohere2ForCausalLM", {"num_hidden_layers": 5, "sliding_window": 24, "logit_scale": 2.5}
    ),
    "gpt2-untied": Case("gpt2", "GPT2LMHeadModel", {"n_inner": 96, "tie_word_embeddings": False}),
}


def build_model(case: Case, seed: int = 0) -> Any:
    """Build a model of transformers whose weights are drawn so that logits have a deviation of about 1 or more."""
    import torch
    import transformers

    kind = getattr(transformers, case.model)
    # GPT-2's own words for the same sizes.
    words = kind.config_class.attribute_map
    sizes = {
        words.get(key, key): size for key, size in SIZES.items() if hasattr(kind.config_class, words.get(key, key))
    }
    model = kind(kind.config_class(**{**sizes, **case.config})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                # Whole 256ths, to which one can be added without rounding, as to the bfloat16 weights of real models.
                is_scale = name.endswith("weight") and "Gemma" not in case.model
                weight.copy_(float(is_scale) + torch.round(noise * 64) / 256)
            else:
                weight.copy_(noise * (0.5 if "emb" in name or "wte" in name else 1.4 * weight.shape[1] ** -0.5))
    return model


def hf_tensors(model: Any) -> dict[str, np.ndarray]:
    """Return what the model's folder would hold: a head that is the embedding is not stored again."""
    tensors = {name: values.numpy() for name, values in model.state_dict().items()}
    return {n: v for n, v in tensors.items() if n != "lm_head.weight" or not model.config.tie_word_embeddings}


def gguf_tensors(case: Case, tensors: Mapping[str, np.ndarray], fused: bool = False) -> dict[str, np.ndarray]:
    """Rename and change tensors as llama.cpp's converter does; ``fused`` is how the first Phi-2 code kept them."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    table = gguf.get_tensor_name_map(kind, 99)
    heads = {**SIZES, **case.config}
    made = {}
    for name, values in tensors.items():
        if case.architecture in ("llama", "smollm3", "granite") and ("q_proj" in name or "k_proj" in name):
            values = permute(values, heads["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if case.architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if case.architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = np.ascontiguousarray(values.T)
        renamed = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        made[renamed] = values
    if fused:
        for name in [name for name in made if ".attn_q." in name]:
            parts = [made.pop(name.replace("attn_q", part)) for part in ("attn_q", "attn_k", "attn_v")]
            made[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return made


def write_model(
    path: Path,
    case: Case,
    model: Any,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    fused: bool = False,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the GGUF of a model; matrices are stored as ``kind``, ``keys`` are set or, where None, removed."""
    writer = gguf.GGUFWriter(path, case.architecture)
    _write_keys(writer, case, model.config)
    _write_vocabulary(writer, model.config)
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            unsigned = type(value) is int and value >= 0
            found = gguf.GGUFValueType.UINT32 if unsigned else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, found)
    made = gguf_tensors(case, hf_tensors(model), fused) if tensors is None else dict(tensors)
    if case.architecture == "phi3" and tensors is None:
        made |= _longrope_tensors(writer, model.config)
    for name, values in made.items():
        if values.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_keys(writer: gguf.GGUFWriter, case: Case, config: Any) -> None:
    """Write what the converter writes for the architecture, in the words of the gguf package."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if case.architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    if case.architecture in ("phi2", "phi3", "glm4", "stablelm"):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    if case.architecture == "phi2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_add_bos_token(False)
        return
    if case.architecture in ("command-r", "cohere2", "stablelm", "starcoder2"):
        writer.add_layer_norm_eps(config.norm_epsilon if case.architecture == "starcoder2" else config.layer_norm_eps)
        if case.architecture == "stablelm":
            writer.add_parallel_residual(True)  # in whatever model
            return
        writer.add_rope_freq_base(rope["rope_theta"])
        if case.architecture != "starcoder2":
            writer.add_logit_scale(config.logit_scale)
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        if case.architecture == "cohere2":
            writer.add_sliding_window(config.sliding_window)
            writer.add_rope_dimension_count(config.head_dim)
        return
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if case.architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if case.architecture not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if case.architecture in ("llama", "qwen3", "gemma", "gemma2", "gemma3", "glm4"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if case.architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if case.architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if case.architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _longrope_tensors(writer: gguf.GGUFWriter, config: Any) -> dict[str, np.ndarray]:
    rope = config.rope_parameters
    if rope["rope_type"] != "longrope":
        return {}
    original = config.original_max_position_embeddings
    scale = config.max_position_embeddings / original
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    return {f"rope_factors_{word}.weight": np.array(rope[f"{word}_factor"], np.float32) for word in ("long", "short")}


def _write_vocabulary(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"token {token}" for token in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    for word in ("bos", "eos", "pad"):
        if (token := getattr(config, f"{word}_token_id")) is not None:
            getattr(writer, f"add_{word}_token_id")(token)
