"""The adapters that a model has loaded: their names, and the model's parameters with the stacks of all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.checkpoint.adapters.merged import merged
from jaxinfer.checkpoint.adapters.peft_folder import Adapter, open_adapter
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption, shown
from jaxinfer.models.adapters import ADAPTED, LOADED, kernel_shapes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.layers import BLOCKS, KERNEL, TRANSPOSED_KERNEL, locate
from jaxinfer.models.padding import adapter_sources
from jaxinfer.notation import PIPELINE, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.logical_axes import SPLIT_BY
from jaxinfer.parallel.partitioner import Partitioner

_LEAST_RANK = 8
_LONGEST_NAME = 200


class _OfKernel(NamedTuple):
    """What an adapter adds to one kernel, in its order of outputs; see `jaxinfer.models.adapters`."""

    down_RI: np.ndarray
    up_RO: np.ndarray
    gain_O: np.ndarray | None


@dataclass(frozen=True)
class _Loaded:
    """An adapter that has a number, and its part in each kernel by layer and name."""

    adapter: Adapter
    number: int
    kernels: Mapping[tuple[int, str], _OfKernel]


class ModelAdapters:
    """Loads and unloads the adapters of one model.

    ``params`` are the model's, with all adapters; an array of them is never changed, so that what runs goes on with
    those that it has. Their shapes know few sizes: numbers of adapters are powers of two, and so are ranks from 8 on.
    """

    def __init__(
        self,
        config: DecoderConfig,
        backend: Backend,
        params: Params,
        partitioner: Partitioner,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.params = params
        self._config, self._backend, self._base = config, backend, params
        self._partitioner, self._checkpoint = partitioner, checkpoint
        self._loaded: dict[str, _Loaded] = {}

    def beside(self, params: Params) -> Params:
        """Return parameters, the model's or others in their place, with those of all adapters.

        The model's own come as one object until an adapter is loaded or unloaded.
        """
        if params is self._base:
            return self.params
        return {**params, LOADED: self.params[LOADED]} if LOADED in self.params else params

    @property
    def origins(self) -> dict[str, str]:
        """Where each adapter came from, by its name."""
        return {name: loaded.adapter.origin for name, loaded in self._loaded.items()}

    def fingerprint(self, name: object) -> str:
        """Return letters that stand for an adapter's numbers."""
        return self._find(name).adapter.fingerprint

    def load(self, name: str, folder: str | Path) -> None:
        """Read a PEFT folder as the adapter of a name."""
        check_name(name)
        if name in self._loaded:
            raise InvalidOption(f"adapter {name!r} is loaded already: unload it first, or choose another name")
        adapter = open_adapter(folder, self._names, self._config.num_layers, kernel_shapes(self._config))
        taken = {loaded.number for loaded in self._loaded.values()}
        number = next(number for number in range(1, len(taken) + 2) if number not in taken)
        before = dict(self._loaded)
        self._loaded[name] = _Loaded(adapter, number, self._by_kernel(adapter))
        try:
            self.params = self._stacked()
        except BaseException:
            self._loaded = before
            raise

    def unload(self, name: object) -> None:
        """Forget an adapter."""
        self._find(name)
        left = {other: loaded for other, loaded in self._loaded.items() if other != name}
        self._loaded = left
        self.params = self._stacked()

    def merged(self, name: object) -> tuple[Params, Checkpoint | None]:
        """Return the parameters with an adapter added to them, and their checkpoint if the model's are of one."""
        tensors, stored = self._tensors(self._base), self._checkpoint
        source = replace(stored or Checkpoint("the model", {}, tensors), tensors=tensors)
        sum_of_both = merged(source, self._find(name).adapter)
        params = self._partitioner.load_params(sum_of_both, self._names, self._config, self._backend)
        if stored is None:
            return params, None
        return params, replace(stored, tensors=self._tensors(params), rounded_from=None)

    def numbers(self, adapter: object, count: int) -> list[int]:
        """Return the number of each prompt's adapter, given a name for all or a list of one for each; None is 0."""
        if adapter is None or isinstance(adapter, str):
            return [0 if adapter is None else self._find(adapter).number] * count
        if not isinstance(adapter, Sequence):
            raise InvalidOption(f"adapter {shown(adapter)} is neither a name nor a list of names")
        if len(adapter) != count:
            raise InvalidOption(f"{len(adapter)} adapters for {count} prompts: give one, or one for each prompt")
        return [0 if name is None else self._find(name).number for name in adapter]

    def _find(self, name: object) -> _Loaded:
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self._loaded) or "none"
            raise InvalidOption(f"no adapter {shown(name)} is loaded; loaded are: {known}")
        return found

    @cached_property
    def _names(self) -> TensorNames:
        """The names of the checkpoint's tensors, or of its family's."""
        stored = {"model_type": self._config.family} if self._checkpoint is None else self._checkpoint.config
        return family_of(stored).tensor_names(self._config)

    def _tensors(self, params: Params) -> LoadedTensors:
        """Return parameters as the base model's tensors."""
        partitioner = self._partitioner
        padding = None if partitioner.mesh is None else partitioner.padding(self._config, self._backend)
        return LoadedTensors(params, self._names, padding)

    def _by_kernel(self, adapter: Adapter) -> dict[tuple[int, str], _OfKernel]:
        """Cut an adapter's matrices as the base model's tensors are cut into kernels."""
        has_magnitudes = any(low.magnitude_O is not None for low in adapter.matrices.values())
        tensors = self._tensors(self._base) if has_magnitudes else None
        shapes = kernel_shapes(self._config)
        kernels: dict[tuple[int, str], _OfKernel] = {}
        for tensor, low in adapter.matrices.items():
            gain_O = None
            if low.magnitude_O is not None and tensors is not None:
                kernel = tensors.read(tensor, np.dtype(np.float32))
                gain_O = low.gain(kernel.T if adapter.places[tensor][0].part.transposed else kernel)
            for place in adapter.places[tensor]:
                rows = place.part.rows(shapes[place.name][0])
                gain = None if gain_O is None else gain_O[rows]
                up_OR = low.up_OR[rows] if gain is None else low.up_OR[rows] * gain[:, None]
                kernels[place.layer, place.name] = _OfKernel(low.down_RI, up_OR.T, gain)
        return kernels

    def _stacked(self) -> Params:
        """Return the parameters with the adapters that are loaded now."""
        loaded = list(self._loaded.values())
        if not loaded:
            return self._base
        sizes = _power_of_two(max(each.number for each in loaded)), self._rank(loaded)
        return {**self._base, LOADED: self._beside(self._base[BLOCKS], (BLOCKS,), loaded, sizes)}

    @staticmethod
    def _rank(loaded: Sequence[_Loaded]) -> int:
        ranks = (kernel.down_RI.shape[0] for each in loaded for kernel in each.kernels.values())
        return _power_of_two(max(_LEAST_RANK, *ranks))

    def _beside(
        self, node: Mapping[str, Any], path: tuple[str, ...], loaded: Sequence[_Loaded], sizes: tuple[int, int]
    ) -> Params:
        """Return the stacks for all linear layers below a node of the blocks' parameters."""
        kernel = next((node[name] for name in (KERNEL, TRANSPOSED_KERNEL) if name in node), None)
        if kernel is not None:
            layers, stacked, name, _ = locate((*path, KERNEL), kernel.shape)
            assert layers is not None
            return self._stacks(layers, stacked, name.removesuffix(f".{KERNEL}"), loaded, sizes)
        below = {
            name: self._beside(value, (*path, name), loaded, sizes)
            for name, value in node.items()
            if isinstance(value, Mapping)
        }
        return {name: stacks for name, stacks in below.items() if stacks}

    def _stacks(
        self, layers: range, stacked: bool, name: str, loaded: Sequence[_Loaded], sizes: tuple[int, int]
    ) -> Params:
        """Return a linear layer's stacks, or those of several layers; none where no adapter has a part."""
        parts = {
            (at, each.number - 1): each.kernels[layer, name]
            for at, layer in enumerate(layers)
            for each in loaded
            if (layer, name) in each.kernels
        }
        if not parts:
            return {}
        of_outputs, of_inputs = adapter_sources(self._config, self._partitioner.tensor)[name]
        outputs, inputs = kernel_shapes(self._config)[name]
        outputs, inputs = (
            size if source is None else len(source) for size, source in ((outputs, of_outputs), (inputs, of_inputs))
        )
        number, rank = sizes
        down = np.zeros((len(layers), number, rank, inputs), np.float32)
        up = np.zeros((len(layers), number, rank, outputs), np.float32)
        gain = np.ones((len(layers), number, outputs), np.float32)
        for (at, index), part in parts.items():
            count = part.down_RI.shape[0]
            down[at, index, :count] = _spread(part.down_RI, of_inputs)
            up[at, index, :count] = _spread(part.up_RO, of_outputs)
            if part.gain_O is not None:
                gain[at, index] = _spread(part.gain_O, of_outputs)
        out_axis, in_axis = (SPLIT_BY[axis] for axis in ADAPTED[name])
        stacks = {"down": self._placed(down, in_axis, stacked), "up": self._placed(up, out_axis, stacked)}
        if any(part.gain_O is not None for part in parts.values()):
            stacks["gain"] = self._placed(gain, out_axis, stacked)
        return stacks

    def _placed(self, stack: np.ndarray, last: str | None, stacked: bool) -> jax.Array:
        """Put a stack on the devices, split as the kernel is along its last axis."""
        mesh = self._partitioner.mesh
        backend = self._partitioner.partition(self._config, self._backend).backend
        values = (stack if stacked else stack[0]).astype(backend.compute_dtype)
        if mesh is None:
            return jax.device_put(values)
        lead = [PIPELINE if stacked and backend.stages > 1 else None, *[None] * (values.ndim - 2)]
        sharding = NamedSharding(mesh, PartitionSpec(*lead, last))
        return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])


def check_name(name: object) -> None:
    """Refuse what cannot name an adapter."""
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise InvalidOption(f"adapter name {shown(name)} is not a text of 1 to {_LONGEST_NAME} visible characters")


def _spread(values: np.ndarray, source: np.ndarray | None) -> np.ndarray:
    """Return the last axis as a padded model has it."""
    if source is None:
        return values
    return np.where(source < 0, 0, np.take(values, np.maximum(source, 0), axis=-1))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
