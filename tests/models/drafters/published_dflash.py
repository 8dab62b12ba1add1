"""DFlash's published module written out in NumPy, over its own files: whole texts, no cache, one block at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def write_published(folder: Path, settings: Mapping[str, Any], seed: int = 0) -> Path:
    """Write random weights in the published layout for a ``config.json``, all of float32."""
    rng, width, head = np.random.default_rng(seed), settings["hidden_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    inner, read = settings["intermediate_size"], len(settings["dflash_config"]["target_layer_ids"]) * width
    shapes = {"fc.weight": (width, read), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for layer in range(settings["num_hidden_layers"]):
        own = {
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (queries, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
        }
        if settings.get("attention_bias"):
            own |= {f"self_attn.{name}_proj.bias": (queries if name == "q" else keys,) for name in "qkv"}
            own |= {"self_attn.o_proj.bias": (width,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    tensors = {
        name: rng.standard_normal(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(settings)))
    save_file({name: array.astype(np.float32) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def published_block(folder: Path, hidden_TF: np.ndarray, embedded_ND: np.ndarray) -> np.ndarray:
    """Return what the output matrix reads at every place of a block after T tokens, as ``[N, D]``.

    ``hidden_TF`` are the outputs of ``target_layer_ids`` side by side, ``embedded_ND`` the block's embeddings.
    """
    settings, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    weights = {name: array.astype(np.float64) for name, array in stored.items()}
    eps, head = settings["rms_norm_eps"], settings["head_dim"]
    num_tokens, num_places = len(hidden_TF), len(embedded_ND)
    positions_S = np.arange(num_tokens + num_places)
    angles_SR = positions_S[:, None] * settings["rope_theta"] ** (-np.arange(0, head, 2) / head)
    cosines, sines = (np.concatenate([turn(angles_SR)] * 2, axis=-1)[:, None] for turn in (np.cos, np.sin))

    def norm(inputs: np.ndarray, name: str) -> np.ndarray:
        return inputs / np.sqrt(np.mean(inputs**2, axis=-1, keepdims=True) + eps) * weights[f"{name}.weight"]

    def linear(inputs: np.ndarray, name: str) -> np.ndarray:
        return inputs @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def turned(heads: np.ndarray, at: slice) -> np.ndarray:
        first, second = np.split(heads, 2, axis=-1)
        return heads * cosines[at] + np.concatenate([-second, first], axis=-1) * sines[at]

    context_TD, states_ND = norm(linear(hidden_TF, "fc"), "hidden_norm"), embedded_ND.astype(np.float64)
    for layer in range(settings["num_hidden_layers"]):
        own = f"layers.{layer}.self_attn"
        inputs_ND = norm(states_ND, f"layers.{layer}.input_layernorm")
        both_SD = np.concatenate([context_TD, inputs_ND])
        query, keys, values = (
            linear(inputs, f"{own}.{name}_proj").reshape(len(inputs), -1, head)
            for name, inputs in (("q", inputs_ND), ("k", both_SD), ("v", both_SD))
        )
        query = turned(norm(query, f"{own}.q_norm"), np.s_[num_tokens:])
        keys = turned(norm(keys, f"{own}.k_norm"), np.s_[:])
        shared = query.shape[1] // keys.shape[1]
        keys, values = (np.repeat(array, shared, axis=1) for array in (keys, values))
        scores = np.einsum("nhd,shd->hns", query, keys) * head**-0.5
        if settings["layer_types"][layer] == "sliding_attention":
            # The trainer's mask: causal inside the block, and the last places of the window before it.
            at, of = positions_S[num_tokens:, None], positions_S[None]
            scores = np.where((of <= at) & (of > at - settings["sliding_window"]), scores, -np.inf)
        chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
        chances /= chances.sum(axis=-1, keepdims=True)
        mixed_ND = np.einsum("hns,shd->nhd", chances, values).reshape(num_places, -1)
        states_ND = states_ND + linear(mixed_ND, f"{own}.o_proj")
        inputs_ND = norm(states_ND, f"layers.{layer}.post_attention_layernorm")
        gate = linear(inputs_ND, f"layers.{layer}.mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * linear(inputs_ND, f"layers.{layer}.mlp.up_proj")
        states_ND = states_ND + linear(inner, f"layers.{layer}.mlp.down_proj")
    return norm(states_ND, "norm")


def settings_for(**changes: Any) -> dict[str, Any]:
    """Return a published ``config.json`` for `tests.toys.TINY_LLAMA` of four layers."""
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 6,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
        "dtype": "float32",
        "eos_token_id": 0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 1024,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 258,
        **changes,
    }
