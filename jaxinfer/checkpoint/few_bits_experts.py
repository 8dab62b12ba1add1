"""Reads stacks of experts in few bits, a matrix at a time: rounded to a form, or as a checkpoint has each of them."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.aligned import aligned_empty
from jaxinfer.checkpoint.leaves import Leaf
from jaxinfer.checkpoint.source import Checkpoint, TypedTensorSource
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.models.families.family import Part
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import TOO_LARGE, are_finite, has_finite_scales, round_to_nearest


def round_experts(checkpoint: Checkpoint, leaf: Leaf, form: Format, read_plainly: Any) -> QuantizedArray:
    """Return a stack of experts' kernels ``[E, out, in]``, of one layer or of several, rounded to the nearest.

    ``read_plainly(checkpoint, leaf)`` reads any parameter.
    """
    whole = _empty_stack(leaf, form)
    for layer, sources in enumerate(leaf.sources):
        for expert, weights in enumerate(_matrices(checkpoint, leaf, sources, read_plainly)):
            rounded = round_to_nearest(weights, form)
            tensor = sources[expert if leaf.is_matrix_each else 0].tensor
            check_numbers(checkpoint, [tensor], weights, rounded)
            _put(leaf, whole, rounded, layer, expert)
    return jax.block_until_ready(jax.device_put(QuantizedArray.of(form, whole)))


def gather_experts(leaf: Leaf, form: Format, read: Callable[[Part], QuantizedArray]) -> QuantizedArray:
    """Return a stack of experts' kernels that are stored one by one, of one layer or of several.

    ``read(part)`` returns one of them in this form, in NumPy's arrays. Memory holds the stack, and as many matrices
    beside it as there are processors.
    """
    whole = _empty_stack(leaf, form)

    def take(place: tuple[int, int]) -> None:
        layer, expert = place
        _put(leaf, whole, read(leaf.sources[layer][expert]), layer, expert)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(take, np.ndindex(len(leaf.sources), leaf.shape[0])))
    return jax.block_until_ready(jax.device_put(QuantizedArray.of(form, whole)))


def check_numbers(checkpoint: Checkpoint, tensors: Sequence[str], weights: Any, rounded: QuantizedArray) -> None:
    """Raise :class:`InvalidCheckpoint`, which names a tensor, if weights, or what they were rounded to, are not finite.

    ``tensors`` has the name of each layer's, if weights and what they were rounded to are stacks of layers.
    """
    parts = [(tensors[0], weights, rounded)]
    if are_finite(weights) and has_finite_scales(rounded):
        return
    if len(tensors) > 1:
        parts = [(each, weights[at], jax.tree.map(lambda part: part[at], rounded)) for at, each in enumerate(tensors)]  # noqa: B023
    for tensor, matrix, found in parts:
        if not are_finite(matrix):
            raise InvalidCheckpoint(f"{checkpoint.origin}: {tensor} has weights that are no finite numbers")
        if not has_finite_scales(found):
            raise InvalidCheckpoint(f"{checkpoint.origin}: {tensor} has weights that are {TOO_LARGE}")


def as_stack(array: QuantizedArray, leaf: Leaf) -> QuantizedArray:
    """Return rows of all experts, one matrix after another, as the stack that a parameter is; a matrix as it is."""
    if len(leaf.shape) == 2:
        return array
    return jax.tree.map(lambda part: part.reshape(leaf.shape[0], -1, part.shape[-1]), array)


def _empty_stack(leaf: Leaf, form: Format) -> list[np.ndarray]:
    """Return room for each part of a stack of matrices, of all of its layers if it has several."""
    count, outputs, width = leaf.shape
    lead = (len(leaf.sources), count) if leaf.stacked else (count,)
    shapes = form.parts(outputs, width).values()
    return [aligned_empty((*lead, *shape), np.dtype(dtype)) for shape, dtype in shapes]


def _put(leaf: Leaf, whole: Sequence[np.ndarray], one: QuantizedArray, layer: int, expert: int) -> None:
    """Copy a matrix to its place."""
    place = (layer, expert) if leaf.stacked else (expert,)
    for part, values in zip(whole, one.matrix, strict=True):
        part[place] = values


def _matrices(checkpoint: Checkpoint, leaf: Leaf, sources: Sequence[Part], read_plainly: Any) -> Iterator[Any]:
    """Yield the matrices of a layer, each from its own tensor; or out of the tensor of all, as it is stored."""

    def read(shape: tuple[int, ...], dtype: Any, parts: Sequence[Part]) -> Any:
        struct = jax.ShapeDtypeStruct(shape, dtype)
        kinds: dict[str, Any] = {"stacked": False, "transposed": False, "padding": (None,) * len(shape)}
        return read_plainly(checkpoint, replace(leaf, struct=struct, sources=(tuple(parts),), **kinds))

    if leaf.is_matrix_each:
        yield from (read(leaf.shape[1:], jnp.float32, [source]) for source in sources)
        return
    tensors, dtype = checkpoint.tensors, None
    if isinstance(tensors, TypedTensorSource):
        dtype = tensors.stored_dtype(sources[0].tensor)
    yield from np.asarray(read(leaf.shape, dtype or np.dtype(np.float32), sources))
