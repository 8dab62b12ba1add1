"""Tiny random mixtures of experts as published: a tensor or several for each expert, and the same in plain numbers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.models.families.registry import family_of
from tests.checkpoint.published.packing import Case, Tensors
from tests.toys import random_params

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "num_experts_per_tok": 2,
}
# Eight experts: as many as the router of one has rows in a word of GPTQ's and AWQ's.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {
        **_SIZES,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 128,
        "num_local_experts": 8,
    },
    "qwen3_moe": {
        **_SIZES,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "norm_topk_prob": True,
    },
    "llama4_text": {
        **_SIZES,
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size": 128,
        "intermediate_size_mlp": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
    },
}
# Given a matrix's name, what packs it; None: nothing does.
Choice = Callable[[str], Case | None]


def write_mixture(folder: Path, kind: str, method: Mapping[str, Any], choose: Choice) -> Tensors:
    """Write a model's matrices as ``choose`` says to ``folder / "packed"``, and as plain numbers to "plain".

    Returns the plain numbers of all tensors.
    """
    config = CONFIGS[kind]
    family = family_of(config)
    decoder = family.translate(config)
    params = jax.tree.map(np.asarray, random_params(decoder, seed=1))
    source = LoadedTensors(params, family.tensor_names(decoder).of_matrices(), None)
    rng, plain, packed = np.random.default_rng(2), dict[str, np.ndarray](), dict[str, Any]()
    for name in source.shapes():
        plain[name] = source.read(name, np.dtype(np.float32))
        case = choose(name) if plain[name].ndim == 2 else None
        if case is None:
            packed[name] = plain[name]
            continue
        parts, weights = case.pack(rng, *plain[name].shape)
        plain[name] = weights.astype(np.float32)
        packed |= {f"{name.removesuffix('.weight')}.{part}": values for part, values in parts.items()}
    _write(folder / "plain", plain, config)
    _write(folder / "packed", packed, {**config, "quantization_config": dict(method)})
    return plain


def linear(case: Case, *, with_router: bool = False) -> Choice:
    """Pack all matrices but tables, and the router too if it is asked for."""
    kept = ("embed_tokens", "lm_head", *(() if with_router else (".gate.weight", ".router.weight")))
    return lambda name: None if any(each in name for each in kept) else case


def _write(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    folder.mkdir()
    texts = {name: value for name, value in tensors.items() if isinstance(value, str)}
    numbers = {name: np.ascontiguousarray(value) for name, value in tensors.items() if name not in texts}
    save_file(numbers, folder / "model.safetensors", metadata=texts or None)
    (folder / "config.json").write_text(json.dumps(config))
