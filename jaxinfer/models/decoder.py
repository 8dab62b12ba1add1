"""The decoder: a network over a cache as pure functions, the cache an argument and a result.

The Linen module itself (`jaxinfer.models.network`) is imported when something is traced: where all programs are there
already, nobody waits for Linen.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import jax

from jaxinfer.cache.dense import create_dense_cache
from jaxinfer.cache.interface import Cache, LayeredCache, Placement
from jaxinfer.cache.layouts import DENSE, CacheLayout, PagedLayout, StreamingLayout
from jaxinfer.cache.paged import create_paged_cache, even_table
from jaxinfer.cache.ring import create_ring_cache, ring_capacity
from jaxinfer.cache.streaming import create_streaming_cache
from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.layer_range import run_layers
from jaxinfer.models.pipeline import run_stages
from jaxinfer.models.step import build_step
from jaxinfer.models.streaming import streams
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.columns import ColumnArray
from jaxinfer.ops.few_bits.quantized_array import is_quantized
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
    """Run `Network.__call__` as a pure function, its blocks by the stages that have them."""
    config, backend = decoder.config, decoder.backend
    if backend.stages > 1:
        step = build_step(config, backend, positions_BT, placements, context_lengths_B, adapters_B)
        hidden_BTD = decoder.apply({"params": params}, tokens_BT, positions_BT, method="embedded")
        carry = cast(jax.Array, hidden_BTD), cache
        hidden_BTD, cache = run_stages(config, backend, params["blocks"], carry, 0, config.num_layers, step)
        return cast(jax.Array, decoder.apply({"params": params}, hidden_BTD, method="normed")), cache
    if backend.scan_layers and (config.experts or any(map(_is_by_columns, _quantized(params["blocks"])))):
        # Linen's scan would slice stacks that kernels, or loops over experts, read in place.
        step = build_step(config, backend, positions_BT, placements, context_lengths_B, adapters_B)
        hidden_BTD = cast(jax.Array, decoder.apply({"params": params}, tokens_BT, positions_BT, method="embedded"))
        carry = enter_region(hidden_BTD, placements[0].seen, backend), cache
        hidden_BTD, cache = run_layers(config, backend, params["blocks"], carry, 0, config.num_layers, step)
        return cast(jax.Array, decoder.apply({"params": params}, hidden_BTD, method="normed")), cache
    inputs = (tokens_BT, positions_BT, cache, placements, context_lengths_B, adapters_B)
    return cast(tuple[jax.Array, LayeredCache], decoder.apply({"params": params}, *inputs))


def _is_by_columns(leaf: Any) -> bool:
    return isinstance(leaf, ColumnArray)


def _quantized(params: Params) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=is_quantized)


def output_logits(decoder: Decoder, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Run `Network.logits` as a pure function."""
    return cast(jax.Array, decoder.apply({"params": params}, hidden, method="logits"))


def init_params(config: DecoderConfig, backend: Backend, key: jax.Array) -> Params:
    """Draw random parameters; under ``jax.eval_shape`` this describes the real ones."""
    import flax.linen as nn

    from jaxinfer.models.network import init_boxed

    cache = create_cache(config, 1, 1, backend)
    return cast(Params, nn.unbox(init_boxed(config, backend, key, cache)))


def abstract_params(config: DecoderConfig, backend: Backend) -> Params:
    """Describe the parameters as a tree of ``jax.ShapeDtypeStruct``, allocating nothing."""
    shallow = _shallow(config, backend)
    return _deepened(jax.eval_shape(lambda key: init_params(shallow, backend, key), jax.random.key(0)), config, shallow)


def logical_axes(config: DecoderConfig, backend: Backend) -> Params:
    """Return the logical axis names of every parameter, as a tree of ``PartitionSpec``."""
    import flax.linen as nn

    from jaxinfer.models.network import init_boxed

    shallow = _shallow(config, backend)

    def boxed(key: jax.Array) -> Params:
        return init_boxed(shallow, backend, key, create_cache(shallow, 1, 1, backend))

    return _deepened(cast(Params, nn.get_partition_spec(jax.eval_shape(boxed, jax.random.key(0)))), config, shallow)


def _shallow(config: DecoderConfig, backend: Backend) -> DecoderConfig:
    """Return a decoder whose parameters tell those of all layers: separate blocks are alike, and tracing takes time."""
    if backend.scan_layers:
        return config
    found = tuple(sorted(set(config.sparse_layers)))
    experts = config.experts and replace(config.experts, layer_pattern=found)
    return replace(config, num_layers=len(found), experts=experts)


def _deepened(params: Params, config: DecoderConfig, shallow: DecoderConfig) -> Params:
    if shallow is config:
        return params
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
) -> LayeredCache:
    """Return an empty cache for sequences of up to ``num_slots`` tokens.

    Layers with a window get a ring if it is smaller than a dense cache, and pages if all do. ``headroom`` is how many
    tokens past the current one a decoding step may write. The ``layout`` must suit the model (`check_layout`).
    """
    lanes = backend.cache_lanes(config.num_kv_heads, config.head_dim)

    def part(kind: LayerKind) -> Cache:
        count = config.layers.count(kind)
        if isinstance(layout, StreamingLayout) and streams(kind, layout):
            return create_streaming_cache(count, batch, layout, headroom, lanes, backend)
        if isinstance(layout, PagedLayout):
            table_BX = even_table(batch, -(-num_slots // layout.page))
            return create_paged_cache(count, 1 + table_BX.size, layout.page, table_BX, lanes, backend, kind.window)
        if kind.window is not None and ring_capacity(kind.window, headroom) < num_slots:
            return create_ring_cache(count, batch, kind.window, headroom, lanes, backend)
        window = kind.window if kind.window is not None and kind.window < num_slots else None
        return create_dense_cache(count, batch, num_slots, lanes, backend, window)

    return LayeredCache(tuple(part(kind) for kind in config.kinds))
