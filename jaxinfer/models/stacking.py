"""Stacks the parameters of separate blocks for scans."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.layers import Location, locate
from jaxinfer.notation import Params


def stack_params(params: Params, abstract: Params) -> Params:
    """Return parameters in the arrangement of ``abstract``; those already in it are returned unchanged.

    Dtypes and padded sizes stay the same.
    """
    if jax.tree.structure(params) == jax.tree.structure(abstract):
        return params
    found: dict[tuple[int | None, str], tuple[Any, bool]] = {}
    for path, leaf in _paths(params):
        location = locate(path, leaf.shape)
        for index, layer in enumerate(location.layers or (None,)):
            found[layer, location.name] = leaf[index] if location.stacked else leaf, location.transposed

    def value(location: Location, layer: int | None) -> Any:
        leaf, transposed = found[layer, location.name]
        return leaf if transposed == location.transposed else leaf.T

    def gather(path: Any, struct: Any) -> Any:
        location = locate(tuple(key.key for key in path), struct.shape)
        values = [value(location, layer) for layer in location.layers or (None,)]
        return jnp.stack(values) if location.stacked else values[0]

    return jax.tree_util.tree_map_with_path(gather, abstract)


def _paths(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in node.items():
        found += _paths(value, (*path, key)) if isinstance(value, Mapping) else [((*path, key), value)]
    return found
