"""A checkpoint whose weights an adapter has been added to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.checkpoint.adapters.other_tensors import Change, check_tied
from jaxinfer.checkpoint.adapters.peft_folder import Adapter, open_adapter, places_of
from jaxinfer.checkpoint.adapters.place import adapter_folder
from jaxinfer.checkpoint.source import Checkpoint, QuantizedSource, SparingSource, TensorSource, TypedTensorSource
from jaxinfer.errors import InvalidOption, UnsupportedModel
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.families.registry import family_of


@dataclass(frozen=True)
class MergedTensors:
    """Tensors of a source, with what an adapter adds: summed in float32 or wider, and rounded once."""

    source: TensorSource
    adapter: Adapter

    def shapes(self) -> Any:
        """Return the shape of every tensor."""
        return self.source.shapes()

    def stored_dtype(self, name: str) -> np.dtype | None:
        """Return a tensor's dtype in the source."""
        return self.source.stored_dtype(name) if isinstance(self.source, TypedTensorSource) else None

    def is_spare(self, name: str) -> bool:
        """Whether a tensor that a model has no place for changes nothing."""
        return isinstance(self.source, SparingSource) and self.source.is_spare(name)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read one tensor, merged."""
        low, change = self.adapter.matrices.get(name), self.adapter.changes.get(name)
        if change is not None:
            return change.applied_to(self.source.read(name, np.promote_types(dtype, np.float32))).astype(dtype)
        if low is None:
            return self.source.read(name, dtype)
        kernel = self.source.read(name, np.promote_types(dtype, np.float32))
        if not self.adapter.places[name][0].part.transposed:
            return low.added_to(kernel).astype(dtype)
        return np.ascontiguousarray(low.added_to(kernel.T).T).astype(dtype)


def merge_into(
    checkpoint: Checkpoint, where: Any, token: str | None = None, notice: Callable[[str], None] | None = None
) -> Checkpoint:
    """Return a checkpoint with an adapter merged into its weights.

    Raises as `adapter_folder` and `open_adapter` do, and InvalidOption for weights in few bits, which would be rounded
    again.
    """
    family = family_of(checkpoint.config)
    config = family.translate(checkpoint.config)
    names = family.tensor_names(config)
    stored = checkpoint.tensors.shapes()
    folder = adapter_folder(where, token=token, notice=notice)
    adapter = open_adapter(folder, names, config, stored)
    names_there = names.spelled_in(stored)
    there = {
        (place.layer, place.name): tensor for tensor, held in places_of(names_there, config).items() for place in held
    }
    own: dict[str, str] = {}
    for tensor, held in adapter.places.items():
        tensors = {there[place.layer, place.name] for place in held}
        if len(tensors) > 1:
            raise UnsupportedModel(f"{folder}: it changes {tensor}, whose rows are several tensors of this checkpoint")
        own[tensor] = tensors.pop()
    matrices, places = (
        {own[tensor]: value for tensor, value in each.items()} for each in (adapter.matrices, adapter.places)
    )
    return merged(checkpoint, replace(adapter, matrices=matrices, places=places), names_there)


def merged(checkpoint: Checkpoint, adapter: Adapter, names: TensorNames) -> Checkpoint:
    """Return a checkpoint with an adapter of its model merged into its weights.

    Raises InvalidOption for few bits and for folded factors, and UnsupportedModel for a change that the model's tensors
    cannot have.
    """
    if isinstance(checkpoint.tensors, QuantizedSource) and any(checkpoint.tensors.forms().values()):
        raise InvalidOption(
            f"{checkpoint.origin}: its weights are in few bits, and merging would round them again: load the adapter "
            "beside them, or merge it before they are rounded"
        )
    if checkpoint.folded is not None:
        raise InvalidOption(
            f"{checkpoint.origin}: awq or smoothquant may have folded factors into its weights, and the adapter is of "
            "the model before: load it beside this one, or merge it into that"
        )
    changes = _with_shifts(adapter, checkpoint.tensors.shapes())
    changes = changes if "head.kernel" in names.top else check_tied(adapter.origin, names, changes)
    return replace(checkpoint, tensors=MergedTensors(checkpoint.tensors, replace(adapter, changes=changes)))


def _with_shifts(adapter: Adapter, stored: Mapping[str, tuple[int, ...]]) -> Mapping[str, Change]:
    """Return an adapter's changes, and what is added to the biases of what it adapts."""
    changes = dict(adapter.changes)
    of_others = {name: change.low for name, change in adapter.changes.items() if change.low is not None}
    for name, low in {**adapter.matrices, **of_others}.items():
        if low.shift_O is None:
            continue
        bias = name.removesuffix("weight") + "bias"
        if bias not in stored:
            raise UnsupportedModel(
                f"{adapter.origin}: its lora_bias adds to the outputs of {name}, which has no bias in this model: load "
                "the adapter beside the model"
            )
        changes[bias] = replace(changes.get(bias, Change()), shift=low.shift_O)
    return changes
