"""Pads a decoder with zeros to sizes that split evenly over devices.

The padded decoder computes the same results: a head of zeros meets rows of zeros in the output projection, a feature of
zeros does so in the feed-forward layer, and padding rows of the vocabulary are never drawn. If there are fewer
key/value heads than devices, each may be copied instead, with a part of its query heads per copy, if that takes fewer
heads: of 8 heads with 4 queries each, 16 devices hold two copies with 2 queries each.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxinfer.errors import InvalidOption
from jaxinfer.models.adapters import kernel_axes
from jaxinfer.models.config import DecoderConfig, Experts
from jaxinfer.models.decoder import logical_axes
from jaxinfer.notation import Array, Params
from jaxinfer.ops.backend import Backend

# Sums over a vocabulary in a fixed order read 128 lanes at a time, which must be on one device.
_VOCAB_TILE = 128

# For each axis of a parameter, the index of each element in the unpadded parameter, -1 for zeros. None: not padded.
Sources = tuple[np.ndarray | None, ...]


class _Heads(NamedTuple):
    """The split of heads: the number of key/value heads, copies of each original one, and query heads per copy."""

    num_kv_heads: int
    copies: int
    queries: int


def pad_config(config: DecoderConfig, shards: int) -> DecoderConfig:
    """Return the decoder with heads, feed-forward features and vocabulary padded to split over ``shards`` devices.

    Raises InvalidOption if heads or features would be padded whose mean all of them share.
    """
    if shards == 1:
        return config
    heads = _split_heads(config, shards)
    if config.qk_norm == "all_heads" and (config.num_heads % shards or config.num_kv_heads % shards):
        counts = f"{config.num_heads} query and {config.num_kv_heads} key heads, each normed as one vector,"
        raise InvalidOption(f"mesh: {counts} do not split over tensor={shards} devices: choose a divisor of both")
    if config.inner_norms and (heads.num_kv_heads * heads.queries != config.num_heads or config.ffn_dim % shards):
        counts = f"{config.num_heads} heads and {config.ffn_dim} feed-forward features, each normed as one vector,"
        raise InvalidOption(f"mesh: {counts} do not split over tensor={shards} devices: choose a divisor of both")
    vocab_size = _multiple(config.vocab_size, _VOCAB_TILE * shards)
    return replace(
        config,
        num_heads=heads.num_kv_heads * heads.queries,
        num_kv_heads=heads.num_kv_heads,
        alibi=config.alibi and replace(config.alibi, slopes=_padded_slopes(config.alibi.slopes, heads.num_kv_heads)),
        ffn_dim=_multiple(config.ffn_dim, shards),
        experts=config.experts and _pad_experts(config.experts, shards),
        vocab_size=vocab_size,
        vocab_padding=config.vocab_padding + vocab_size - config.vocab_size,
    )


def parameter_sources(config: DecoderConfig, backend: Backend, shards: int) -> Params:
    """Return the source of each element of the padded decoder's parameters: a tree of `Sources`."""
    by_axis = _axis_sources(config, shards)

    def sources(axes: Any) -> Sources:
        found = (by_axis.get(axis) for axis in axes)
        return tuple(None if source is None or _is_identity(source) else source for source in found)

    padded = pad_config(config, shards)
    return jax.tree.map(sources, logical_axes(padded, backend), is_leaf=lambda node: isinstance(node, PartitionSpec))


def pad_parameter(parameter: Any, sources: Sources) -> Array:
    """Pad a parameter with zeros; a padded parameter is returned unchanged."""
    for axis, source in enumerate(sources):
        size = parameter.shape[axis]
        if source is not None and size != len(source):
            # Index past the end: a negative index would count from there.
            places = np.where(source < 0, size, source)
            parameter = jnp.take(parameter, places, axis=axis, mode="fill", fill_value=0)
    return parameter


