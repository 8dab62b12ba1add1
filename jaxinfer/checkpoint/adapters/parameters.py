"""Reads what PEFT adds to parameters instead of modules (``target_parameters``): to all experts' matrices in one.

Of E experts and rank R, ``lora_A`` is ``[E R, _]`` with an expert's rows side by side, ``lora_B`` ``[_, R E]`` with its
columns E apart. Of two parameters of a module, the first one's matrices are found below ``base_layer``.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxinfer.checkpoint.adapters.low_rank import LowRank
from jaxinfer.checkpoint.adapters.other_tensors import Change, spellings
from jaxinfer.checkpoint.adapters.settings import CONFIG, AdapterSettings
from jaxinfer.checkpoint.safetensors_file import SafetensorsFile
from jaxinfer.errors import InvalidCheckpoint, UnsupportedModel
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.families.family import Part, TensorNames, names_of

# The parameters of experts, in the order in which they are wrapped.
_OF_EXPERTS = ("gate_up_proj", "down_proj")
_MODULE, _BELOW = ".experts", ".base_layer"
# Its module says that its matrices are ``[in, out]``; others' do not where they are, and A and B change places.
_SAYS_TRANSPOSED = ("gpt_oss",)


def read_parameters(
    path: Path,
    settings: AdapterSettings,
    found: Mapping[str, Mapping[str, str]],
    tensors: SafetensorsFile,
    names: TensorNames,
    config: DecoderConfig,
) -> tuple[dict[str, Change], set[str]]:
    """Return the changes of experts' tensors, and the modules that they are of, of those that were ``found``.

    Raises UnsupportedModel for a parameter that the model's experts do not have, InvalidCheckpoint for what does not
    fit.
    """
    changes: dict[str, Change] = {}
    of_modules: dict[str, list[str]] = {}
    for module in found:
        of_modules.setdefault(module.removesuffix(_BELOW), []).append(module)
    taken: set[str] = set()
    for module, wrapped in of_modules.items():
        targeted = [name for name in _OF_EXPERTS if settings.has_parameter(f"{module}.{name}")]
        # A target is the end of a name, and may be the parameter's alone.
        if not targeted or not module.endswith(_MODULE):
            continue
        # The innermost first.
        wrapped = sorted(wrapped, key=len, reverse=True)
        if len(wrapped) != len(targeted):
            raise InvalidCheckpoint(f"{path}: {CONFIG} targets {module}.{targeted[0]}, and its matrices are not there")
        for name, each in zip(targeted, wrapped):
            pairs = _read_pairs(path, settings, f"{module}.{name}", tensors, found[each], names, config)
            for tensor, change in pairs.items():
                changes[tensor] = change
        taken |= set(wrapped)
    for layer in range(config.num_layers):
        stacks = {part.tensor.format(layer=layer) for part in _stacks(names)} if config.sparse_layers[layer] else ()
        for tensor in sorted(filter(settings.has_parameter, stacks)):
            if taken.isdisjoint(spellings(tensor.rpartition(".")[0], names)):
                raise InvalidCheckpoint(f"{path}: {CONFIG} targets {tensor}, which has no matrices there")
    return changes, taken


def router_tensor(module: str, names: TensorNames, config: DecoderConfig) -> str:
    """Return the tensor of a router whose module is called ``mlp.gate`` and its tensor something else."""
    source = names.block.get("mlp.router.weights")
    for layer in range(config.num_layers if source is not None else 0):
        tensor = names_of(source or "")[0].format(layer=layer)
        if f"{tensor.partition('layers.')[0]}layers.{layer}.mlp.gate" in spellings(module, names):
            return tensor
    return f"{module}.weight"


def _read_pairs(
    path: Path,
    settings: AdapterSettings,
    parameter: str,
    tensors: SafetensorsFile,
    parts: Mapping[str, str],
    names: TensorNames,
    config: DecoderConfig,
) -> dict[str, Change]:
    if {"down", "up"} != parts.keys():
        raise InvalidCheckpoint(f"{path}: {parameter} lacks lora_A or lora_B; fetch all files of the adapter")
    layer, kernels = _kernels_of(path, parameter, names, config)
    count, outer, inner = next(iter(kernels.values())).shape or (0, 0, 0)
    first, second = (tensors.read(parts[each], np.dtype(np.float32)) for each in ("down", "up"))
    if not np.isfinite(first).all() or not np.isfinite(second).all():
        raise InvalidCheckpoint(f"{path}: {parameter} has numbers that are not finite; fetch the adapter again")
    rank = settings.rank_of(parameter)
    fits = first.ndim == second.ndim == 2 and len(first) == second.shape[1] == rank * count
    sizes = (first.shape[-1], second.shape[0]) if fits else ()
    if not fits or sizes not in ((inner, outer), (outer, inner)):
        raise InvalidCheckpoint(
            f"{path}: {parameter} has matrices of {list(second.shape)} and {list(first.shape)}, but it is "
            f"{[count, outer, inner]} and its rank {rank}"
        )
    down_ERI = first.reshape(count, rank, -1)
    up_EOR = np.moveaxis(second.reshape(second.shape[0], rank, count), -1, 0)
    is_square = inner == outer
    if sizes == (outer, inner) and (not is_square or config.family in _SAYS_TRANSPOSED):
        down_ERI, up_EOR = up_EOR.swapaxes(1, 2), down_ERI.swapaxes(1, 2)
    scale = np.float32(settings.scale_of(parameter))
    pairs = [LowRank(np.ascontiguousarray(down), up * scale) for down, up in zip(down_ERI, up_EOR)]
    changes: dict[str, Change] = {}
    for kernel, part in kernels.items():
        source = names.block[kernel]
        if isinstance(source, tuple):
            rows = _width(config, kernel)
            for tensor, low in zip(source, pairs):
                changes[tensor.format(layer=layer)] = Change(low=low.of_part(part, rows))
        elif isinstance(source, Part) and source == part:
            changes[source.tensor.format(layer=layer)] = Change(experts=tuple(pairs))
        else:
            raise UnsupportedModel(f"{path}: it changes {parameter}, which stands in other tensors in this checkpoint")
    return changes


def _stacks(names: TensorNames) -> list[Part]:
    """Return the tensors of all experts that are named as a module's parameters are."""
    sources = [
        source
        for block in (names.block, *names.others)
        for path, source in block.items()
        if path.startswith("mlp.experts.")
    ]
    return [source for source in sources if isinstance(source, Part) and source.tensor.endswith(_OF_EXPERTS)]


def _kernels_of(path: Path, parameter: str, names: TensorNames, config: DecoderConfig) -> tuple[int, dict[str, Part]]:
    """Return the layer of a parameter, and the experts' kernels that it holds."""
    for layer in range(config.num_layers):
        for block in (names.block, *names.others):
            kernels = {
                kernel: source
                for kernel, source in block.items()
                if kernel.startswith("mlp.experts.")
                and isinstance(source, Part)
                and source.shape is not None
                and source.tensor.format(layer=layer) in spellings(parameter, names)
            }
            if kernels and config.sparse_layers[layer]:
                return layer, kernels
    raise UnsupportedModel(f"{path}: it changes {parameter}, and the model's experts have no such parameter")


def _width(config: DecoderConfig, kernel: str) -> int:
    assert config.experts is not None
    return config.model_dim if kernel.endswith(".down") else config.experts.ffn_dim
