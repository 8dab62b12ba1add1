"""Reads a folder that PEFT saved: low-rank matrices for the tensors of a base model (LoRA; Hu et al., 2106.09685)."""

import hashlib
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxinfer.checkpoint.adapters.low_rank import LowRank
from jaxinfer.checkpoint.adapters.other_tensors import HEAD, PREFIX, Change, read_changes
from jaxinfer.checkpoint.adapters.parameters import read_parameters, router_tensor
from jaxinfer.checkpoint.adapters.settings import CONFIG, AdapterSettings, read_settings
from jaxinfer.checkpoint.hf_folder import PICKLE_SUFFIXES, refuse_pickle
from jaxinfer.checkpoint.safetensors_file import SafetensorsFile
from jaxinfer.errors import CheckpointNotFound, InvalidCheckpoint
from jaxinfer.models.adapters import ADAPTED_NAMES, held_kernels, kernel_shapes, parameter_of
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part, TensorNames

WEIGHTS = "adapter_model.safetensors"
_ENDINGS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_B.bias": "shift",
    "lora_magnitude_vector.weight": "magnitude",
    "lora_magnitude_vector": "magnitude",
}
_MODULE = re.compile(rf"(?P<module>.+)\.(?P<ending>{'|'.join(map(re.escape, _ENDINGS))})")


class Place(NamedTuple):
    """A kernel of the decoder that a tensor holds: its layer, its name in a block, and where it stands."""

    layer: int
    name: str
    part: Part


@dataclass(frozen=True)
class Adapter:
    """An adapter that has been read: its matrices by the name of the base model's tensor, and these tensors' places.

    ``changes`` are those of other tensors, by their names.
    """

    origin: str
    matrices: Mapping[str, LowRank]
    places: Mapping[str, tuple[Place, ...]]
    changes: Mapping[str, Change] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits of all numbers, in float32."""
        found = hashlib.sha256()
        for tensor, low in sorted(self.matrices.items()):
            found.update(tensor.encode())
            for part in low:
                found.update(b"" if part is None else np.ascontiguousarray(part).tobytes())
        for tensor, change in sorted(self.changes.items()):
            found.update(tensor.encode())
            for part in change.arrays:
                found.update(np.ascontiguousarray(part).tobytes())
        return found.hexdigest()[:16]


def open_adapter(
    folder: str | Path,
    names: TensorNames,
    config: DecoderConfig,
    stored: Mapping[str, tuple[int, ...]],
) -> Adapter:
    """Read a PEFT folder for a base model with these tensor names.

    ``stored`` are the shapes of all of the model's tensors. Raises :class:`CheckpointNotFound` for a folder of
    something else, :class:`UnsupportedModel` for a change of what the model does not have, and
    :class:`InvalidCheckpoint` for one that does not fit.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise CheckpointNotFound(f"{path}: no {CONFIG}: give a folder that PEFT saved an adapter in, or a hub id")
    settings = read_settings(path)
    return read_matrices(path, settings, names, config, stored)


def read_matrices(
    path: Path,
    settings: AdapterSettings,
    names: TensorNames,
    config: DecoderConfig,
    stored: Mapping[str, tuple[int, ...]],
) -> Adapter:
    """Read an adapter's tensors, and check that they are what its settings and the base model ask for.

    An adapter may spell the names as checkpoints do, with either prefix, or as transformers calls modules; what is
    returned spells them as ``names``. What it changes of a vision model, which is left out, is left out too.
    """
    tensors = _open_tensors(path)
    found: dict[str, dict[str, str]] = {}
    for tensor in tensors.shapes():
        match = _MODULE.fullmatch(tensor)
        if match is None or names.leaves_out(tensor.removeprefix(PREFIX)):
            continue
        module = match["module"].removeprefix(PREFIX)
        found.setdefault(module, {})[_ENDINGS[match["ending"]]] = tensor
    spellings = [names, names.moved(names.optional_prefix, names.other_prefix)]
    spellings += [spelling.of_modules() for spelling in spellings if names.modules]
    places = max(
        (places_of(spelling, config) for spelling in spellings),
        key=lambda places: sum(f"{module}.weight" in places for module in found),
    )
    # All spellings name the same tensors in the same order.
    as_stored = places_of(names, config)
    own = dict(zip(places, as_stored))
    matrices: dict[str, LowRank] = {}
    others: dict[str, LowRank] = {}
    of_experts: dict[str, Change] = {}
    as_parameters: set[str] = set()
    if settings.parameters:
        of_experts, as_parameters = read_parameters(path, settings, found, tensors, names.spelled_in(stored), config)
    for module, parts in found.items():
        if module in as_parameters:
            continue
        if settings.has_parameter(f"{module}.weight") and not settings.targets(module):
            as_parameters.add(module)
            tensor = f"{module}.weight" if f"{module}.weight" in stored else router_tensor(module, names, config)
            low = _read(path, settings, f"{module}.weight", tensors, parts)
            others[tensor.removesuffix(".weight")] = low
            continue
        if f"{module}.weight" not in places:
            others[module] = _read(path, settings, module, tensors, parts)
            continue
        matrices[f"{module}.weight"] = _read(path, settings, module, tensors, parts)
    # PEFT names the embedding alone, and stores the same matrices for the output matrix.
    is_tied = settings.is_tied and "head.kernel" not in names.top
    asked = {module for module in found.keys() - as_parameters if not (is_tied and f"{module}.weight" == HEAD)}
    _check_targets(path, settings, asked, places)
    shapes = kernel_shapes(config)
    for tensor, low in matrices.items():
        _check_fit(path, tensor, low, places[tensor], shapes)
    changes = read_changes(path, settings, tensors, names, stored, others, of_experts)
    if not matrices and not changes:
        raise InvalidCheckpoint(f"{path}: {CONFIG} targets no layer of this model")
    return Adapter(
        str(path),
        {own[tensor]: low for tensor, low in matrices.items()},
        {own[tensor]: as_stored[own[tensor]] for tensor in matrices},
        changes,
    )


