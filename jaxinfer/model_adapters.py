"""The adapters that a model has loaded: their names, and the model's parameters with the stacks of all of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import jax
import numpy as np

from jaxinfer.adapter_basis import AdapterBasis, OfKernel
from jaxinfer.adapter_parts import OwnParts, own_parts
from jaxinfer.adapter_stacks import AdapterStacks, Loaded
from jaxinfer.checkpoint.adapters.merged import merged
from jaxinfer.checkpoint.adapters.peft_folder import Adapter, open_adapter
from jaxinfer.checkpoint.adapters.place import adapter_folder
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidOption, shown
from jaxinfer.models.adapters import EMBED, HEAD, LOADED, kernel_shapes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.folded import Folded
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.parallel.partitioner import Partitioner

_LONGEST_NAME = 200


class ModelAdapters:
    """Loads and unloads the adapters of one model.

    ``params`` are the model's, with all adapters; an array of them is never changed, so that what runs goes on with
    those that it has. Their shapes know few sizes: numbers of adapters are powers of two, and so are ranks from 8 on.
    Adapters are those of the model before anything was ``folded`` into it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        backend: Backend,
        params: Params,
        partitioner: Partitioner,
        checkpoint: Checkpoint | None,
        folded: Folded | None = None,
    ) -> None:
        self.params = params
        self._config, self._backend, self._base = config, backend, params
        self._partitioner, self._checkpoint, self._folded = partitioner, checkpoint, folded
        self._stacks = AdapterStacks(config, backend, params, partitioner)
        self._loaded: dict[str, Loaded] = {}

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

    def load(
        self,
        name: str,
        where: str | Path,
        *,
        revision: str | None = None,
        token: str | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        """Read an adapter under a name; where it is says `jaxinfer.checkpoint.adapters.place`."""
        check_name(name)
        if name in self._loaded:
            raise InvalidOption(f"adapter {name!r} is loaded already: unload it first, or choose another name")
        if self._folded is not None and self._folded.factors is None:
            raise InvalidOption(
                f"adapter {name!r}: {self._checkpoint.origin if self._checkpoint else 'this model'} was saved without "
                "the factors that awq or smoothquant may have folded into its weights, and an adapter needs these: "
                "quantize the model again and save it"
            )
        base, config = self._tensors(self._base), self._config
        folder = adapter_folder(where, revision=revision, token=token, notice=notice)
        adapter = open_adapter(folder, self._names, config, base.shapes())
        adapter = replace(adapter, origin=str(where) if revision is None else f"{where}@{revision}")
        others = OwnParts()
        if adapter.changes:
            # In the arrangement that the parameters have on the devices, but whole and not padded.
            split = self._partitioner.partition(config, self._backend).backend
            abstract = abstract_params(config, replace(split, kv_shards=1, mesh=None, stages=1))
            others = own_parts(adapter, base, self._names, abstract, self._basis)
        taken = {loaded.number for loaded in self._loaded.values()}
        number = next(number for number in range(1, len(taken) + 2) if number not in taken)
        before = dict(self._loaded)
        self._loaded[name] = Loaded(adapter, number, self._by_kernel(adapter), others, self._copies(others))
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
        is_split = self._partitioner.is_multi_process
        if is_split and not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(self._base)):
            # Each process would read its own parts, but a tensor is gathered by all processes at once.
            raise InvalidOption(
                "merge_adapter: this process holds only a part of the model: load what jaxinfer convert SRC DST "
                "--adapter PATH writes"
            )
        tensors, stored = self._tensors(self._base), self._checkpoint
        source = replace(stored or Checkpoint("the model", {}, tensors), tensors=tensors, folded=self._folded)
        sum_of_both = merged(source, self._find(name).adapter, self._names)
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

    def _find(self, name: object) -> Loaded:
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self._loaded) or "none"
            raise InvalidOption(f"no adapter {shown(name)} is loaded; loaded are: {known}")
        return found

    @property
    def _basis(self) -> AdapterBasis:
        return AdapterBasis(self._config, self._folded)

    @cached_property
    def _names(self) -> TensorNames:
        """The names of the checkpoint's tensors, or of its family's."""
        stored = {"model_type": self._config.family} if self._checkpoint is None else self._checkpoint.config
        return family_of(stored).tensor_names(self._config)

    def _tensors(self, params: Params) -> LoadedTensors:
        """Return parameters as the base model's tensors."""
        partitioner = self._partitioner
        padding = partitioner.padding_on_mesh(self._config, self._backend)
        return LoadedTensors(params, self._names, padding, partitioner.fetch)

    def _copies(self, others: OwnParts) -> dict[str, jax.Array]:
        """Put an adapter's own whole tables on the devices, as the model's are."""
        dtype = np.dtype(self._backend.param_dtype)
        found = {}
        for table, change in others.tables.items():
            if change.whole is None:
                continue
            # An output matrix that is the embedding is laid out as that.
            module, name = (HEAD, "kernel") if table == HEAD and HEAD in self._base else (EMBED, "embedding")
            params = {module: {name: jax.device_put(change.whole.astype(dtype))}}
            found[table] = self._partitioner.place_params(self._config, self._backend, params)[module][name]
        return found

    def _by_kernel(self, adapter: Adapter) -> dict[tuple[int, str], OfKernel]:
        """Cut an adapter's matrices as the base model's tensors are cut into kernels."""
        has_magnitudes = any(low.magnitude_O is not None for low in adapter.matrices.values())
        tensors = self._tensors(self._base) if has_magnitudes else None
        shapes = kernel_shapes(self._config)
        kernels: dict[tuple[int, str], OfKernel] = {}
        for tensor, low in adapter.matrices.items():
            gain_O = None
            if low.magnitude_O is not None and tensors is not None:
                kernel = tensors.read(tensor, np.dtype(np.float32))
                kernel = kernel.T if adapter.places[tensor][0].part.transposed else kernel
                # Magnitudes are of the rows before anything was folded into them.
                gain_O = low.gain(self._basis.unfolded(kernel, adapter.places[tensor], shapes))
            for place in adapter.places[tensor]:
                rows = place.part.rows(shapes[place.name][0])
                gain = None if gain_O is None else gain_O[rows]
                up_OR = low.up_OR[rows] if gain is None else low.up_OR[rows] * gain[:, None]
                shift = None if low.shift_O is None else low.shift_O[rows]
                own = OfKernel(low.down_RI, up_OR.T, gain, shift)
                kernels[place.layer, place.name] = self._basis.of_kernel(place.layer, place.name, own)
        return kernels

    def _stacked(self) -> Params:
        """Return the parameters with the adapters that are loaded now."""
        loaded = list(self._loaded.values())
        return {**self._base, LOADED: self._stacks.of(loaded)} if loaded else self._base


def check_name(name: object) -> None:
    """Refuse what cannot name an adapter."""
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise InvalidOption(f"adapter name {shown(name)} is not a text of 1 to {_LONGEST_NAME} visible characters")
