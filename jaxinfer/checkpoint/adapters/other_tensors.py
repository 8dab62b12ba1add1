"""What an adapter changes beside the kernels of the blocks' linear layers: embeddings, norms, biases, experts.

Whole tensors (``modules_to_save``, ``bias``), rows of some tokens (``trainable_token_indices``), and low ranks of an
embedding or of any other matrix that the model has by that name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jaxinfer.checkpoint.adapters.low_rank import LowRank
from jaxinfer.checkpoint.adapters.settings import CONFIG, AdapterSettings
from jaxinfer.checkpoint.safetensors_file import SafetensorsFile
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel, shown
from jaxinfer.models.families.family import TensorNames, names_of, renamed

# PEFT's own names come before the base model's.
PREFIX = "base_model.model."
_ROWS, _BASE = ".token_adapter.trainable_tokens_delta", ".base_layer.weight"
_DOWN, _UP = ".lora_embedding_A", ".lora_embedding_B"
_BASE_BIAS = ".base_layer.bias"
# The output matrix where it is the embedding, too, and not stored.
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Change:
    """What happens to one tensor: it is replaced, then rows of it are, then a product of small matrices is added.

    Of a vector that may be a bias, ``shift`` is added. ``experts`` are products that are added to each matrix of a
    stack, as it is stored.
    """

    whole: np.ndarray | None = None
    rows: tuple[tuple[int, ...], np.ndarray] | None = None
    low: LowRank | None = None
    shift: np.ndarray | None = None
    experts: tuple[LowRank, ...] = ()

    @property
    def arrays(self) -> list[np.ndarray]:
        """All numbers of it."""
        rows = [] if self.rows is None else [np.array(self.rows[0]), self.rows[1]]
        others = self.whole, *rows, *(self.low or ()), self.shift, *(part for low in self.experts for part in low)
        return [each for each in others if each is not None]

    def applied_to(self, tensor: np.ndarray) -> np.ndarray:
        """Return the changed tensor, in float32 or wider."""
        wide = np.promote_types(tensor.dtype, np.float32)
        tensor = (tensor if self.whole is None else self.whole).astype(wide)
        if self.rows is not None:
            tensor[list(self.rows[0])] = self.rows[1]
        if self.shift is not None:
            tensor = tensor + self.shift
        if self.experts:
            tensor = np.stack([low.added_to(matrix) for low, matrix in zip(self.experts, tensor)])
        return tensor if self.low is None else self.low.added_to(tensor)


def read_changes(
    path: Path,
    settings: AdapterSettings,
    tensors: SafetensorsFile,
    names: TensorNames,
    shapes: Mapping[str, tuple[int, ...]],
    matrices: Mapping[str, LowRank],
    of_experts: Mapping[str, Change] = MappingProxyType({}),
) -> dict[str, Change]:
    """Return the changes by the model's tensors, whose ``shapes`` are given.

    An output matrix that is the embedding is `HEAD`. ``matrices`` are low ranks by the name of a module that is no
    linear layer of the blocks, ``of_experts`` changes of experts by tensor. Raises :class:`UnsupportedModel` for what
    this model has no tensor for.
    """
    changes = {_own(path, f"{module}.weight", names, shapes): Change(low=low) for module, low in matrices.items()}
    changes |= {_own(path, tensor, names, shapes): change for tensor, change in of_experts.items()}
    for stored in tensors.shapes():
        name = stored.removeprefix(PREFIX)
        if names.leaves_out(name):
            continue
        if name.endswith(_BASE_BIAS) and settings.has_biases:
            name = name.removesuffix(_BASE_BIAS) + ".bias"
        elif name.endswith((_ROWS, _BASE, _DOWN, _UP)):
            module = name[: name.rindex(next(end for end in (_ROWS, _BASE, _DOWN, _UP) if name.endswith(end)))]
            name = f"{module}.weight"
        elif ".lora_" in name:
            continue
        elif name.endswith(".bias") and settings.has_biases:
            pass
        elif not is_saved(name, settings) and not is_saved(name, settings, ("embed_tokens", "lm_head")):
            raise InvalidCheckpoint(f"{path}: it has {shown(stored)}, and no modules_to_save in {CONFIG} names it")
        own = _own(path, name, names, shapes)
        change = changes.get(own, Change())
        if stored.endswith((_DOWN, _UP)):
            if stored.endswith(_DOWN):
                change = replace(change, low=_embedding(path, settings, tensors, stored))
        elif stored.endswith(_ROWS):
            values = _read(path, tensors, stored)
            indices = settings.rows_of(name.removesuffix(".weight"))
            shape = _shape(names, shapes, own)
            if not indices or values.shape != (len(indices), *shape[1:]) or max(indices) >= shape[0]:
                raise InvalidCheckpoint(f"{path}: {shown(stored)} has no rows for trainable_token_indices in {CONFIG}")
            change = replace(change, rows=(indices, values))
        else:
            change = replace(change, whole=_read(path, tensors, stored))
        changes[own] = change
    _check_all(path, settings, names, tensors.shapes(), changes)
    for own, change in changes.items():
        _check_fit(path, names, own, change, _shape(names, shapes, own))
    return changes


def embedding_of(names: TensorNames, tensors: Iterable[str]) -> str | None:
    """Return the name of the embedding's tensor among those of a model, in either spelling."""
    (embedding,) = names_of(names.top["embed.embedding"])
    spelled = {embedding, names.other_prefix + embedding.removeprefix(names.optional_prefix)}
    return next((tensor for tensor in tensors if tensor in spelled), None)


