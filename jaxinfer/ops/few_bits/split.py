"""Splits quantized arrays over devices and pads them: each part of one, as the weights that the array stands for."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.errors import InvalidOption
from jaxinfer.ops.few_bits.formats import RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray


def _mend(form: Format, part: int) -> str:
    """Return what to do where groups do not divide a device's part of each row: smaller ones help, or none do."""
    helps = form.unit > RUN and part % RUN == 0
    return f"use {'int8 without groups, a smaller group, or ' if helps else ''}fewer devices on tensor"


def part_shardings(array: QuantizedArray, sharding: NamedSharding) -> QuantizedArray:
    """Return how each part of an array is split if its weights ``[..., N, K]`` are split by ``sharding``.

    Raises InvalidOption for inputs in an order of the matrix's own, which devices would have to exchange.
    """
    if array.form.is_ordered:
        raise InvalidOption("weights whose inputs are in an order of their own do not run on a mesh")
    return array.with_parts([NamedSharding(sharding.mesh, spec) for spec in array.specs(sharding.spec)])


def transposed(sharding: NamedSharding) -> NamedSharding:
    """Return how a kernel ``[out, in]`` is split if its transposed one is split by ``sharding``."""
    *lead, inputs, outputs = sharding.spec
    return NamedSharding(sharding.mesh, PartitionSpec(*lead, outputs, inputs))


def check_split(array: QuantizedArray, sharding: NamedSharding, name: str) -> int:
    """Return a device's part of each row; raise InvalidOption if rows do not split over the mesh in whole groups."""
    form, width, axis = array.form, array.shape[-1], sharding.spec[-1]
    devices = 1 if axis is None else sharding.mesh.shape[axis]
    if devices > 1 and form.block > 1:
        raise InvalidOption(f"{name}: blocks of rows do not split over devices: use 2:4, or no tensor parallelism")
    if width % devices or width // devices % form.unit:
        raise InvalidOption(
            f"{name}: its rows of {width} weights do not split over {devices} devices in whole groups of {form.unit}: "
            f"{_mend(form, width // devices if width % devices == 0 else 1)}"
        )
    return width // devices


def pad_quantized(array: QuantizedArray, sources: Sequence[np.ndarray | None], name: str = "weights") -> QuantizedArray:
    """Pad an array as `jaxinfer.models.padding.pad_parameter` pads its weights; zeros have scales of zero.

    Raises InvalidOption if padding would cut a group: inputs move in whole groups.
    """
    places = [
        None if source is None or size == len(source) else source
        for source, size in zip(sources, array.shape, strict=True)
    ]
    return take_quantized(array, places, name)


def take_quantized(array: QuantizedArray, places: Sequence[np.ndarray | None], name: str = "weights") -> QuantizedArray:
    """Return the weights at some places along each axis, zeros at -1; None are all places.

    Raises InvalidOption for inputs that are no whole groups.
    """
    form, parts = array.form, array.matrix
    *outer, inputs = places
    for axis, taken in enumerate(outer):
        parts = parts if taken is None else [_taken(part, taken, axis) for part in parts]
    if inputs is None:
        return QuantizedArray.of(form, parts)
    if form.block > 1:
        raise InvalidOption(
            f"{name}: its rows are stored in blocks, and padding its inputs for the mesh would move them: use 2:4"
        )
    units, count, found = _units_of(form, inputs, name), array.shape[-1] // form.unit, []
    for part_name, part in zip(form.part_names, parts, strict=True):
        each = part.shape[-1] // count
        at = np.where(units[:, None] < 0, -1, units[:, None] * each + np.arange(each)).reshape(-1)
        is_of_row = form.group is None and part_name not in ("codes", "places")
        found.append(part if is_of_row else _taken(part, at, part.ndim - 1))
    return QuantizedArray.of(form, found)


def _units_of(form: Format, source: np.ndarray, name: str) -> np.ndarray:
    """Return where each unit of padded inputs comes from, -1 for zeros."""
    if len(source) % form.unit == 0:
        rows = source.reshape(-1, form.unit)
        first = rows[:, :1]
        follows = np.where(first < 0, rows < 0, rows == first + np.arange(form.unit))
        if follows.all() and (first[first >= 0] % form.unit == 0).all():
            return np.where(first < 0, -1, first // form.unit)[:, 0]
    what = f"groups of {form.unit}" if form.unit > RUN else f"runs of {RUN}"
    raise InvalidOption(
        f"{name}: padding its inputs to {len(source)} for the mesh would cut {what}: {_mend(form, len(source))}"
    )


def _taken(part: Any, source: np.ndarray, axis: int) -> Any:
    numpy: Any = np if isinstance(part, np.ndarray) else jnp
    taken = numpy.take(part, np.maximum(source, 0), axis=axis)
    is_there = (source >= 0).reshape(-1, *[1] * (part.ndim - axis - 1))
    return numpy.where(is_there, taken, numpy.zeros((), part.dtype))
