"""Sizes that split evenly over devices: where a decoder's own do not, zeros fill them up.

A head of zeros meets rows of zeros in the output projection, as a feature of zeros does in the feed-forward layer's,
and a row of the vocabulary that is no token is never drawn, so that a padded decoder computes what its own does. Where
there are fewer key/value heads than devices, each is copied for a part of its query heads rather than joined by zeros,
if that takes fewer heads: of 8 heads with 4 queries each, 16 devices hold two copies with 2 queries each.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.models.adapters import ADAPTED
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import logical_axes
from jaxinfer.notation import Array, Params
from jaxinfer.ops.backend import Backend

# Sums over a vocabulary in a fixed order take lanes of 128, which must not lie on two devices.
_VOCAB_TILE = 128

# Of each axis of a parameter: which element of the model's own parameter each stands for, -1 for zeros; None: its own.
Sources = tuple[np.ndarray | None, ...]


class _Heads(NamedTuple):
    """How heads are split: key/value heads in all, copies of each of the model's own, and query heads of each."""

    num_kv_heads: int
    copies: int
    queries: int


def pad_config(config: DecoderConfig, shards: int) -> DecoderConfig:
    """Return the decoder with heads, feed-forward features and vocabulary that split over so many devices."""
    if shards == 1:
        return config
    heads = _split_heads(config, shards)
    vocab_size = _multiple(config.vocab_size, _VOCAB_TILE * shards)
    return replace(
        config,
        num_heads=heads.num_kv_heads * heads.queries,
        num_kv_heads=heads.num_kv_heads,
        ffn_dim=_multiple(config.ffn_dim, shards),
        vocab_size=vocab_size,
        vocab_padding=config.vocab_padding + vocab_size - config.vocab_size,
    )


def parameter_sources(config: DecoderConfig, backend: Backend, shards: int) -> Params:
    """Return where each element of the padded decoder's parameters comes from: a tree of `Sources`."""
    by_axis = _axis_sources(config, shards)

    def sources(axes: Any) -> Sources:
        found = (by_axis.get(axis) for axis in axes)
        return tuple(None if source is None or _is_identity(source) else source for source in found)

    padded = pad_config(config, shards)
    return jax.tree.map(sources, logical_axes(padded, backend), is_leaf=lambda node: isinstance(node, PartitionSpec))


def pad_parameter(parameter: Any, sources: Sources) -> Array:
    """Fill a parameter of the model's own up with zeros; one that is padded already is returned as it is."""
    for axis, source in enumerate(sources):
        size = parameter.shape[axis]
        if source is not None and size != len(source):
            # Past the end, for a negative index would count from there.
            places = np.where(source < 0, size, source)
            parameter = jnp.take(parameter, places, axis=axis, mode="fill", fill_value=0)
    return parameter


def pad_adapters(adapters: Params, config: DecoderConfig, shards: int) -> Params:
    """Return adapters of a decoder for the one that is padded to split over so many devices."""
    if shards == 1:
        return adapters
    by_axis = _axis_sources(config, shards)

    def padded(path: Any, leaf: Any) -> Array:
        *module, _, part = (key.key for key in path)
        out_axis, in_axis = ADAPTED[".".join(module)]
        sources = (None, None, by_axis.get(in_axis)) if part == "down" else (None, by_axis.get(out_axis), None)
        return pad_parameter(jnp.asarray(leaf), sources)

    return jax.tree_util.tree_map_with_path(padded, adapters)


def _axis_sources(config: DecoderConfig, shards: int) -> Mapping[str, np.ndarray]:
    padded, heads = pad_config(config, shards), _split_heads(config, shards)
    kv_head_K, copy_K = np.divmod(np.arange(padded.num_kv_heads), heads.copies)
    is_kept_K = kv_head_K < config.num_kv_heads
    group_KG = copy_K[:, None] * heads.queries + np.arange(heads.queries)
    is_kept_KG = is_kept_K[:, None] & (group_KG < config.query_heads_per_kv_head)
    query_KG = kv_head_K[:, None] * config.query_heads_per_kv_head + group_KG
    return {
        "heads": _lanes(np.where(is_kept_KG, query_KG, -1).reshape(-1), config.head_dim),
        "kv_heads": _lanes(np.where(is_kept_K, kv_head_K, -1), config.head_dim),
        "ffn": _filled(config.ffn_dim, padded.ffn_dim),
        "vocab": _filled(config.vocab_size, padded.vocab_size),
    }


def _split_heads(config: DecoderConfig, shards: int) -> _Heads:
    """Choose the fewest key/value heads, which the cache holds, then the fewest query heads, then the fewest copies."""
    queries = config.query_heads_per_kv_head
    choices = (
        _Heads(_multiple(config.num_kv_heads * copies, shards), copies, -(-queries // copies))
        for copies in range(1, queries + 1)
    )
    return min(choices, key=lambda heads: (heads.num_kv_heads, heads.num_kv_heads * heads.queries))


def _lanes(heads: np.ndarray, head_dim: int) -> np.ndarray:
    lanes = heads[:, None] * head_dim + np.arange(head_dim)
    return np.where(heads[:, None] < 0, -1, lanes).reshape(-1)


def _filled(size: int, padded: int) -> np.ndarray:
    index = np.arange(padded)
    return np.where(index < size, index, -1)


def _is_identity(source: np.ndarray) -> bool:
    return bool((source == np.arange(len(source))).all())


def _multiple(size: int, factor: int) -> int:
    return -(-size // factor) * factor