def first_copies(source: np.ndarray) -> np.ndarray:
    """Return where in a padded parameter each element is; of one that padding copied, the first copy."""
    kept = np.flatnonzero(source >= 0)
    return kept[np.unique(source[kept], return_index=True)[1]]


def adapter_sources(config: DecoderConfig, shards: int) -> Mapping[str, tuple[np.ndarray | None, np.ndarray | None]]:
    """Return the sources of the outputs and of the inputs of each linear layer of a block, None where none is added."""
    by_axis = {} if shards == 1 else _axis_sources(config, shards)
    found: dict[str | None, np.ndarray | None] = {
        axis: None if _is_identity(source) else source for axis, source in by_axis.items()
    }
    return {
        name: (found.get(out_axis), found.get(in_axis)) for name, (out_axis, in_axis) in kernel_axes(config).items()
    }


def pad_adapters(adapters: Params, config: DecoderConfig, shards: int) -> Params:
    """Return a decoder's adapters, padded like the decoder for ``shards`` devices."""
    if shards == 1:
        return adapters
    by_axis, axes = _axis_sources(config, shards), kernel_axes(config)

    def padded(path: Any, leaf: Any) -> Array:
        *module, _, part = (key.key for key in path)
        out_axis, in_axis = axes[".".join(module)]
        sources = (None, None, by_axis.get(in_axis)) if part == "down" else (None, by_axis.get(out_axis or ""), None)
        return pad_parameter(jnp.asarray(leaf), sources)

    return jax.tree_util.tree_map_with_path(padded, adapters)


def _axis_sources(config: DecoderConfig, shards: int) -> Mapping[str, np.ndarray]:
    padded, heads = pad_config(config, shards), _split_heads(config, shards)
    kv_head_K, copy_K = np.divmod(np.arange(padded.num_kv_heads), heads.copies)
    is_kept_K = kv_head_K < config.num_kv_heads
    group_KG = copy_K[:, None] * heads.queries + np.arange(heads.queries)
    is_kept_KG = is_kept_K[:, None] & (group_KG < config.query_heads_per_kv_head)
    query_KG = kv_head_K[:, None] * config.query_heads_per_kv_head + group_KG
    of_experts = {}
    if config.experts is not None and padded.experts is not None:
        of_experts = {
            "expert_ffn": _filled(config.experts.ffn_dim, padded.experts.ffn_dim),
            "shared_ffn": _filled(config.experts.shared_dim, padded.experts.shared_dim),
        }
    query_heads = np.where(is_kept_KG, query_KG, -1).reshape(-1)
    return {
        **of_experts,
        **_latent_sources(config, query_heads),
        "heads": _lanes(query_heads, config.head_dim),
        "query_heads": query_heads,
        "kv_heads": _lanes(np.where(is_kept_K, kv_head_K, -1), config.head_dim),
        "ffn": _filled(config.ffn_dim, padded.ffn_dim),
        "vocab": _filled(config.vocab_size, padded.vocab_size),
    }


def _latent_sources(config: DecoderConfig, heads: np.ndarray) -> Mapping[str, np.ndarray]:
    """Return the sources of the axes that latent attention has for each query head."""
    (rope,) = {kind.rope for kind in config.kinds} if config.latent is not None else (None,)
    if config.latent is None or rope is None:
        return {}
    widths = {"content_heads": config.latent.content_dim, "rotary_heads": rope.dim}
    widths["value_heads"] = config.latent.value_dim
    return {"latent_heads": heads, **{axis: _lanes(heads, width) for axis, width in widths.items()}}


def _pad_experts(experts: Experts, shards: int) -> Experts:
    widths = (_multiple(width, shards) for width in (experts.ffn_dim, experts.shared_dim))
    return replace(experts, **dict(zip(("ffn_dim", "shared_dim"), widths)))


def _padded_slopes(slopes: tuple[float, ...], num_heads: int) -> tuple[float, ...]:
    """Return the slopes of as many heads, each of which has its own keys."""
    return (*slopes, *(0.0,) * (num_heads - len(slopes)))


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
