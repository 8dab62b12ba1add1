"""What a process keeps on its host of an array that is split over several processes: its own devices' parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


@dataclass(frozen=True)
class HostParts:
    """The parts of an array of ``shape`` on this process's devices, in the devices' order; JAX sees a leaf in it."""

    shape: tuple[int, ...]
    sharding: Sharding
    devices: tuple[Any, ...]
    parts: tuple[np.ndarray, ...]

    def on_devices(self) -> jax.Array:
        """Return the array; every process that has parts of it must call this."""
        placed = [jax.device_put(part, device) for part, device in zip(self.parts, self.devices, strict=True)]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, placed)


def to_host(array: jax.Array) -> Any:
    """Return an array on the host: whole if every process can have all of it, else this process's `HostParts`."""
    if array.is_fully_replicated or array.is_fully_addressable:
        return jax.device_get(array)
    shards = array.addressable_shards
    devices, parts = tuple(shard.device for shard in shards), tuple(np.asarray(shard.data) for shard in shards)
    return HostParts(array.shape, array.sharding, devices, parts)


def along(axis: int, change: Callable[[np.ndarray], np.ndarray], array: Any) -> Any:
    """Return an array on the host with another length along an axis that is not split; ``change`` makes it."""
    if not isinstance(array, HostParts):
        return change(array)
    parts = tuple(map(change, array.parts))
    shape = *array.shape[:axis], parts[0].shape[axis], *array.shape[axis + 1 :]
    return HostParts(shape, array.sharding, array.devices, parts)
