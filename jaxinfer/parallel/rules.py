"""How parameters, caches and batches are split over a mesh."""

from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.interface import Cache
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import logical_axes
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.logical_axes import mesh_spec, split_rows
from jaxinfer.parallel.mesh import SEQUENCE

# [L, B, S, K*H] without its rows: a device holds the lanes of its heads, in its layers and rows, and its slots of a
# dense cache. A ring cache is not split by slots: it is small (one window), and a step's new tokens would spread over
# all devices.
CACHE_AXES = PartitionSpec("layers", "slots", "kv_heads")
WINDOW_AXES = PartitionSpec("layers", None, "kv_heads")


def parameter_shardings(config: DecoderConfig, backend: Backend, mesh: Mesh | AbstractMesh) -> Params:
    """Return how every parameter is split over a mesh, as a tree of ``NamedSharding``."""

    def sharding(names: PartitionSpec) -> NamedSharding:
        # Blocks that do not run in stages are on every device of the pipeline axis.
        split = (None if axis == "layers" and backend.stages == 1 else axis for axis in names)
        return NamedSharding(mesh, mesh_spec(PartitionSpec(*split)))

    return jax.tree.map(sharding, logical_axes(config, backend), is_leaf=_is_spec)


def batch_shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Return how the arrays of a batch are split: a state, a strategy's memory, or results.

    Keys and values are buffers ``[L, B, S, K*H]`` of a `Cache`. Every other array has the batch's rows as its first
    axis, or one value for all rows.
    """

    def of_array(leaf: Any) -> NamedSharding:
        rows = split_rows(leaf.shape[0], mesh) if leaf.ndim else None
        return NamedSharding(mesh, PartitionSpec() if rows is None else PartitionSpec(rows))

    def of_cache(cache: Cache, leaf: Any) -> NamedSharding:
        if leaf.ndim != len(CACHE_AXES) + 1:
            return of_array(leaf)
        is_split = isinstance(cache, DenseCache) and leaf.shape[2] % mesh.shape[SEQUENCE] == 0
        layers, slots, heads = mesh_spec(CACHE_AXES if is_split else WINDOW_AXES)
        rows = split_rows(leaf.shape[1], mesh)
        return NamedSharding(mesh, PartitionSpec(_if_even(leaf.shape[0], layers, mesh), rows, slots, heads))

    def of_node(node: Any) -> Any:
        return jax.tree.map(partial(of_cache, node), node) if isinstance(node, Cache) else of_array(node)

    return jax.tree.map(of_node, tree, is_leaf=lambda node: isinstance(node, Cache))


def check_split(config: DecoderConfig, tensor: int) -> None:
    """Raise InvalidOption if a decoder does not split evenly over ``tensor`` devices."""
    sizes = {
        "attention heads": config.num_heads,
        "key/value heads": config.num_kv_heads,
        "feed-forward features": config.ffn_dim,
        "vocabulary entries": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % tensor:
            raise InvalidOption(f"{size} {name} do not split over tensor={tensor} devices: choose a divisor of {size}")


def _if_even(size: int, axis: Any, mesh: Mesh | AbstractMesh) -> str | None:
    return axis if axis is not None and size % mesh.shape[axis] == 0 else None


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
