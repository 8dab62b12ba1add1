"""The order of hidden units: those that are active together lie in one block, so that fewer blocks are live.

A permutation of the rows of gate and up and of the columns of down changes no product, only the order of sums over
hidden units, and so rounding. It is chosen once, before a model is used: what runs later agrees in all bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.models.layers import BLOCKS, KERNEL, TRANSPOSED_KERNEL, locate
from jaxinfer.notation import Bool, Int, Params

UNITS = 128  # of a block that a TPU's kernel reads or leaves out


def order_units(active_TF: Bool[np.ndarray, "T F"], parts: int = 1) -> Int[np.ndarray, " F"]:
    """Return an order of hidden units for few live blocks of 128, by where in a text each unit is active.

    A block begins with the most active unit that is left. Then one unit after the other joins whose places have most
    in common with the block's (the largest Jaccard index). So units that are nearly always active share blocks, and
    units that are active together. With ``parts`` of a mesh's axis ``tensor``, which each hold as many units one after
    the other, parts take turns, so that each has as many live blocks as another.
    """
    active_TF = np.asarray(active_TF, bool)
    num_units = active_TF.shape[1]
    if parts < 1 or num_units % parts:
        raise InvalidOption(f"{num_units} hidden units do not split over {parts} devices: choose a divisor")
    active_FT = np.ascontiguousarray(active_TF.T)
    sizes_F, left_F = active_TF.sum(axis=0), np.ones(num_units, bool)
    order = np.empty(num_units, np.int64)
    for start, count in _places(num_units, parts):
        union_T, shared_F = np.zeros(len(active_TF), bool), np.zeros(num_units, np.int64)
        for place in range(start, start + count):
            # Nothing is shared with an empty block: then the most active one.
            scores_F = shared_F / np.maximum(union_T.sum() + sizes_F - shared_F, 1) if union_T.any() else sizes_F
            unit = int(np.argmax(np.where(left_F, scores_F, -1.0)))
            order[place], left_F[unit] = unit, False
            added_T = active_FT[unit] & ~union_T
            if added_T.any():
                shared_F += active_TF[added_T].sum(axis=0)
                union_T |= added_T
    return order


def live_share(active_TF: Bool[np.ndarray, "T F"], batch: int = 1, nodes: int = 1) -> float:
    """Return the mean share of blocks of 128 hidden units that are live in steps over a text.

    A step is of ``batch`` sequences, which begin at different places, with ``nodes`` neighbouring places each. Of a
    text that is shorter than a step, all is one step.
    """
    num_places, num_units = active_TF.shape
    padded = np.pad(np.asarray(active_TF, bool), ((0, 0), (0, -num_units % UNITS)))
    live_TX: Any = padded.reshape(num_places, -1, UNITS).any(axis=2)
    steps = num_places // batch // nodes
    if not steps:
        return float(live_TX.any(axis=0).mean())
    begins = np.arange(batch)[:, None, None] * (num_places // batch)
    places_BSM = begins + np.arange(steps * nodes).reshape(steps, nodes)
    return float(live_TX[places_BSM].any(axis=(0, 2)).mean())


def in_order(params: Params, orders: Sequence[Int[np.ndarray, " F"]]) -> Params:
    """Return parameters with the hidden units of each layer's dense feed-forward layer in the order of that layer."""
    return {**params, BLOCKS: _in_order(params[BLOCKS], (BLOCKS,), orders)}


def _in_order(node: Mapping[str, Any], path: tuple[str, ...], orders: Sequence[Any]) -> Params:
    changed: Params = {}
    for name, value in node.items():
        own = *path, name
        if isinstance(value, Mapping):
            changed[name] = _in_order(value, own, orders)
        else:
            axis = _axis_of_units(own)
            changed[name] = value if axis is None else _taken(value, own, axis, orders)
    return changed


def _axis_of_units(path: tuple[str, ...]) -> int | None:
    """Return the axis of a parameter that runs over hidden units, from its last; None if none does."""
    *_, module, layer, name = "", "", *path
    if (module, layer) == ("mlp", "inner_norm"):
        return -1
    if module != "mlp" or layer not in ("gate", "up", "down"):
        return None
    is_down, is_kernel = layer == "down", name in (KERNEL, TRANSPOSED_KERNEL)
    if not is_kernel:
        return None if is_down else -1
    return -1 if is_down == (name == KERNEL) else -2


def _taken(value: Any, path: tuple[str, ...], axis: int, orders: Sequence[Any]) -> Any:
    location = locate(path, value.shape)
    assert location.layers is not None
    own = np.stack([orders[layer] for layer in location.layers])
    if not location.stacked:
        return value.take(own[0], axis=axis)
    shape = [1] * value.ndim
    shape[0], shape[axis] = own.shape
    return np.take_along_axis(np.asarray(value), own.reshape(shape), axis=axis)


def _places(num_units: int, parts: int) -> list[tuple[int, int]]:
    """Return the first place and the number of places of each block, one of each part in turn."""
    own = num_units // parts
    return [(part * own + start, min(UNITS, own - start)) for start in range(0, own, UNITS) for part in range(parts)]
