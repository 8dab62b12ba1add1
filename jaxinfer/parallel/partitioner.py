"""Splits models, batches and programs over a mesh, or runs them on one device if there is no mesh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.load import Progress, load_params
from jaxinfer.checkpoint.matrix_readers import MatrixReader
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.few_bits import laid_out
from jaxinfer.models.layers import TRANSPOSED_KERNEL
from jaxinfer.models.padding import Sources, pad_config, pad_parameter, parameter_sources
from jaxinfer.models.stacking import stack_params
from jaxinfer.models.stages import check_stages, num_stages
from jaxinfer.notation import DATA, EXPERT, MESH_AXES, PIPELINE, SEQUENCE, TENSOR, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.columns import ColumnArray, maybe_by_columns
from jaxinfer.ops.few_bits.panels import without_panels
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.split import check_split, pad_quantized, part_shardings, transposed
from jaxinfer.ops.logical_axes import filled_rows
from jaxinfer.parallel.mesh import BY_COMPILER, MeshConfig, parse_mesh
from jaxinfer.parallel.rules import batch_shardings, parameter_shardings

# A mesh of JAX may leave out the axis of experts.
_WITHOUT_EXPERT = tuple(axis for axis in MESH_AXES if axis != EXPERT)


class Partitioned(NamedTuple):
    """A decoder padded to split evenly over a mesh, and a backend that knows the numbers of parts."""

    config: DecoderConfig
    backend: Backend


def partition(config: DecoderConfig, backend: Backend, mesh: Mesh | AbstractMesh | None) -> Partitioned:
    """Return a decoder as it runs on a mesh, attached or not, or on one device.

    If the layers do not divide over the axis ``pipeline``, every device of the axis holds all of them. That is right
    for draft models only: check the target with `jaxinfer.models.stages.check_stages`.
    """
    if mesh is None:
        return Partitioned(config, replace(backend, kv_shards=1, mesh=None))
    tensor, stages = mesh.shape[TENSOR], num_stages(config, mesh.shape[PIPELINE])
    check_experts(config, mesh.shape[EXPERT], is_target=False)
    backend = replace(
        backend,
        kv_shards=tensor,
        mesh=mesh,
        stages=stages,
        # Each stage holds a part of the stacked blocks.
        scan_layers=backend.scan_layers or stages > 1,
    )
    return Partitioned(pad_config(config, tensor), backend)


@dataclass(frozen=True)
class Partitioner:
    """Places models and batches on a mesh and keeps them there across programs; without a mesh it changes nothing."""

    mesh: Mesh | None = None

    @property
    def tensor(self) -> int:
        """The number of devices that split heads, features and the vocabulary."""
        return 1 if self.mesh is None else self.mesh.shape[TENSOR]

    @property
    def data(self) -> int:
        """The number of devices that split a batch."""
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    @property
    def pipeline(self) -> int:
        """The number of devices that split the layers."""
        return 1 if self.mesh is None else self.mesh.shape[PIPELINE]

    @property
    def num_devices(self) -> int:
        """The number of devices in all."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def is_multi_process(self) -> bool:
        """Whether its devices are those of several processes."""
        return self.mesh is not None and self.mesh.is_multi_process

    def num_rows(self, at_least: int) -> int:
        """Return how many rows a batch of ``at_least`` is filled up to: see `jaxinfer.ops.logical_axes.filled_rows`."""
        return at_least if self.mesh is None else filled_rows(at_least, self.mesh)

    def partition(self, config: DecoderConfig, backend: Backend) -> Partitioned:
        """Return a decoder as it runs on this mesh."""
        return partition(config, backend, self.mesh)

    def check(self, config: DecoderConfig) -> None:
        """Raise InvalidOption if a decoder's layers or experts do not split over the mesh."""
        check_stages(config, self.pipeline)
        check_experts(config, 1 if self.mesh is None else self.mesh.shape[EXPERT])

    def padding(self, config: DecoderConfig, backend: Backend) -> Params:
        """Return where each element of the padded parameters comes from; see `jaxinfer.models.padding`."""
        return parameter_sources(config, self.partition(config, backend).backend, self.tensor)

    def padding_on_mesh(self, config: DecoderConfig, backend: Backend) -> Params | None:
        """Return `padding`, for which a model is traced; None without a mesh, where nothing is padded."""
        return None if self.mesh is None else self.padding(config, backend)

    def load_params(
        self,
        checkpoint: Checkpoint,
        names: TensorNames,
        config: DecoderConfig,
        backend: Backend,
        progress: Progress | None = None,
        matrices: MatrixReader | None = None,
    ) -> Params:
        """Read the partitioned decoder's parameters, each device its own part; see `jaxinfer.checkpoint.load`."""
        part = self.partition(config, backend)
        abstract = abstract_params(*part)
        if self.mesh is None:
            return load_params(checkpoint, names, abstract, progress, matrices=matrices)
        placed = jax.tree.map(_placed, abstract, parameter_shardings(*part, self.mesh))
        return load_params(checkpoint, names, placed, progress, self.padding(config, backend), matrices)

    def place_params(self, config: DecoderConfig, backend: Backend, params: Params) -> Params:
        """Split a decoder's parameters, padded or not, over the mesh; lay kernels in few bits as the backend wants.

        They may be some of them: blocks without tables.
        """
        if self.mesh is None:
            return laid_out(params, replace(backend, mesh=None))
        part = self.partition(config, backend)
        params = without_panels(params)
        stacked = stack_params(params, {name: own for name, own in abstract_params(*part).items() if name in params})
        by_columns = backend.kernels != "xla"
        return _put_params(stacked, self.padding(config, backend), parameter_shardings(*part, self.mesh), by_columns)

    def place(self, tree: Any) -> Any:
        """Copy arrays to every device."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: _put(leaf, everywhere), tree)

    def place_heads(self, tree: Any) -> Any:
        """Copy heads to every device, but split arrays named ``"output"`` by rows if these divide evenly."""
        mesh = self.mesh
        if mesh is None:
            return tree

        def placed(path: Any, leaf: Any) -> Any:
            # If their blocks were split too, the compiler would split the hidden states of all layers in the same way.
            is_output = any(getattr(part, "key", None) == "output" for part in path)
            is_split = is_output and leaf.shape[0] % self.tensor == 0
            return _put(leaf, NamedSharding(mesh, PartitionSpec(TENSOR) if is_split else PartitionSpec()))

        return jax.tree_util.tree_map_with_path(placed, tree)

    def place_batch(self, tree: Any) -> Any:
        """Split the arrays of a batch; see `jaxinfer.parallel.rules.batch_shardings`."""
        return tree if self.mesh is None else jax.tree.map(_put, tree, batch_shardings(tree, self.mesh))

    def fetch(self, tree: Any) -> Any:
        """Return whole arrays on the host, in every process; all processes must call this at the same point."""
        if not self.is_multi_process:
            return jax.device_get(tree)
        return multihost_utils.process_allgather(tree, tiled=True)

    def create(self, make: Callable[[], Any]) -> Any:
        """Create the arrays of a batch in their placement, so that no device ever holds all of them."""
        if self.mesh is None:
            return make()
        return jax.jit(make, out_shardings=batch_shardings(jax.eval_shape(make), self.mesh))()

    def kept_in_place(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a traceable function whose results are split as batches are."""
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
    """Return the partitioner of a given mesh, or of all of this runtime's devices arranged as a mesh."""
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    if isinstance(mesh, MeshConfig):
        mesh = mesh.build(jax.devices())
    if mesh is not None and not isinstance(mesh, Mesh):
        raise InvalidOption(f"mesh {mesh!r} is neither a text, such as 'tensor=4', nor a MeshConfig or a Mesh")
    if mesh is not None and mesh.axis_names == _WITHOUT_EXPERT:
        mesh = Mesh(np.expand_dims(mesh.devices, MESH_AXES.index(EXPERT)), MESH_AXES)
    if mesh is not None and mesh.axis_names != MESH_AXES:
        raise InvalidOption(f"mesh: its axes are {', '.join(mesh.axis_names)}, not {', '.join(MESH_AXES)}")
    if mesh is not None:
        check_axes(mesh.shape[PIPELINE], mesh.shape[SEQUENCE])
        # `jax.make_mesh` returns axes that every operation of a program would have to name.
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=BY_COMPILER)
    return Partitioner(mesh)