def check_tied(path: str, names: TensorNames, changes: Mapping[str, Change]) -> dict[str, Change]:
    """Return the changes without `HEAD`'s; raise UnsupportedModel if embedding and output matrix do not change alike.

    For a model in which they are one tensor.
    """
    others = {name: change for name, change in changes.items() if name != HEAD}
    embedding = embedding_of(names, others)
    of_embedding, of_head = others.get(embedding or ""), changes.get(HEAD)
    alike = of_head is None and (of_embedding is None or (of_embedding.whole is None and of_embedding.low is None))
    if of_head is not None and of_embedding is not None:
        alike = of_head.rows is None and of_embedding.rows is None and _are_same(of_head, of_embedding)
    if not alike:
        raise UnsupportedModel(
            f"{path}: it changes the embedding or the output matrix alone, which are one tensor of this model: load it "
            "beside the model, or save the base model with tie_word_embeddings false, and train again"
        )
    return others


def _are_same(one: Change, other: Change) -> bool:
    (whole, *low), (other_whole, *other_low) = ((each.whole, *(each.low or ())) for each in (one, other))
    return len(low) == len(other_low) and all(
        of_one is of_other or (of_one is not None and of_other is not None and np.array_equal(of_one, of_other))
        for of_one, of_other in zip((whole, *low), (other_whole, *other_low))
    )


def is_saved(name: str, settings: AdapterSettings, modules: Iterable[str] | None = None) -> bool:
    """Tell whether a tensor belongs to a module, or to one inside it, whose name ends as those saved or given do."""
    parts = name.split(".")[:-1]
    endings = tuple(settings.saved if modules is None else modules)
    return any(".".join(parts[: count + 1]).endswith(endings) for count in range(len(parts)))


def _embedding(path: Path, settings: AdapterSettings, tensors: SafetensorsFile, stored: str) -> LowRank:
    """Return what is added to ``[V, D]``: PEFT's matrices are ``[R, V]`` and ``[D, R]``."""
    other = stored.removesuffix(_DOWN) + _UP
    if other not in tensors.shapes():
        raise InvalidCheckpoint(f"{path}: it lacks {shown(other)}; fetch all files of the adapter")
    module = stored.removeprefix(PREFIX).removesuffix(_DOWN)
    down_RV, up_DR, rank = _read(path, tensors, stored), _read(path, tensors, other), settings.rank_of(module)
    if down_RV.ndim != 2 or up_DR.ndim != 2 or not len(down_RV) == up_DR.shape[1] == rank:
        found = f"{list(up_DR.shape)} and {list(down_RV.shape)}"
        raise InvalidCheckpoint(f"{path}: {module} has matrices of {found}, but its rank is {rank}")
    return LowRank(np.ascontiguousarray(up_DR.T), down_RV.T * np.float32(settings.scale_of(module)))


