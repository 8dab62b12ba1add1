"""Writes a trained model as a Hugging Face folder: the inverse of loading one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import DecoderConfig, Rope
from jaxinfer.models.families.family import Source, TensorNames
from jaxinfer.models.families.registry import FAMILIES
from jaxinfer.models.layers import locate
from jaxinfer.notation import Params

# The name of each rope scaling field in config.json, for the kinds that have it.
_ROPE_KEYS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        **{key: key for key in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")},
    },
    "longrope": {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "attention_factor": "attention_factor",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
    },
}


def save_hf_folder(folder: Path, config: DecoderConfig, params: Params) -> Path:
    """Write ``config.json`` and ``model.safetensors``, in the parameters' dtype; no tokenizer."""
    description = describe_config(config)
    tensors = {name: np.asarray(array) for name, array in named_tensors(config, params)}
    folder.mkdir(parents=True, exist_ok=True)
    dtype = next(iter(tensors.values())).dtype.name
    (folder / "config.json").write_text(json.dumps({**description, "dtype": dtype}, indent=2) + "\n")
    # The library writes buffers in memory order, so arrays must be contiguous.
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def describe_config(config: DecoderConfig) -> dict[str, Any]:
    """Return the ``config.json``, in the form of transformers 5, that translates to this config."""
    if config.family != "llama":
        raise UnsupportedModel(f"a model of family {config.family!r} cannot be written; the families are: llama")
    ends = list(config.eos_token_ids)
    return {
        "architectures": list(FAMILIES["llama"].architectures),
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": _describe_rope(config.kinds[0].rope),
        "hidden_act": config.activation,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }


def named_tensors(config: DecoderConfig, params: Params) -> Iterator[tuple[str, Any]]:
    """Yield every parameter under its Hugging Face name; stacked blocks are split by layer."""
    names = FAMILIES[config.family].tensor_names(config)
    for path, leaf in _walk(params, ()):
        yield from _name_leaf(names, path, leaf)


def _name_leaf(names: TensorNames, path: tuple[str, ...], leaf: Any) -> Iterator[tuple[str, Any]]:
    layers, stacked, name, transposed = locate(path, leaf.shape)
    if transposed:
        leaf = np.ascontiguousarray(np.asarray(leaf).swapaxes(-1, -2))
    if layers is None:
        yield _whole(names.top[name]), leaf
    else:
        tensor = _whole(names.block[name])
        parts = np.asarray(leaf) if stacked else (leaf,)
        yield from ((tensor.format(layer=layer), part) for layer, part in zip(layers, parts, strict=True))


def _whole(source: Source) -> str:
    assert isinstance(source, str)  # llama has no fused tensors
    return source


def _walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*path, key))
        else:
            yield (*path, key), value


def _describe_rope(rope: Rope | None) -> dict[str, Any]:
    assert rope is not None  # llama has rotary positions
    theta, scaling = rope.theta, rope.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    fields = asdict(scaling)
    keys = {key: fields[field] for field, key in _ROPE_KEYS[scaling.kind].items() if fields[field] is not None}
    return {"rope_type": scaling.kind, "rope_theta": theta, **keys}
