"""The decoder: a network over a cache as pure functions, the cache an argument and a result.

The Linen module itself (`jaxinfer.models.network`) is imported when something is traced: where all programs are there
already, nobody waits for Linen.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxinfer.cache.cropped import CroppedCache, create_cropped_cache
from jaxinfer.cache.dense import create_dense_cache
from jaxinfer.cache.features import FeatureCache
from jaxinfer.cache.interface import Cache, LayeredCache, Placement
from jaxinfer.cache.layouts import DENSE, CacheLayout, CropLayout, PagedLayout, RetrievalLayout, StreamingLayout
from jaxinfer.cache.paged import create_paged_cache, even_table
from jaxinfer.cache.retrieving import create_retrieving_cache
from jaxinfer.cache.ring import create_ring_cache, ring_capacity
from jaxinfer.cache.streaming import create_streaming_cache
from jaxinfer.models.cache_rows import cache_lanes, cached_width
from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.layer_range import run_layers
from jaxinfer.models.pipeline import run_stages
from jaxinfer.models.step import build_step
from jaxinfer.models.streaming import streams
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.columns import ColumnArray
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.ops.masks import Chunk, Window
from jaxinfer.ops.split_tokens import enter_region


@dataclass(frozen=True)
class Decoder:
    """A decoder-only language model over a cache: what the net is, and how it runs."""

    config: DecoderConfig
    backend: Backend

    def apply(self, variables: Any, *inputs: Any, method: str = "__call__") -> Any:
        """Run a method of `jaxinfer.models.network.Network` with parameters, ``{"params": ...}``."""
        from jaxinfer.models.network import Network

        return Network(self.config, self.backend).apply(variables, *inputs, method=method)


def forward(
    decoder: Decoder,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    cache: LayeredCache,
    placements: tuple[Placement, ...],
    context_lengths_B: Int[Array, " B"],
    adapters_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T D"], LayeredCache]:
    """Run `Network.__call__` as a pure function, its blocks by the stages that have them.

    Where the cache has features, it comes back with those of the new tokens.
    """
    begin_B = block_begin(cache)
    if begin_B is not None:
        positions_BT = positions_BT - begin_B[:, None]
    inputs = (tokens_BT, positions_BT, cache, placements, context_lengths_B, adapters_B)
    if cache.features is not None or _runs_by_ranges(decoder, params, adapters_B is not None):
        return _forward_by_ranges(decoder, params, *inputs)
    return cast(tuple[jax.Array, LayeredCache], decoder.apply({"params": params}, *inputs))


def block_begin(cache: LayeredCache) -> Int[Array, " B"] | None:
    """Return where the blocks of a cropped cache begin in their texts, None for another cache."""
    first = cache.parts[0]
    return first.begin_B if isinstance(first, CroppedCache) else None


def _runs_by_ranges(decoder: Decoder, params: Params, is_adapted: bool) -> bool:
    """Tell whether layers are split over stages, or have stacks that kernels, or loops over experts, read in place.

    Linen's scan would slice these.
    """
    config, backend = decoder.config, decoder.backend
    is_in_place = config.experts or backend.reads_live_blocks or (is_adapted and backend.kernels != "xla")
    is_in_place = is_in_place or any(map(_is_by_columns, _quantized(params["blocks"])))
    return backend.stages > 1 or bool(backend.scan_layers and is_in_place)


def _forward_by_ranges(
    decoder: Decoder,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    cache: LayeredCache,
    placements: tuple[Placement, ...],
    context_lengths_B: Int[Array, " B"],
    adapters_B: Int[Array, " B"] | None,
) -> tuple[Float[Array, "B T D"], LayeredCache]:
    """Run blocks up to each layer whose input is a feature, and then the others."""
    config, backend, features = decoder.config, decoder.backend, cache.features
    own = placements[: len(config.kinds)]
    step = build_step(config, backend, positions_BT, own, context_lengths_B, adapters_B)
    inputs = tokens_BT, positions_BT, adapters_B
    hidden_BTD = cast(jax.Array, decoder.apply({"params": params}, *inputs, method="embedded"))
    if backend.stages == 1:
        # Were its rows split further at once, every device would need the whole embedding table.
        hidden_BTD = enter_region(hidden_BTD, own[0].seen, backend)
    run = run_layers if backend.stages == 1 else run_stages
    carry, start, found = (hidden_BTD, cache._replace(features=None)), 0, []
    for stop in (*(() if features is None else features.layers), config.num_layers):
        carry = run(config, backend, params["blocks"], carry, start, stop, step)
        found.append(carry[0])
        start = stop
    hidden_BTD, cache = carry
    if features is not None:
        cache = cache._replace(features=features.write(placements[-1], jnp.concatenate(found[:-1], axis=-1)))
    return cast(jax.Array, decoder.apply({"params": params}, hidden_BTD, adapters_B, method="normed")), cache


def _is_by_columns(leaf: Any) -> bool:
    return isinstance(leaf, ColumnArray)


def _quantized(params: Params) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=is_quantized)


def output_logits(
    decoder: Decoder, params: Params, hidden: Float[Array, "*rows D"], adapters_B: Int[Array, " B"] | None = None
) -> Float[Array, "*rows V"]:
    """Run `Network.logits` as a pure function."""
    return cast(jax.Array, decoder.apply({"params": params}, hidden, adapters_B, method="logits"))


def init_params(config: DecoderConfig, backend: Backend, key: jax.Array) -> Params:
    """Draw random parameters; under ``jax.eval_shape`` this describes the real ones."""
    import flax.linen as nn

    from jaxinfer.models.network import init_boxed

    cache = create_cache(config, 1, 1, backend)
    return cast(Params, nn.unbox(init_boxed(config, backend, key, cache)))


def abstract_params(config: DecoderConfig, backend: Backend) -> Params:
    """Describe the parameters as a tree of ``jax.ShapeDtypeStruct``, allocating nothing."""
    import flax.linen as nn

    return _deepened(cast(Params, nn.unbox(_described(_shallow(config, backend), backend))), config, backend)


def logical_axes(config: DecoderConfig, backend: Backend) -> Params:
    """Return the logical axis names of every parameter, as a tree of ``PartitionSpec``."""
    import flax.linen as nn

    specs = nn.get_partition_spec(_described(_shallow(config, backend), backend))
    return _deepened(cast(Params, specs), config, backend)


@lru_cache(maxsize=64)
def _described(config: DecoderConfig, backend: Backend) -> Params:
    """Trace how parameters are drawn, each in a box with its axes; this takes a tenth of a second."""
    from jaxinfer.models.network import init_boxed

    return jax.eval_shape(
        lambda key: init_boxed(config, backend, key, create_cache(config, 1, 1, backend)), jax.random.key(0)
    )


def _shallow(config: DecoderConfig, backend: Backend) -> DecoderConfig:
    """Return a decoder whose parameters tell those of all layers: separate blocks are alike, and tracing takes time."""
    if backend.scan_layers:
        return config
    found = tuple(sorted(set(config.sparse_layers)))
    experts = config.experts and replace(config.experts, layer_pattern=found)
    return replace(config, num_layers=len(found), experts=experts)


def _deepened(params: Params, config: DecoderConfig, backend: Backend) -> Params:
    """Return the parameters of all layers by those of a shallow decoder, in a tree of the caller's own."""
    if backend.scan_layers:
        return _copied(params)
    shallow = _shallow(config, backend)
    found = {is_sparse: params["blocks"][f"layer_{layer}"] for layer, is_sparse in enumerate(shallow.sparse_layers)}
    blocks = {f"layer_{layer}": _copied(found[is_sparse]) for layer, is_sparse in enumerate(config.sparse_layers)}
    return {**params, "blocks": blocks}