def places_of(names: TensorNames, config: DecoderConfig) -> dict[str, tuple[Place, ...]]:
    """Return the kernels that each tensor of a linear layer of the blocks holds."""
    places: dict[str, tuple[Place, ...]] = {}
    for layer in range(config.num_layers):
        held = held_kernels(config, layer)
        for name in ADAPTED_NAMES:
            source = names.block.get(parameter_of(name))
            if name not in held or source is None or isinstance(source, tuple):
                continue  # of several tensors: no family has such kernels
            part = source if isinstance(source, Part) else Part(source)
            part = replace(part, tensor=part.tensor.format(layer=layer))
            places[part.tensor] = (*places.get(part.tensor, ()), Place(layer, name, part))
    return places


def _open_tensors(path: Path) -> SafetensorsFile:
    if (path / WEIGHTS).is_file():
        return SafetensorsFile(path / WEIGHTS)
    for suffix in PICKLE_SUFFIXES:
        pickled = path / f"adapter_model{suffix}"
        if pickled.is_file():
            raise refuse_pickle(pickled)
    raise CheckpointNotFound(f"{path}: no {WEIGHTS}; fetch all files of the adapter")


def _read(
    path: Path, settings: AdapterSettings, module: str, tensors: SafetensorsFile, parts: Mapping[str, str]
) -> LowRank:
    wanted = {"down", "up", *(["magnitude"] if settings.is_dora else []), *(["shift"] if settings.has_shifts else [])}
    if wanted != parts.keys():
        names = {what: ending for ending, what in reversed(_ENDINGS.items())}
        odd = names[sorted(wanted ^ parts.keys())[0]]
        fault = "lacks" if wanted - parts.keys() else "has a"
        raise InvalidCheckpoint(f"{path}: {module} {fault} {odd}; fetch all files of the adapter")
    arrays = {what: tensors.read(tensor, np.dtype(np.float32)) for what, tensor in parts.items()}
    down, up, rank = arrays["down"], arrays["up"], settings.rank_of(module)
    if down.ndim != 2 or up.ndim != 2 or not down.shape[0] == up.shape[1] == rank:
        shapes = f"{list(up.shape)} and {list(down.shape)}"
        raise InvalidCheckpoint(f"{path}: {module} has matrices of {shapes}, but its rank is {rank}")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise InvalidCheckpoint(f"{path}: {module} has numbers that are not finite; fetch the adapter again")
    magnitude = arrays["magnitude"].reshape(-1) if settings.is_dora else None
    scale = np.float32(settings.scale_of(module))
    return LowRank(down, up * scale, magnitude, arrays["shift"] * scale if settings.has_shifts else None)


def _check_targets(path: Path, settings: AdapterSettings, found: Set[str], places: Mapping[str, object]) -> None:
    wanted = {module for tensor in places if settings.targets(module := tensor.removesuffix(".weight"))}
    if missing := sorted(wanted - found):
        raise InvalidCheckpoint(f"{path}: {CONFIG} targets {missing[0]}, which {WEIGHTS} has no matrices for")
    if extra := sorted(module for module in found - wanted if not settings.targets(module)):
        raise InvalidCheckpoint(f"{path}: {WEIGHTS} has matrices for {extra[0]}, which {CONFIG} does not target")


def _check_fit(
    path: Path, tensor: str, low: LowRank, places: tuple[Place, ...], shapes: Mapping[str, tuple[int, int]]
) -> None:
    count = sum(shapes[place.name][0] for place in places)
    width = shapes[places[0].name][1]
    outputs = {low.up_OR.shape[:1], *(each.shape for each in (low.magnitude_O, low.shift_O) if each is not None)}
    if low.down_RI.shape[1] != width or outputs != {(count,)}:
        found = [low.up_OR.shape[0], low.down_RI.shape[1]]
        raise InvalidCheckpoint(f"{path}: it adapts {tensor} as {found}, but the model's is {[count, width]}")
