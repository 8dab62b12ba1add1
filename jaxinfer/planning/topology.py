"""TPUs that are not attached: their devices as the TPU compiler describes them."""

import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jax.experimental import topologies
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import Mesh

from jaxinfer.errors import InvalidOption
from jaxinfer.jax_setup import without_persistent_cache as without_persistent_cache
from jaxinfer.parallel.mesh import AXES, MeshConfig
from pallas_kernels.chips import CHIPS, Chip

# libtpu looks for the TPU of its machine and locks it; both must not happen here.
_LIBTPU_ENVIRONMENT = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # It does not affect a named topology, but libtpu warns without it.
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}

_SHAPE = re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3})+")
# libtpu ends the process for longer sides.
_LONGEST_FLAT_SIDE, _LONGEST_DEEP_SIDE = 16, 28
_FLAT_SHAPES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP_SHAPES = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")


def chip_of(topology: str) -> Chip:
    """Return the chip that a topology such as ``v5e:2x4`` is made of."""
    chip = CHIPS.get(topology.partition(":")[0])
    if chip is None:
        known = ", ".join(CHIPS)
        raise InvalidOption(f"unknown TPU topology {topology!r}: write a chip ({known}) and a shape, such as v5e:2x4")
    return chip


def num_devices(topology: str) -> int:
    """Return how many devices JAX sees in a topology; raise InvalidOption if its shape does not exist."""
    chip = chip_of(topology)
    shape = topology.partition(":")[2]
    flat = _is_flat(chip)
    longest = _LONGEST_FLAT_SIDE if flat else _LONGEST_DEEP_SIDE
    is_shape = _SHAPE.fullmatch(shape) and shape.count("x") == chip.single.count("x")
    if not is_shape or max(map(int, shape.split("x"))) > longest:
        such = "v5e:2x4" if flat else f"{chip.name}:2x2x1"
        raise InvalidOption(
            f"no TPU topology {topology!r}; write {'two' if flat else 'three'} sides of at most {longest}, as in {such}"
        )
    return chip.devices * math.prod(map(int, shape.split("x")))


def sides_of(topology: str) -> tuple[tuple[int, bool], ...]:
    """Return the length of each side of a slice in chips, and whether the chips along it are a ring."""
    chip = chip_of(topology)
    lengths = [int(side) for side in topology.partition(":")[2].split("x")]
    is_ring = [length % chip.ring_side == 0 for length in lengths]
    # Deep slices get their rings from optical switches, which only whole cubes have.
    if not _is_flat(chip):
        is_ring = [all(is_ring)] * len(lengths)
    return tuple(zip(lengths, is_ring))


def slices_of(chip: Chip) -> list[str]:
    """Return the topologies of a chip that can be rented, from 1 to 256 chips."""
    shapes = _FLAT_SHAPES if _is_flat(chip) else _DEEP_SHAPES
    return [f"{chip.name}:{shape}" for shape in shapes]


def tensor_mesh(topology: str, tensor: int) -> Mesh:
    """Return a mesh of all devices of a TPU topology along one axis of length ``tensor``."""
    return topology_mesh(topology, MeshConfig(tensor=tensor))


def topology_mesh(topology: str, mesh: MeshConfig) -> Mesh:
    """Return all devices of a TPU topology as a mesh of `AXES`; the axes that communicate most get neighbours."""
    described = describe_topology(topology)
    count = len(described.devices)
    if count != mesh.num_devices:
        raise InvalidOption(
            f"{topology} has {count} devices, but mesh {mesh} is of {mesh.num_devices}: "
            f"choose axes that multiply to {count}, or another topology"
        )
    # The topology often has fewer or shorter axes than the mesh.
    arranged = create_device_mesh(tuple(mesh.sizes.values()), described.devices, allow_split_physical_axes=True)
    return Mesh(arranged, AXES)


def describe_topology(topology: str) -> Any:
    """Return the devices of a TPU topology, as described by the TPU compiler, which must be installed."""
    chip = chip_of(topology)
    num_devices(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise InvalidOption('compiling for a TPU needs libtpu: pip install "jaxinfer[tpu]"')
    options: dict[str, Any] = {}
    if topology == f"{chip.name}:{chip.single}":
        options["chips_per_host_bounds"] = (1, 1, 1)
    if chip.cores > chip.devices:
        options["chip_config_name"] = "megacore"
    try:
        with _environment(_LIBTPU_ENVIRONMENT):
            return topologies.get_topology_desc(topology, platform="tpu", **options)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidOption(f"no TPU topology {topology!r}; write a shape such as v5e:2x4 ({reason})") from error


def _is_flat(chip: Chip) -> bool:
    return chip.single.count("x") == 1


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, if not set yet, for the duration of the context."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
