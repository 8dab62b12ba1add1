"""Reads a checkpoint's tensors, one at a time, into the decoder's parameters; each device gets its own part."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.aligned import aligned_empty
from jaxinfer.checkpoint.few_bits_shards import read_few_bits
from jaxinfer.checkpoint.leaves import Leaf, list_leaves
from jaxinfer.checkpoint.matrix_readers import MatrixReader
from jaxinfer.checkpoint.shards import Box, make_sharded
from jaxinfer.checkpoint.source import Checkpoint, SparingSource
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.models.families.family import Part, TensorNames
from jaxinfer.models.layers import KERNEL
from jaxinfer.models.padding import Sources
from jaxinfer.notation import Params

Progress = Callable[[int, int], None]


def load_params(
    checkpoint: Checkpoint,
    names: TensorNames,
    abstract: Mapping[str, Any],
    progress: Progress | None = None,
    padding: Mapping[str, Any] | None = None,
    matrices: MatrixReader | None = None,
) -> Params:
    """Read the parameters that ``abstract`` describes, in its dtypes.

    ``abstract`` is a nested dictionary of ``jax.ShapeDtypeStruct`` from `jaxinfer.models.decoder.abstract_params`, with
    stacked blocks or not. If a struct has a sharding, every device of this process gets its shard, and memory holds no
    more than these shards and one tensor, or two copies of one whose rows are in another order. ``padding`` gives the
    source of each element of padded parameters (`jaxinfer.models.padding.parameter_sources`). ``matrices`` reads
    kernels and tables in few bits; kernels are then ``[out, in]``. ``progress`` receives the parameter bytes done and
    in total. Raises :class:`InvalidCheckpoint` for a missing, extra or misshapen tensor before any weight is read.
    """
    names = names.spelled_in(checkpoint.tensors.shapes())
    leaves = list(list_leaves(abstract, names, padding))
    _check(checkpoint, leaves, names)
    # Largest first: the temporary copy of a large parameter then meets an almost empty memory.
    leaves.sort(key=lambda leaf: leaf.num_bytes, reverse=True)
    total, done = sum(leaf.num_bytes for leaf in leaves), 0
    params: Params = {}
    for leaf in leaves:
        node = params
        for part in leaf.path[:-1]:
            node = node.setdefault(part, {})
        quantized = None if matrices is None else read_few_bits(matrices, checkpoint, leaf, _read)
        if quantized is None:
            node[leaf.path[-1]] = _read(checkpoint, leaf)
        else:
            node[KERNEL if leaf.transposed else leaf.path[-1]] = quantized
        done += leaf.num_bytes
        if progress is not None:
            progress(done, total)
    return params


def each_param(
    checkpoint: Checkpoint, names: TensorNames, abstract: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    """Yield the path and the value of each parameter that `load_params` would return; one at a time is held."""
    names = names.spelled_in(checkpoint.tensors.shapes())
    for leaf in list_leaves(abstract, names, None):
        yield leaf.path, _read(checkpoint, leaf)


def check_tensors(checkpoint: Checkpoint, names: TensorNames, abstract: Mapping[str, Any]) -> frozenset[str]:
    """Raise :class:`InvalidCheckpoint` for a missing, extra or misshapen tensor; reads no weights.

    Return the names of extra tensors that may be left out.
    """
    names = names.spelled_in(checkpoint.tensors.shapes())
    return _check(checkpoint, list(list_leaves(abstract, names, None)), names)


def _check(checkpoint: Checkpoint, leaves: list[Leaf], names: TensorNames) -> frozenset[str]:
    expected = {
        source.tensor: leaf.tensor_shape(source) for leaf in leaves for parts in leaf.sources for source in parts
    }
    found = checkpoint.tensors.shapes()
    if missing := [name for name in expected if name not in found]:
        raise InvalidCheckpoint(f"{checkpoint.origin}: missing {_listed(missing)}; fetch all files of the model")
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in names.ignored) or r"(?!)")
    extra = sorted(found.keys() - expected.keys() - checkpoint.left_out)
    extra = [name for name in extra if not ignored.fullmatch(name)]
    source = checkpoint.tensors
    spare = frozenset(filter(source.is_spare, extra) if isinstance(source, SparingSource) else ())
    if extra := [name for name in extra if name not in spare]:
        raise InvalidCheckpoint(f"{checkpoint.origin}: its configuration leaves no place for {_listed(extra)}")
    wrong = [name for name, shape in expected.items() if tuple(found[name]) != shape]
    if wrong:
        name = wrong[0]
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise InvalidCheckpoint(
            f"{checkpoint.origin}: tensor {name} has shape {list(found[name])}, "
            f"but its configuration makes it {list(expected[name])}{others}"
        )
    return spare


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _read(checkpoint: Checkpoint, leaf: Leaf) -> jax.Array:
    shape, sharding = tuple(leaf.struct.shape), leaf.struct.sharding
    if sharding is None:
        buffer = _read_shards(checkpoint, leaf, [tuple(slice(0, size) for size in shape)])[0]
        return jax.block_until_ready(jax.device_put(buffer))
    return make_sharded(shape, sharding, lambda boxes: _read_shards(checkpoint, leaf, boxes))


def _read_shards(checkpoint: Checkpoint, leaf: Leaf, boxes: Sequence[Box]) -> list[np.ndarray]:
    """Read a parameter's values inside each box; reads every tensor once."""
    dtype = np.dtype(leaf.struct.dtype)
    # Filled by assignment: a JAX array may alias its buffer, so the buffer must never be a file that could change.
    buffers = [aligned_empty(tuple(place.stop - place.start for place in box), dtype) for box in boxes]
    for layer, parts in enumerate(leaf.sources):
        wanted = [at for at, box in enumerate(boxes) if not leaf.stacked or box[0].start <= layer < box[0].stop]
        if not wanted:
            continue
        padding = leaf.padding[leaf.stacked :]
        places = [
            (boxes[at][1:], buffers[at][layer - boxes[at][0].start]) if leaf.stacked else (boxes[at], buffers[at])
            for at in wanted
        ]
        if leaf.is_matrix_each:
            _read_each(checkpoint, leaf, parts, places, padding)
            continue
        read = [_read_rows(checkpoint, leaf, source, dtype) for source in parts]
        rows = read[0] if len(read) == 1 else np.concatenate(read)
        rows = rows.T if leaf.transposed else rows.reshape(leaf.shape)
        for box, place in places:
            place[...] = _cut(rows, box, padding)
    return buffers


