"""A variant of a family for the parity tests, and edits that each turn one of its features off."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxinfer.models.config import DecoderConfig, shortest_pattern
from jaxinfer.models.families.family import Part
from jaxinfer.notation import Params
from tests.toys import rope_of, with_rope

Edit = Callable[[DecoderConfig, Params], tuple[DecoderConfig, Params]]
SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 96,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def rope_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a configuration of transformers 5 in the keys of transformers 4."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    return config


def partial_rope_to_version_4(config: dict[str, Any]) -> dict[str, Any]:
    """Do the same for families that rotate part of a head, a fraction which version 4 kept beside the section."""
    rope = dict(config["rope_parameters"])
    partial = rope.pop("partial_rotary_factor")
    return {**rope_to_version_4({**config, "rope_parameters": rope}), "partial_rotary_factor": partial}


@dataclass(frozen=True)
class Variant:
    """Keys of ``config.json`` beside the common sizes, and edits that each turn one feature off.

    ``sizes`` are the keys that all variants of a family share. ``max_len`` is set where texts may outgrow
    ``max_position_embeddings``. ``to_version_4`` rewrites a configuration as transformers 4 would have written it.
    """

    config: Mapping[str, Any]
    without: Mapping[str, Edit] = field(default_factory=dict)
    max_len: int | None = None
    model_type: str = "llama"
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    to_version_4: Callable[[dict[str, Any]], dict[str, Any]] = rope_to_version_4


def rope(**changes: Any) -> Edit:
    """Change fields of the rotary positions."""
    return lambda config, params: (with_rope(config, **changes), params)


def scaling(**changes: Any) -> Edit:
    """Change fields of the rope scaling."""

    def edit(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
        stretched = rope_of(config).scaling
        assert stretched is not None
        return with_rope(config, scaling=replace(stretched, **changes)), params

    return edit


def window(width: int | None) -> Edit:
    """Change the width of all windows."""

    def edit(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
        kinds = (replace(kind, window=kind.window and width) for kind in config.layer_pattern)
        return replace(config, layer_pattern=tuple(kinds)), params

    return edit


def swapped_kinds(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Give the layers of each of two kinds the other one."""
    first, second = config.kinds
    layers = tuple(second if kind == first else first for kind in config.layers)
    return replace(config, layer_pattern=shortest_pattern(layers)), params


def settings(**changes: Any) -> Edit:
    """Change fields of the decoder's configuration."""
    return lambda config, params: (replace(config, **changes), params)


def zeroed(*path: str) -> Edit:
    """Set the parameters whose path ends so to zero."""

    def clear(keys: Any, leaf: Any) -> Any:
        names = tuple(key.key for key in keys)
        return leaf * 0 if names[-len(path) :] == path else leaf

    return lambda config, params: (config, jax.tree_util.tree_map_with_path(clear, params))


def rolled_kv_heads(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Give every group of query heads the next group's keys and values."""

    def roll(keys: Any, leaf: Any) -> Any:
        is_kv = {key.key for key in keys} & {"key", "value"}
        return np.roll(leaf, config.head_dim, axis=-2) if is_kv and leaf.ndim > 1 else leaf

    return config, jax.tree_util.tree_map_with_path(roll, params)


def embedding_as_head(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Tie the output matrix to the embedding."""
    tied = {name: value for name, value in params.items() if name != "head"}
    return replace(config, tied_embeddings=True), tied


def halves(config: DecoderConfig, params: Params) -> tuple[DecoderConfig, Params]:
    """Let rotary positions turn the halves of a head where a checkpoint's turn neighbouring lanes."""
    (turning,) = {kind.rope.dim for kind in config.kinds if kind.rope is not None}

    def reorder(keys: Any, leaf: Any) -> Any:
        names = {key.key for key in keys}
        if not names & {"query", "key", "query_norm", "key_norm"}:
            return leaf
        return leaf[np.argsort(Part("", rotary=(config.head_dim, turning)).rows(len(leaf)))]

    return config, jax.tree_util.tree_map_with_path(reorder, params)
