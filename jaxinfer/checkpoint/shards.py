"""Makes arrays of which each device of this process has a part."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Box = tuple[slice, ...]


def make_sharded(
    shape: tuple[int, ...], sharding: Any, read: Callable[[Sequence[Box]], Sequence[np.ndarray]]
) -> jax.Array:
    """Return an array; ``read`` gives the values inside each of its boxes, of which no two are the same.

    Devices that hold the same box share its memory, if they can alias it.
    """
    boxes = _boxes(shape, sharding)
    distinct = distinct_boxes(shape, sharding)
    buffers = dict(zip(map(_corners, distinct), read(distinct), strict=True))
    shards = [jax.device_put(buffers[_corners(box)], device) for device, box in boxes.items()]
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, sharding, shards))


def distinct_boxes(shape: tuple[int, ...], sharding: Any) -> list[Box]:
    """Return the boxes of this process's devices, each once."""
    return list({_corners(box): box for box in _boxes(shape, sharding).values()}.values())


def _boxes(shape: tuple[int, ...], sharding: Any) -> dict[Any, Box]:
    return {
        device: tuple(slice(*place.indices(size)[:2]) for place, size in zip(places, shape, strict=True))
        for device, places in sharding.addressable_devices_indices_map(shape).items()
    }


def _corners(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple((place.start, place.stop) for place in box)