def _read_each(
    checkpoint: Checkpoint, leaf: Leaf, parts: Sequence[Part], places: list[tuple[Box, np.ndarray]], padding: Sources
) -> None:
    """Read a stack of matrices one at a time, each tensor that some box has a part of."""
    for index, source in enumerate(parts):
        wanted = [(box, place) for box, place in places if box[0].start <= index < box[0].stop]
        rows = _read_rows(checkpoint, leaf, source, places[0][1].dtype) if wanted else None
        for box, place in wanted:
            place[index - box[0].start] = _cut(rows, box[1:], padding[1:])


def _read_rows(checkpoint: Checkpoint, leaf: Leaf, source: Part, dtype: np.dtype) -> np.ndarray:
    tensor = checkpoint.tensors.read(source.tensor, dtype)
    if source.every:
        return source.of_experts(tensor, leaf.shape).reshape(leaf.rows_shape)
    if source.across:
        count, outputs, inputs = leaf.shape
        return tensor[source.rows(count * inputs)].reshape(count, inputs, outputs).swapaxes(1, 2)
    tensor = tensor if source.shape is None else tensor.reshape(-1, *leaf.rows_shape[1:])
    return (tensor.T if source.transposed else tensor)[source.rows(leaf.num_rows)]


def _cut(rows: Any, box: Box, padding: Sources) -> np.ndarray:
    """Return the values inside a box, with zeros for zero padding."""
    rows = rows[tuple(place if source is None else slice(None) for place, source in zip(box, padding, strict=True))]
    for axis, (place, source) in enumerate(zip(box, padding)):
        if source is not None:
            taken = np.take(rows, np.maximum(source[place], 0), axis=axis)
            np.moveaxis(taken, axis, 0)[source[place] < 0] = 0
            rows = taken
    return rows