def _read(path: Path, tensors: SafetensorsFile, stored: str) -> np.ndarray:
    values = tensors.read(stored, np.dtype(np.float32))
    if not np.isfinite(values).all():
        raise InvalidCheckpoint(f"{path}: {shown(stored)} has numbers that are not finite; fetch the adapter again")
    return values


def spellings(name: str, names: TensorNames) -> list[str]:
    """Return a tensor's or module's name, and what the checkpoint may call it: under the other prefix, or else."""
    one, other = names.optional_prefix, names.other_prefix
    found = [name, *(to + name.removeprefix(of) for of, to in ((one, other), (other, one)) if name.startswith(of))]
    of_tensors = {of_module: of_tensor for of_tensor, of_module in names.modules.items()}
    return [*found, *(renamed(each, of_tensors) for each in found if of_tensors)]


def _own(path: Path, name: str, names: TensorNames, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the checkpoint's spelling of a tensor's name."""
    found = next((each for each in spellings(name, names) if each in shapes), None)
    # A tied output matrix is not stored.
    if found is None and name == HEAD and "head.kernel" not in names.top:
        return name
    if found is None:
        raise UnsupportedModel(f"{path}: it changes {shown(name)}, and no tensor of the model has that name")
    return found


def _shape(names: TensorNames, shapes: Mapping[str, tuple[int, ...]], own: str) -> tuple[int, ...]:
    return tuple(shapes[own if own in shapes else embedding_of(names, shapes) or own])


def _check_all(
    path: Path, settings: AdapterSettings, names: TensorNames, stored: Iterable[str], changes: Mapping[str, Change]
) -> None:
    """Check that all that the settings name is there."""
    tensors = [tensor.removeprefix(PREFIX) for tensor in stored]
    for module in settings.saved:
        if not any(is_saved(tensor, settings, (module,)) for tensor in tensors):
            raise InvalidCheckpoint(f"{path}: modules_to_save in {CONFIG} names {module}, which has no tensors there")
    if settings.token_rows and not any(tensor.endswith(_ROWS) for tensor in tensors):
        raise InvalidCheckpoint(f"{path}: trainable_token_indices in {CONFIG} names tokens, which have no rows there")
    if settings.is_all_linear:
        return
    (embedding,) = names_of(names.top["embed.embedding"])
    for name in (embedding, *names_of(names.top.get("head.kernel", HEAD))):
        is_missing = settings.targets(name.removesuffix(".weight")) and not any(
            change.low for each, change in changes.items() if each in (name, embedding_of(names, changes))
        )
        if is_missing:
            raise InvalidCheckpoint(f"{path}: {CONFIG} targets {name}, which has no matrices there")


def _check_fit(path: Path, names: TensorNames, own: str, change: Change, shape: tuple[int, ...]) -> None:
    low = () if change.low is None else ((len(change.low.up_OR), change.low.down_RI.shape[1]),)
    found = (*(() if change.whole is None else (change.whole.shape,)), *low)
    for each in found:
        if tuple(each) == shape:
            continue
        is_table = own == HEAD or own in names_of(names.top.get("head.kernel", ())) or embedding_of(names, [own])
        if is_table and tuple(each)[1:] == shape[1:]:
            raise InvalidCheckpoint(
                f"{path}: its {own} has {each[0]} tokens, but the model's has {shape[0]}: it was trained on a model "
                "whose vocabulary was changed: load that one"
            )
        raise InvalidCheckpoint(f"{path}: it changes {own} as {list(each)}, but the model's is {list(shape)}")
    for vector in () if change.low is None else (change.low.magnitude_O, change.low.shift_O):
        if vector is not None and vector.shape != shape[:1]:
            raise InvalidCheckpoint(
                f"{path}: it has {list(vector.shape)} numbers for the outputs of {own}, which are {shape[0]}"
            )