def _copied(node: Params) -> Params:
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in node.items()}


def create_cache(
    config: DecoderConfig,
    batch: int,
    num_slots: int,
    backend: Backend,
    headroom: int = 0,
    layout: CacheLayout = DENSE,
    features: tuple[int, ...] = (),
) -> LayeredCache:
    """Return an empty cache for sequences of up to ``num_slots`` tokens.

    Layers with a window get a ring if it is smaller than a dense cache, and pages if all do. ``headroom`` is how many
    tokens past the current one a decoding step may write. The ``layout`` must suit the model (`check_layout`).
    ``features`` are the layers whose inputs it keeps too (`jaxinfer.cache.features`), ascending.
    """
    lanes = cache_lanes(config, backend)
    has_values = config.latent is None

    def part(kind: LayerKind) -> Cache:
        count, window = config.layers.count(kind), cache_window(kind)
        if isinstance(layout, StreamingLayout) and streams(kind, layout):
            return create_streaming_cache(count, batch, layout, headroom, lanes, backend, has_values)
        if isinstance(layout, RetrievalLayout) and window is None:
            heads = config.num_kv_heads, cached_width(config, backend)
            return create_retrieving_cache(count, batch, num_slots, *heads, layout, headroom, backend, has_values)
        if isinstance(layout, PagedLayout):
            table_BX = even_table(batch, -(-num_slots // layout.page))
            pages = 1 + table_BX.size, layout.page, table_BX
            return create_paged_cache(count, *pages, lanes, backend, window, has_values)
        is_cropped = isinstance(layout, CropLayout)
        # A ring would hold tokens from before the block.
        if window is not None and ring_capacity(window, headroom) < num_slots and not is_cropped:
            return create_ring_cache(count, batch, window, headroom, lanes, backend)
        window = window if kind.window is not None and kind.window < num_slots else None
        dense = create_dense_cache(count, batch, num_slots, lanes, backend, window, has_values)
        return create_cropped_cache(dense) if is_cropped else dense

    kept = _create_features(config, batch, num_slots, backend, layout, features) if features else None
    return LayeredCache(tuple(part(kind) for kind in config.kinds), kept)


def cache_window(kind: LayerKind) -> Window | None:
    """Return how far back a query attends in layers of this kind, None if to all."""
    return Chunk(kind.window) if kind.chunked and kind.window is not None else kind.window


def _create_features(
    config: DecoderConfig,
    batch: int,
    num_slots: int,
    backend: Backend,
    layout: CacheLayout,
    layers: tuple[int, ...],
) -> FeatureCache:
    width, dtype = len(layers) * config.model_dim, jnp.dtype(backend.compute_dtype)
    if not isinstance(layout, PagedLayout):
        return FeatureCache(jnp.zeros((batch, num_slots, width), dtype), None, layers)
    table_BX = jnp.asarray(even_table(batch, -(-num_slots // layout.page)), jnp.int32)
    return FeatureCache(jnp.zeros((1, 1 + table_BX.size, layout.page, width), dtype), table_BX, layers)