def check_experts(config: DecoderConfig, devices: int, *, is_target: bool = True) -> None:
    """Raise InvalidOption if experts do not split evenly over devices, or if a target has none to split."""
    count = 0 if config.experts is None else config.experts.num_experts
    if count % devices:
        raise InvalidOption(f"mesh: {count} experts do not split over expert={devices} devices: choose a divisor")
    if is_target and devices > 1 and not count:
        raise InvalidOption(f"mesh: a model of family {config.family} has no experts: leave expert={devices} out")


def check_axes(pipeline: int, sequence: int) -> None:
    """Raise InvalidOption for axes that cannot be combined."""
    if pipeline > 1 and sequence > 1:
        raise InvalidOption(
            f"mesh: pipeline={pipeline} and sequence={sequence} do not go together: take one, with data and tensor"
        )


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable or (isinstance(leaf, jax.Array) and leaf.sharding == sharding):
        return jax.device_put(leaf, sharding)
    # Every process has the same values. JAX would first compare them between processes.
    values = np.asarray(leaf)
    return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])


def _put_params(
    params: Mapping[str, Any], padding: Mapping[str, Any], shardings: Mapping[str, Any], by_columns: bool
) -> Params:
    placed: Params = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            placed[key] = _put_params(value, padding[key], shardings[key], by_columns)
        elif isinstance(value, QuantizedArray):
            stored = key if key in padding else TRANSPOSED_KERNEL
            sources, sharding = padding[stored], shardings[stored]
            if stored != key:
                sources, sharding = sources[::-1], transposed(sharding)
            placed[key] = _put_quantized(f"weights {key!r}", value, sources, sharding, by_columns)
        else:
            placed[key] = _put(pad_parameter(value, padding[key]), shardings[key])
    return placed


def _put_quantized(
    name: str, array: QuantizedArray, sources: Sources, sharding: NamedSharding, by_columns: bool
) -> QuantizedArray:
    # Of one device's model, tables and kernels lie as products read them before they are padded.
    is_padded = all(source is None or size == len(source) for source, size in zip(sources, array.shape, strict=True))
    is_placed = isinstance(array, ColumnArray) and is_padded
    padded = array if is_placed else pad_quantized(array.by_rows(), sources, name)
    width = check_split(padded, sharding, name)
    padded = maybe_by_columns(padded, width) if by_columns else padded
    return jax.tree.map(_put, padded, part_shardings(padded, sharding))


def _placed(struct: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
