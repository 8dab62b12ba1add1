"""Reads the parameters of a model that is loaded: converted, in few bits, or from the folder where they are kept."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxinfer.checkpoint.few_bits import FewBits
from jaxinfer.checkpoint.kept_params import KeptParams
from jaxinfer.checkpoint.load import each_param
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.matrix_readers import choose_reader
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.decoding.strategy import MadeOnce
from jaxinfer.errors import InvalidOption
from jaxinfer.kept.folder import KeptFolder
from jaxinfer.model_sparsity import check_stored
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.few_bits import change_matrices, is_expert, is_table
from jaxinfer.models.fingerprint import fingerprint_of, named_rows
from jaxinfer.models.folded import Folded
from jaxinfer.models.layers import expert_stacks
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.few_bits.products import has_kernels
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from jaxinfer.ops.few_bits.rounded_rows import MOST_INPUTS, NO_EXPERTS, multiplies_rounded
from jaxinfer.parallel.partitioner import Partitioner
from jaxinfer.start_times import LoadTimes

# Of converted weights that are kept, and of what is made of weights to draft with.
_MAX_WEIGHTS_BYTES, _MAX_DRAFTING_BYTES = 4 << 30, 2 << 30

_WEIGHTS = "load the model with weights int8 or int4:group=64"


def check_few_bits(few_bits: FewBits | None, backend: Backend) -> None:
    """Refuse few bits where they do not run yet."""
    if few_bits is None:
        return
    asked = f"weights {few_bits.name!r}"
    if backend.param_dtype == "float64":
        raise InvalidOption(f"{asked} multiply in float32: choose dtype float32 or bfloat16")
    if backend.cpu_kernels and not has_kernels(few_bits.form):
        raise InvalidOption(f"{asked} have no products on this processor: use int8")


def check_form(few_bits: FewBits | None, activations: str | None, config: DecoderConfig | None = None) -> None:
    """Refuse a model, or weights by their name, that rows in bytes do not multiply, where these are asked for."""
    if activations is not None and config is not None and config.experts is not None:
        raise InvalidOption(f"activations {activations!r}: {NO_EXPERTS}")
    form = None if few_bits is None else few_bits.form
    if activations is not None and few_bits is not None and form is not None and not multiplies_rounded(form):
        raise InvalidOption(f"activations {activations!r}: no products with weights {few_bits.name!r}: {_WEIGHTS}")


def check_kernels(params: Params, activations: str | None) -> None:
    """Refuse parameters whose kernels rows in bytes do not multiply, where these are asked for."""

    def check(path: tuple[str, ...], matrix: Any) -> Any:
        if not is_table(path):
            where = f"activations {activations!r}: {'.'.join(path)}"
            if is_expert(path):
                raise InvalidOption(f"activations {activations!r}: {NO_EXPERTS}")
            if not isinstance(matrix, QuantizedArray):
                raise InvalidOption(f"{where} is in {matrix.dtype}: {_WEIGHTS}")
            if not multiplies_rounded(matrix.form):
                raise InvalidOption(f"{where} is in {matrix.form.bits} bits of another form: {_WEIGHTS}")
            if matrix.shape[-1] > MOST_INPUTS:
                raise InvalidOption(f"{where} has rows of {matrix.shape[-1]}, but sums of 32 bits hold {MOST_INPUTS}")
        return matrix

    if activations is not None:
        change_matrices(params, check)


def loaded_checkpoint(
    checkpoint: Checkpoint,
    params: Params,
    config: DecoderConfig,
    padding: Params | None,
    base_fingerprint: Callable[[], str],
    folded: Folded | None = None,
) -> Checkpoint:
    """Return a checkpoint with the parameters of a loaded model; ``base_fingerprint`` is asked if they are in few bits.

    ``padding`` is where each element of parameters on a mesh comes from, ``folded`` the factors that were folded into
    them. Raises InvalidOption if they are not all here.
    """
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        raise InvalidOption("this process holds only a part of the model: save it from a run of one process")
    names = family_of(checkpoint.config).tensor_names(config)
    if any(map(is_quantized, expert_stacks(params))):
        names = names.of_matrices()
    tensors = LoadedTensors(params, names, padding)
    rounded_from = base_fingerprint() if tensors.forms() else None
    return replace(checkpoint, tensors=tensors, rounded_from=rounded_from, folded=folded)


def stored_fingerprint(checkpoint: Checkpoint, config: DecoderConfig, backend: Backend) -> str:
    """Return the fingerprint of a checkpoint's weights before they were rounded."""
    names = family_of(checkpoint.config).tensor_names(config)
    rows = []
    for (*folders, last), value in each_param(checkpoint, names, abstract_params(config, backend)):
        node: Params = {last: value}
        for folder in reversed(folders):
            node = {folder: node}
        rows += named_rows(node)
    return fingerprint_of(rows)


def read_params(
    checkpoint: Checkpoint,
    names: TensorNames,
    config: DecoderConfig,
    backend: Backend,
    partitioner: Partitioner,
    few_bits: FewBits | None,
    kept: str | Path | None,
    times: LoadTimes,
    notice: Callable[[str], None] | None,
    progress: Callable[[int, int], None] | None,
) -> Params:
    """Return the parameters of a checkpoint; ``kept`` is a folder in which converted ones are kept, or None."""

    reader = choose_reader(checkpoint, few_bits, backend, is_split=partitioner.mesh is not None)
    check_stored(checkpoint, names, config, backend, partitioner, reader)

    def convert() -> Params:
        params = partitioner.load_params(checkpoint, names, config, backend, progress, reader)
        if reader is not None and reader.widened and notice is not None:
            of = f" of {checkpoint.quantized_by}" if checkpoint.quantized_by else ""
            why = ", ".join(sorted(reader.widened))
            notice(f"{checkpoint.origin}: matrices{of} are widened to {backend.param_dtype}: {why}")
        return params

    for line in (checkpoint.notice, names.notice_for(checkpoint.tensors.shapes())):
        if line is not None and notice is not None:
            notice(f"{checkpoint.origin}: {line}")
    if kept is None or partitioner.mesh is not None:
        return convert()
    weights = KeptParams(KeptFolder(Path(kept) / "weights", _MAX_WEIGHTS_BYTES), times.notes)
    # Weights are the same whatever is asked of steps.
    layout = (config, replace(backend, step_rows=1, activations=None, sparsity=None))
    return weights.load(checkpoint, layout if few_bits is None else (*layout, few_bits), convert)


def made_once(kept: str | Path | None, times: LoadTimes, params: Params) -> MadeOnce:
    """Return `Target.made_once` of a model with these parameters; ``kept`` is the folder, or None."""

    def find(layout: Callable[[], Any], make: Callable[[], Params]) -> Params:
        if kept is None:
            return make()
        # Apart from converted weights, which must not have to make room for what is made of them.
        folder = KeptFolder(Path(kept) / "drafting", _MAX_DRAFTING_BYTES)
        return KeptParams(folder, times.notes).load_made(params, layout, make)

    return find
