"""DFlash drafters on disk, as published (z-lab, 2602.06036): ``config.json`` and ``model.safetensors``, or its shards.

The config is that of a Qwen3 model of few layers, with ``block_size``, ``num_target_layers`` and, under
``dflash_config``, ``mask_token_id`` and ``target_layer_ids``: the layers of the target whose outputs are read. Beside
the tensors of the layers, ``layers.0.self_attn.q_proj.weight`` and so on, there are ``fc.weight``,
``hidden_norm.weight`` and ``norm.weight``. Folders that this library writes also name, under ``dflash_config``, the
``base`` and the ``base_fingerprint`` of its weights (`jaxinfer.models.fingerprint`). A ``tree.json`` may hold a draft
tree.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxinfer.checkpoint.drafters.shipped import check_fingerprint
from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.checkpoint.leaves import list_leaves
from jaxinfer.checkpoint.load import load_params
from jaxinfer.checkpoint.new_folder import new_folder
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint, shown
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.drafters.dflash import DFlashConfig, abstract_dflash, default_features
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.families.keys.llama_names import tensor_names
from jaxinfer.models.families.qwen import translate_qwen3
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend

_CONFIG, _WEIGHTS, _SECTION = "config.json", "model.safetensors", "dflash_config"
_OWN_KEYS = (_SECTION, "block_size", "num_target_layers", "auto_map")
# Of relatives of DFlash, whose layout is the same: other values are of networks with further parts.
_NEUTRAL = {"projector_type": None, "pure_draft_prefix_len": 0, "shift_label": False}
_KNOWN = ("mask_token_id", "target_layer_ids", "base", "base_fingerprint", *_NEUTRAL)
_LARGEST_BLOCK = 256


def read_dflash(
    folder: Path,
    config: DecoderConfig,
    backend: Backend,
    fingerprint: Callable[[], str | None] = lambda: None,
) -> tuple[DFlashConfig, Params]:
    """Read a DFlash drafter for a model of this config.

    Raises :class:`CheckpointNotFound` or :class:`InvalidCheckpoint` for files that are missing or damaged and for a
    drafter of another model: of other sizes, or of other weights than those of ``fingerprint``; and
    :class:`UnsupportedModel` for layers that are none of Qwen3's.
    """
    if not folder.is_dir():
        raise CheckpointNotFound(f"{folder}: no such folder of a DFlash drafter")
    checkpoint = open_hf_folder(folder)
    path, settings = folder / _CONFIG, checkpoint.config
    section = settings.get(_SECTION)
    if not isinstance(section, dict):
        raise InvalidCheckpoint(f"{path}: has no {_SECTION}, so it is of no DFlash drafter")
    _check_section(path, section)
    decoder = translate_qwen3({key: value for key, value in settings.items() if key not in _OWN_KEYS})
    block_size = _count(path, "block_size", settings.get("block_size"), 2, _LARGEST_BLOCK)
    mask_token = _count(path, "mask_token_id", section.get("mask_token_id"), 0, decoder.vocab_size - 1)
    _check_base(folder, section.get("base"), decoder, settings.get("num_target_layers"), config)
    check_fingerprint(folder, section.get("base_fingerprint"), fingerprint)
    features = _read_features(path, section.get("target_layer_ids"), decoder.num_layers, config.num_layers)
    dflash = DFlashConfig(decoder, block_size, mask_token, features)
    flat = load_params(checkpoint, _names(decoder), _flat(abstract_dflash(dflash, backend)))
    return dflash, {"decoder": {name: flat.pop(name) for name in ("blocks", "final_norm")}, **flat}


def write_dflash(
    folder: Path,
    dflash: DFlashConfig,
    params: Params,
    config: DecoderConfig,
    *,
    base: str | None = None,
    base_fingerprint: str | None = None,
    beside: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
) -> None:
    """Write a drafter for a model of this config to a new folder, in the published layout.

    ``beside`` are further files, their texts by name. ``overwrite`` replaces a folder of a drafter.
    """
    tensors = {}
    for leaf in list_leaves(_flat(params), _names(dflash.decoder).moved("model.", ""), None):
        values = np.asarray(leaf.struct)
        for place, (source,) in enumerate(leaf.sources):
            value = values[place] if leaf.stacked else values
            tensors[source.tensor] = np.ascontiguousarray(value.T if leaf.transposed else value)
    description = _describe(dflash, config, next(iter(tensors.values())).dtype.name)
    section = {"base": base, "base_fingerprint": base_fingerprint}
    description[_SECTION] |= {key: value for key, value in section.items() if value is not None}
    with new_folder(folder, _CONFIG if overwrite else None) as new:
        (new / _CONFIG).write_text(json.dumps(description, indent=2) + "\n")
        save_file(tensors, new / _WEIGHTS)
        for name, text in beside.items():
            (new / name).write_text(text, encoding="utf-8")


def _flat(params: Params) -> Params:
    return {**params["decoder"], **{name: value for name, value in params.items() if name != "decoder"}}


def _names(decoder: DecoderConfig) -> TensorNames:
    """Return the tensors' names; published files leave out the prefix that conversions may add."""
    names = tensor_names(decoder)
    top = {
        "final_norm.scale": names.top["final_norm.scale"],
        "fc.kernel": "model.fc.weight",
        "hidden_norm.scale": "model.hidden_norm.weight",
    }
    # Both tables are the target's.
    ignored = (*names.ignored, r"(model\.)?embed_tokens\.weight", r"lm_head\.weight")
    return replace(names, top=top, ignored=ignored, optional_prefix="model.", other_prefix="")


