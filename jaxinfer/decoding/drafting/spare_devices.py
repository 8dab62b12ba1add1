"""The devices that a target leaves to its draft model."""

import jax

from jaxinfer.decoding.strategy import Target
from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import MeshConfig
from jaxinfer.parallel.partitioner import Partitioner


def spare_devices(target: Target, count: int) -> Partitioner:
    """Return what places a draft model on ``count`` devices, split over heads; raise InvalidOption if there are less.

    They are those of this process which hold nothing of the target's, the first ones.
    """
    if target.partitioner.is_multi_process:
        raise InvalidOption("draft_model: devices= is for the devices of one process: leave it out")
    leaves = [leaf for leaf in jax.tree.leaves(target.params) if isinstance(leaf, jax.Array)]
    taken = {device for leaf in leaves for device in leaf.devices()}
    spare = [device for device in jax.local_devices() if device not in taken]
    if len(spare) < count:
        raise InvalidOption(
            f"draft_model: devices={count}, but the target leaves {len(spare)} of {len(jax.local_devices())}: build "
            "its mesh of fewer, as in MeshConfig(tensor=4).build(jax.devices()[:4]), or leave devices= out"
        )
    return Partitioner(MeshConfig(tensor=count).build(spare[:count]))
