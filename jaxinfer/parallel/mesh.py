"""How devices are arranged: a mesh with an axis for each kind of parallelism."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxinfer.errors import InvalidOption
from jaxinfer.notation import DATA, EXPERT, MESH_AXES, PIPELINE, SEQUENCE, TENSOR

AXES = MESH_AXES

# The compiler decides how arrays are split, unless a rule says it. Newer JAX would expect each operation to say it.
_SIZE = re.compile(r"\d{1,6}")
BY_COMPILER = (AxisType.Auto,) * len(AXES)

__all__ = ["AXES", "DATA", "EXPERT", "PIPELINE", "SEQUENCE", "TENSOR", "MeshConfig", "parse_mesh"]


@dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each axis of the mesh.

    ``data`` splits the batch, ``pipeline`` the layers, ``sequence`` the tokens of a prompt and the slots of a cache,
    ``expert`` the experts of a mixture and the batch, ``tensor`` the heads, the features and the vocabulary.
    """

    data: int = 1
    pipeline: int = 1
    sequence: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidOption(f"mesh: {axis}={size!r} is not a whole number from 1")

    @property
    def sizes(self) -> dict[str, int]:
        """The length of each axis, in the order of `AXES`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_devices(self) -> int:
        """The product of the axes."""
        return math.prod(self.sizes.values())

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh without its devices."""
        return AbstractMesh(tuple(self.sizes.values()), AXES, axis_types=BY_COMPILER)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "tensor=1"

    def build(self, devices: Sequence[Any]) -> Mesh:
        """Arrange exactly these devices as a mesh with all `AXES`."""
        if len(devices) != self.num_devices:
            raise InvalidOption(
                f"mesh {self} is of {self.num_devices} devices, but there are {len(devices)}: "
                "choose axes that multiply to the number of devices, or give a CPU virtual ones by "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={self.num_devices} in the environment"
            )
        return Mesh(np.asarray(devices, dtype=object).reshape(tuple(self.sizes.values())), AXES, axis_types=BY_COMPILER)


def parse_mesh(text: str) -> MeshConfig:
    """Parse a mesh in command-line syntax: ``tensor=4,pipeline=2``."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or axis in sizes or not _SIZE.fullmatch(size):
            raise InvalidOption(
                f"mesh {text!r}: write axes such as tensor=4,pipeline=2; the axes are {', '.join(AXES)}"
            )
        sizes[axis] = int(size)
    return MeshConfig(**sizes)
