"""Stacks the parameters of separate blocks for scans."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.layers import KERNEL, TRANSPOSED_KERNEL, Location, locate
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.quantized_array import is_quantized


def stack_params(params: Params, abstract: Params) -> Params:
    """Return parameters in the arrangement of ``abstract``; those already in it are returned unchanged.

    Dtypes and padded sizes stay the same. A quantized kernel stays ``[out, in]``, under that name.
    """
    if jax.tree.structure(params, is_leaf=is_quantized) == jax.tree.structure(abstract):
        return params
    return arranged(params, abstract)


def arranged(params: Params, abstract: Params) -> Params:
    """Return the parameters that ``abstract`` has, which may be of fewer layers, in its arrangement."""
    wanted = {
        (layer, location.name)
        for path, struct in _paths(abstract)
        for location in [locate(path, struct.shape)]
        for layer in location.layers or (None,)
    }
    found: dict[tuple[int | None, str], tuple[Any, bool]] = {}
    for path, leaf in _paths(params):
        location = locate(path, leaf.shape)
        for index, layer in enumerate(location.layers or (None,)):
            if (layer, location.name) not in wanted:
                continue
            value = jax.tree.map(lambda part: part[index], leaf) if location.stacked else leaf  # noqa: B023
            found[layer, location.name] = value, location.transposed

    def value(location: Location, layer: int | None) -> Any:
        leaf, transposed = found[layer, location.name]
        return leaf if is_quantized(leaf) or transposed == location.transposed else leaf.T

    def gather(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> Params:
        made: Params = {}
        for key, struct in node.items():
            if isinstance(struct, Mapping):
                made[key] = gather(struct, (*path, key))
                continue
            location = locate((*path, key), struct.shape)
            values = [value(location, layer) for layer in location.layers or (None,)]
            name = KERNEL if key == TRANSPOSED_KERNEL and is_quantized(values[0]) else key
            made[name] = jax.tree.map(lambda *each: jnp.stack(each), *values) if location.stacked else values[0]
        return made

    return gather(abstract)


def _paths(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in node.items():
        found += _paths(value, (*path, key)) if isinstance(value, Mapping) else [((*path, key), value)]
    return found
