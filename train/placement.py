"""Where arrays stand on a mesh: parameters by the rules of `jaxinfer.parallel`, batches over its data axis."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.mesh import DATA, MeshConfig
from jaxinfer.parallel.rules import check_split, parameter_shardings


def build_mesh(config: MeshConfig, decoder: DecoderConfig, rows: int) -> Mesh:
    """Arrange this process's first devices; refuse what a decoder or a batch of ``rows`` does not split over."""
    devices = jax.devices()
    if config.num_devices > len(devices):
        raise InvalidOption(f"mesh {config} is of {config.num_devices} devices, but there are {len(devices)}")
    if config.pipeline > 1 or config.sequence > 1:
        raise InvalidOption(f"mesh {config}: training splits over data and tensor alone")
    if rows % config.data:
        raise InvalidOption(f"a batch of {rows} rows does not split over data={config.data} devices")
    check_split(decoder, config.tensor)
    return config.build(devices[: config.num_devices])


def place_base(params: Params, config: DecoderConfig, backend: Backend, mesh: Mesh) -> Params:
    """Split a decoder's parameters over a mesh."""
    return jax.device_put(params, parameter_shardings(config, backend, mesh))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Put arrays whole on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Split a batch's rows, the axis after that of microbatches, over the data axis."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, DATA)))
