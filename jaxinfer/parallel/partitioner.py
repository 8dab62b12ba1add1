"""Runs a decoder on a mesh, or on one device where there is no mesh: how models, batches and programs are split."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.load import Progress, load_params
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.padding import pad_config, pad_parameter, parameter_sources
from jaxinfer.models.stacking import stack_params
from jaxinfer.models.stages import check_stages, num_stages
from jaxinfer.notation import DATA, MESH_AXES, PIPELINE, SEQUENCE, TENSOR, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.mesh import BY_COMPILER, MeshConfig, parse_mesh
from jaxinfer.parallel.rules import batch_shardings, parameter_shardings


class Partitioned(NamedTuple):
    """A decoder as it runs on a mesh: padded to split evenly, and a backend that knows into how many parts."""

    config: DecoderConfig
    backend: Backend


def partition(config: DecoderConfig, backend: Backend, mesh: Mesh | AbstractMesh | None) -> Partitioned:
    """Return how a decoder runs on a mesh, of devices that are here or not, or on one device.

    Layers that do not divide over the axis ``pipeline`` are on all its devices: a draft model's may, a model's own are
    to be checked (`jaxinfer.models.stages.check_stages`).
    """
    if mesh is None:
        return Partitioned(config, replace(backend, kv_shards=1, mesh=None))
    tensor, stages = mesh.shape[TENSOR], num_stages(config, mesh.shape[PIPELINE])
    backend = replace(
        backend,
        kv_shards=tensor,
        mesh=mesh,
        stages=stages,
        # Every stage has a part of a stack of blocks.
        scan_layers=backend.scan_layers or stages > 1,
        # The compiler splits its own products only.
        kernel_rows=0,
    )
    return Partitioned(pad_config(config, tensor), backend)


@dataclass(frozen=True)
class Partitioner:
    """Places models and batches on a mesh and has programs keep them there; without a mesh all stays as it is."""

    mesh: Mesh | None = None

    @property
    def tensor(self) -> int:
        """Over how many devices heads, features and the vocabulary are split."""
        return 1 if self.mesh is None else self.mesh.shape[TENSOR]

    @property
    def data(self) -> int:
        """Over how many devices a batch is split."""
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    @property
    def pipeline(self) -> int:
        """Over how many devices the layers are split."""
        return 1 if self.mesh is None else self.mesh.shape[PIPELINE]

    @property
    def num_devices(self) -> int:
        """How many devices there are in all."""
        return 1 if self.mesh is None else self.mesh.size

    def num_rows(self, at_least: int) -> int:
        """Return how many rows a batch has that holds so many and splits evenly."""
        return -(-at_least // self.data) * self.data

    def partition(self, config: DecoderConfig, backend: Backend) -> Partitioned:
        """Return how a decoder runs here."""
        return partition(config, backend, self.mesh)

    def check(self, config: DecoderConfig) -> None:
        """Raise InvalidOption where a decoder's layers do not split over the mesh."""
        check_stages(config, self.pipeline)

    def padding(self, config: DecoderConfig, backend: Backend) -> Params:
        """Return what the elements of the partitioned decoder's parameters are; see `jaxinfer.models.padding`."""
        return parameter_sources(config, self.partition(config, backend).backend, self.tensor)

    def load_params(
        self,
        checkpoint: Checkpoint,
        names: TensorNames,
        config: DecoderConfig,
        backend: Backend,
        progress: Progress | None = None,
    ) -> Params:
        """Read the parameters of the partitioned decoder, every device its own; see `jaxinfer.checkpoint.load`."""
        part = self.partition(config, backend)
        abstract = abstract_params(*part)
        if self.mesh is None:
            return load_params(checkpoint, names, abstract, progress)
        placed = jax.tree.map(_placed, abstract, parameter_shardings(*part, self.mesh))
        return load_params(checkpoint, names, placed, progress, self.padding(config, backend))

    def place_params(self, config: DecoderConfig, backend: Backend, params: Params) -> Params:
        """Split the parameters of a decoder, or of the partitioned one, over the mesh."""
        if self.mesh is None:
            return params
        part = self.partition(config, backend)
        stacked = stack_params(params, abstract_params(*part))
        padded = jax.tree.map(pad_parameter, stacked, self.padding(config, backend))
        return jax.tree.map(_put, padded, parameter_shardings(*part, self.mesh))

    def place(self, tree: Any) -> Any:
        """Put arrays on every device."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: _put(leaf, everywhere), tree)

    def place_heads(self, tree: Any) -> Any:
        """Put heads on every device, but split what is called ``"output"`` by its rows where these split evenly."""
        mesh = self.mesh
        if mesh is None:
            return tree

        def placed(path: Any, leaf: Any) -> Any:
            # Were their blocks split too, the compiler would split the hidden states of all layers as it splits theirs.
            is_output = any(getattr(part, "key", None) == "output" for part in path)
            is_split = is_output and leaf.shape[0] % self.tensor == 0
            return _put(leaf, NamedSharding(mesh, PartitionSpec(TENSOR) if is_split else PartitionSpec()))

        return jax.tree_util.tree_map_with_path(placed, tree)

    def place_batch(self, tree: Any) -> Any:
        """Split what belongs to a batch; see `jaxinfer.parallel.rules.batch_shardings`."""
        return tree if self.mesh is None else jax.tree.map(_put, tree, batch_shardings(tree, self.mesh))

    def fetch(self, tree: Any) -> Any:
        """Return arrays as the host's own, whole in every process; all processes must ask at the same point."""
        if self.mesh is None or not self.mesh.is_multi_process:
            return jax.device_get(tree)
        return multihost_utils.process_allgather(tree, tiled=True)

    def create(self, make: Callable[[], Any]) -> Any:
        """Make what belongs to a batch where it is to be, so that no device ever holds all of it."""
        if self.mesh is None:
            return make()
        return jax.jit(make, out_shardings=batch_shardings(jax.eval_shape(make), self.mesh))()

    def kept_in_place(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose results are split as batches are, to be traced."""
        mesh = self.mesh
        if mesh is None:
            return function

        @wraps(function)
        def kept(*arguments: Any) -> Any:
            results = function(*arguments)
            return jax.lax.with_sharding_constraint(results, batch_shardings(results, mesh))

        return kept


ONE_DEVICE = Partitioner()


def partitioner_of(mesh: MeshConfig | Mesh | str | None) -> Partitioner:
    """Return the partitioner of all devices of this process's runtime, arranged as a mesh, or of a given mesh."""
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    if isinstance(mesh, MeshConfig):
        mesh = mesh.build(jax.devices())
    if mesh is not None and mesh.axis_names != MESH_AXES:
        raise InvalidOption(f"mesh: its axes are {', '.join(mesh.axis_names)}, not {', '.join(MESH_AXES)}")
    if mesh is not None:
        check_axes(mesh.shape[PIPELINE], mesh.shape[SEQUENCE])
        # `jax.make_mesh` gives axes that a program must name wherever it computes.
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=BY_COMPILER)
    return Partitioner(mesh)


def check_axes(pipeline: int, sequence: int) -> None:
    """Raise InvalidOption for axes that do not go together."""
    if pipeline > 1 and sequence > 1:
        raise InvalidOption(
            f"mesh: pipeline={pipeline} and sequence={sequence} do not go together: take one, with data and tensor"
        )


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and leaf.sharding == sharding):
        return jax.device_put(leaf, sharding)
    # Every process has the same values; JAX would have them compare these first.
    values = np.asarray(leaf)
    return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])


def _placed(struct: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
