"""The groups of a mesh's axis ``data``: each has all of the model, and can run by itself."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxinfer.errors import InvalidOption
from jaxinfer.notation import DATA, MESH_AXES
from jaxinfer.parallel.partitioner import Partitioner


def data_groups(mesh: Mesh) -> tuple[Mesh, ...]:
    """Return a mesh for the devices of each group; the one given, if there is but one group."""
    if mesh.shape[DATA] == 1:
        return (mesh,)
    parts = (mesh.devices.take([place], MESH_AXES.index(DATA)) for place in range(mesh.shape[DATA]))
    return tuple(Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in parts)


def own_groups(partitioner: Partitioner) -> tuple[Partitioner, ...]:
    """Return the partitioner of each group that has devices of this process; the one given, if there is but one.

    Raises InvalidOption if there is none.
    """
    mesh = partitioner.mesh
    if mesh is None:
        return (partitioner,)
    own = [group for group in data_groups(mesh) if jax.process_index() in processes_of(group)]
    if not own:
        raise InvalidOption("no device of this process is in the model's mesh: an engine runs in those that have some")
    return (partitioner,) if own[0] is mesh else tuple(map(Partitioner, own))


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the numbers of the processes that a mesh's devices are of; the first of them leads."""
    return tuple(dict.fromkeys(device.process_index for device in mesh.devices.flat))


def is_led_here(partitioner: Partitioner) -> bool:
    """Whether this process leads a group of devices: it is the only one, or the first."""
    return partitioner.mesh is None or processes_of(partitioner.mesh)[0] == jax.process_index()


def held_by(partitioner: Partitioner, tree: Any) -> Any:
    """Return the arrays of a whole mesh as one of its groups has them; nothing is copied.

    Every group has all of them, split in the same way.
    """
    mesh = partitioner.mesh
    if mesh is None:
        return tree
    devices = set(mesh.devices.flat)

    def held(array: jax.Array) -> jax.Array:
        if array.sharding.device_set == devices:
            return array
        assert isinstance(array.sharding, NamedSharding)
        parts = [shard.data for shard in array.addressable_shards if shard.device in devices]
        sharding = NamedSharding(mesh, array.sharding.spec)
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

    return jax.tree.map(held, tree)
