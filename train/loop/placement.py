"""Places arrays on a mesh: parameters by the rules of `jaxinfer.parallel`, batches over its data axis."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.parallel.mesh import DATA, TENSOR, MeshConfig
from jaxinfer.parallel.rules import check_split, parameter_shardings
from train.loop.step import TrainState


def build_mesh(config: MeshConfig, decoder: DecoderConfig, rows: int) -> Mesh:
    """Arrange this process's first devices; raise an error if a decoder or a batch of ``rows`` does not split."""
    devices = jax.devices()
    if config.num_devices > len(devices):
        raise InvalidOption(f"mesh {config} is of {config.num_devices} devices, but there are {len(devices)}")
    if config.pipeline > 1 or config.sequence > 1:
        raise InvalidOption(f"mesh {config}: training supports only data and tensor")
    if rows % config.data:
        raise InvalidOption(f"a batch of {rows} rows does not split over data={config.data} devices")
    check_split(decoder, config.tensor)
    return config.build(devices[: config.num_devices])


def place_base(params: Params, config: DecoderConfig, backend: Backend, mesh: Mesh) -> Params:
    """Split a decoder's parameters over a mesh; weights in few bits are copied to every device."""
    if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        if mesh.shape[TENSOR] > 1:
            raise InvalidOption("a base in few bits is not split: train without tensor=")
        return replicate(params, mesh)
    return jax.device_put(params, parameter_shardings(config, backend, mesh))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Copy whole arrays to every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def place_learned(tree: Any, mesh: Mesh) -> Any:
    """Copy what is trained beside a model, and its moments, to every device; output matrices are split by rows."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jax.device_put(leaf, _sharding(path, leaf, mesh)), tree)


def _sharding(path: Any, leaf: Any, mesh: Mesh) -> NamedSharding:
    is_output = any(getattr(part, "key", None) == "output" for part in path)
    is_split = is_output and leaf.ndim > 0 and leaf.shape[0] % mesh.shape[TENSOR] == 0
    return NamedSharding(mesh, PartitionSpec(TENSOR) if is_split else PartitionSpec())


def describe_learned(tree: Any, mesh: Mesh) -> Any:
    """Return the result of `place_learned` as a tree of ``jax.ShapeDtypeStruct``; ``mesh`` may be absent devices."""

    def describe(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(path, leaf, mesh))

    return jax.tree_util.tree_map_with_path(describe, tree)


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Split a batch's rows, the axis after the microbatches, over the data axis."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, DATA)))


def start_state(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Start a run from parameters on a mesh; their moments get the same placement."""

    def place(leaf: Any) -> Any:
        return leaf if isinstance(leaf.sharding, NamedSharding) else replicate(leaf, mesh)

    return TrainState(replicate(jnp.int32(0), mesh), params, jax.tree.map(place, optimizer.init(params)))
