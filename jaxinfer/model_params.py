"""Reads the parameters of a model that is loaded: converted, in few bits, or from the folder where they are kept."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import jax

from jaxinfer.checkpoint.few_bits import FewBits, FewBitsReader
from jaxinfer.checkpoint.kept_params import KeptParams
from jaxinfer.checkpoint.load import each_param
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.source import Checkpoint, QuantizedSource
from jaxinfer.errors import InvalidOption
from jaxinfer.kept.folder import KeptFolder
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.family import TensorNames
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.fingerprint import fingerprint_of, named_rows
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.few_bits.products import has_kernels, multiplies_few_bits
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.parallel.partitioner import Partitioner
from jaxinfer.start_times import LoadTimes

# Of converted weights that are kept.
_MAX_WEIGHTS_BYTES = 4 << 30


def check_few_bits(few_bits: FewBits | None, backend: Backend) -> None:
    """Refuse few bits where they do not run yet."""
    if few_bits is not None:
        _check_forms(f"weights {few_bits.name!r}", [few_bits.form], backend)


def _check_forms(named: str, forms: Iterable[Format | None], backend: Backend) -> None:
    if backend.param_dtype == "float64":
        raise InvalidOption(f"{named} multiply in float32: choose dtype float32 or bfloat16")
    if backend.cpu_kernels and not all(map(has_kernels, forms)):
        raise InvalidOption(f"{named} have no products on this processor: use int8")


def loaded_checkpoint(
    checkpoint: Checkpoint, params: Params, config: DecoderConfig, padding: Params | None, trained_on: Callable[[], str]
) -> Checkpoint:
    """Return a checkpoint with the parameters of a loaded model; ``trained_on`` is asked if they are in few bits.

    ``padding`` is where each element of parameters on a mesh comes from. Raises InvalidOption if they are not all here.
    """
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
        raise InvalidOption("this process holds only a part of the model: save it from a run of one process")
    tensors = LoadedTensors(params, family_of(checkpoint.config).tensor_names(config), padding)
    return replace(checkpoint, tensors=tensors, rounded_from=trained_on() if tensors.forms() else None)


def _read_published(
    checkpoint: Checkpoint,
    names: TensorNames,
    config: DecoderConfig,
    backend: Backend,
    partitioner: Partitioner,
    notice: Callable[[str], None] | None,
    progress: Callable[[int, int], None] | None,
) -> Params:
    """Return the parameters of a checkpoint that was quantized before, in its own bits where these have products."""
    # Imported here: most checkpoints are not quantized.
    from jaxinfer.checkpoint.published.reader import OwnBitsReader

    def why_not(form: Format, width: int) -> str | None:
        if backend.param_dtype == "float64":
            return "products in float64"
        if form.is_ordered and partitioner.mesh is not None:
            return "inputs in an order of their own on a mesh"
        is_multiplied = not backend.cpu_kernels or multiplies_few_bits(form, width)
        return None if is_multiplied else "no products on this processor"

    reader = OwnBitsReader(why_not)
    params = partitioner.load_params(checkpoint, names, config, backend, progress, reader)
    if reader.widened and notice is not None:
        why = ", ".join(sorted(reader.widened))
        notice(
            f"{checkpoint.origin}: matrices of {checkpoint.quantized_by} are widened to {backend.param_dtype}: {why}"
        )
    return params


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

    def convert() -> Params:
        if checkpoint.quantized_by is not None:
            return _read_published(checkpoint, names, config, backend, partitioner, notice, progress)
        by_columns = backend.kernels != "xla"
        reader = FewBitsReader(few_bits, by_columns=by_columns) if few_bits is not None or stored else None
        params = partitioner.load_params(checkpoint, names, config, backend, progress, reader)
        if reader is not None and reader.widened and notice is not None:
            kinds = ", ".join(sorted(reader.widened))
            notice(f"{checkpoint.origin}: blocks of {kinds} are widened to {backend.param_dtype}")
        return params

    stored = checkpoint.tensors.forms() if isinstance(checkpoint.tensors, QuantizedSource) else {}
    if stored and few_bits is None and checkpoint.quantized_by is None:
        forms = {each.form for each in stored.values()}
        _check_forms(f"{checkpoint.origin}: weights in few bits", forms, backend)
    if few_bits is not None:
        few_bits.check(checkpoint)
    if checkpoint.notice is not None and notice is not None:
        notice(f"{checkpoint.origin}: {checkpoint.notice}")
    if kept is None or partitioner.mesh is not None:
        return convert()
    weights = KeptParams(KeptFolder(Path(kept) / "weights", _MAX_WEIGHTS_BYTES), times.notes)
    # Weights are the same whatever is asked of steps.
    layout = (config, replace(backend, step_rows=1))
    return weights.load(checkpoint, layout if few_bits is None else (*layout, few_bits), convert)
