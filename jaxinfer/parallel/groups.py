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
    """Return the partitioner of each group of this process's devices; the one given, if there is but one group.

    Raises InvalidOption if no group is whole in this process.
    """
    mesh = partitioner.mesh
    if mesh is None:
        return (partitioner,)
    own = [group for group in data_groups(mesh) if not group.is_multi_process]
    if not own:
        raise InvalidOption(
            "an engine's groups of devices are each of one process, and here none is: let data split the mesh over "
            "the processes, or load the model on this process's devices"
        )
    return (partitioner,) if own[0] is mesh else tuple(map(Partitioner, own))


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