def _check_section(path: Path, section: Mapping[str, Any]) -> None:
    if unknown := sorted(section.keys() - set(_KNOWN)):
        raise InvalidCheckpoint(f"{path}: unknown field {unknown[0]} of {_SECTION}; known are {', '.join(_KNOWN)}")
    for key, neutral in _NEUTRAL.items():
        if section.get(key, neutral) != neutral:
            raise InvalidCheckpoint(
                f"{path}: {key} {shown(section[key])} is of a relative of DFlash, which is not read"
            )
    for key in ("base", "base_fingerprint"):
        if not isinstance(section.get(key), str | None):
            raise InvalidCheckpoint(f"{path}: {key} must be text or null, not {shown(section[key])}")


def _count(path: Path, key: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidCheckpoint(f"{path}: {key} must be a whole number from {least} to {most}, not {shown(value)}")
    return value


def _check_base(folder: Path, base: str | None, decoder: DecoderConfig, layers: Any, config: DecoderConfig) -> None:
    of = f" of {base}" if base else ""
    sizes = {
        "hidden channels": (decoder.model_dim, config.model_dim),
        "tokens": (decoder.vocab_size, config.num_tokens),
        "layers": (config.num_layers if layers is None else layers, config.num_layers),
    }
    for name, (theirs, has) in sizes.items():
        if theirs != has:
            raise InvalidCheckpoint(
                f"{folder}: the drafter{of} is for a model of {shown(theirs)} {name}, but this one has {has}"
            )


def _read_features(path: Path, ids: Any, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Return the layers that read the outputs of those listed; the last one's, which no layer reads, is none."""
    if ids is None:
        return default_features(num_target_layers, num_layers)
    most = num_target_layers - 2
    if not isinstance(ids, list) or not ids or not all(type(one) is int and 0 <= one <= most for one in ids):
        raise InvalidCheckpoint(f"{path}: target_layer_ids must list layers from 0 to {most}, not {shown(ids)}")
    if len(set(ids)) < len(ids):
        raise InvalidCheckpoint(f"{path}: target_layer_ids lists a layer twice: {shown(ids)}")
    return tuple(one + 1 for one in ids)


def _describe(dflash: DFlashConfig, config: DecoderConfig, dtype: str) -> dict[str, Any]:
    decoder = dflash.decoder
    (kind,) = decoder.layer_pattern
    assert kind.rope is not None
    assert kind.rope.scaling is None
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": dflash.block_size,
        "num_target_layers": config.num_layers,
        _SECTION: {"mask_token_id": dflash.mask_token, "target_layer_ids": [layer - 1 for layer in dflash.features]},
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.model_dim,
        "intermediate_size": decoder.ffn_dim,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": decoder.activation,
        "max_position_embeddings": decoder.max_position,
        "rms_norm_eps": decoder.norm_eps,
        "rope_theta": kind.rope.theta,
        "rope_scaling": None,
        "attention_bias": decoder.qkv_bias,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * decoder.num_layers,
        "max_window_layers": decoder.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }
