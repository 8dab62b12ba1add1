"""A short fingerprint of a model's weights, to detect drafters made for other weights."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxinfer.models.layers import TRANSPOSED_KERNEL, locate
from jaxinfer.models.padding import first_copies
from jaxinfer.ops.few_bits.panels import PanelArray
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

_EVERY_ROW = 31


def fingerprint(
    params: Mapping[str, Any],
    padding: Mapping[str, Any] | None = None,
    fetch: Callable[[Any], Any] = jax.device_get,
) -> str:
    """Return 16 hexadecimal digits of a model's parameters.

    They depend on every 31st row of every matrix and on all of every vector, rounded to bfloat16. So they are the same
    in float32 and bfloat16, stacked or not, split over devices or not, and differ after any training that changes these
    values. ``padding`` gives the source of each element of padded parameters
    (`jaxinfer.models.padding.parameter_sources`); ``fetch`` copies arrays to the host.
    """
    return fingerprint_of(named_rows(params, padding, fetch))


def fingerprint_of(rows: Iterable[tuple[str, np.ndarray]]) -> str:
    """Return the fingerprint of all parameters' `named_rows`."""
    pieces = sorted((name, np.ascontiguousarray(array)) for name, array in rows)
    digest = hashlib.sha256()
    for name, array in pieces:
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.view(np.uint16).tobytes())
    return digest.hexdigest()[:16]


def named_rows(
    node: Mapping[str, Any],
    padding: Any = None,
    fetch: Callable[[Any], Any] = jax.device_get,
    path: tuple[str, ...] = (),
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the rows of some parameters that a fingerprint depends on, with their names; see `fingerprint`."""
    for key, value in node.items():
        stored = key if padding is None or key in padding else TRANSPOSED_KERNEL
        sources = None if padding is None else padding[stored]
        if isinstance(value, Mapping):
            yield from named_rows(value, sources, fetch, (*path, key))
            continue
        layers, stacked, name, transposed = locate((*path, key), value.shape)
        if isinstance(value, QuantizedArray):
            chosen = _some_quantized_rows(value, sources if stored == key or sources is None else sources[::-1], fetch)
        else:
            # Rows are selected on the device, so that only they are copied to the host.
            on_device = np.asarray(value) if _is_on_host(value) else value
            chosen = np.asarray(fetch(_some_rows(on_device, sources, stacked, transposed)))
        chosen = chosen.astype(ml_dtypes.bfloat16)
        for index, layer in enumerate(layers or ("",)):
            rows = chosen[index] if stacked else chosen
            yield f"{layer}.{name}", rows.T if transposed else rows


def _is_on_host(array: Any) -> bool:
    """Tell whether NumPy reads an array where it lies: then XLA need not compile a program for each shape."""
    devices = array.devices() if isinstance(array, jax.Array) else ()
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


def _some_rows(array: Any, sources: Any, stacked: bool, transposed: bool) -> Any:
    first = int(stacked)
    row_axis = array.ndim - 1 if transposed else array.ndim - 2
    is_matrix = array.ndim - first > 1
    for axis in range(first, array.ndim):
        every = _EVERY_ROW if is_matrix and axis == row_axis else 1
        source = None if sources is None else sources[axis]
        if source is not None and len(source) == array.shape[axis]:
            array = array.take(first_copies(source)[::every], axis=axis)
        elif every > 1:
            array = array[(slice(None),) * axis + (slice(None, None, every),)]
    return array


def _some_quantized_rows(array: QuantizedArray, sources: Any, fetch: Callable[[Any], Any]) -> np.ndarray:
    """Return the weights that rows stand for; padding that only the mesh needed is left out."""
    found: Sequence[np.ndarray | None] = [None, None] if sources is None else sources[-2:]
    rows, inputs = (
        np.arange(size) if source is None or len(source) != size else first_copies(source)
        for source, size in zip(found, array.shape[-2:], strict=True)
    )
    chosen = rows[::_EVERY_ROW]
    if isinstance(array, PanelArray):
        # They are on one CPU. XLA would compile a program for each shape.
        return _rows_of_panels(jax.tree.map(np.asarray, array), chosen)[..., inputs]
    changed = array.by_rows().map_rows(lambda part: part[..., chosen, :])
    return jax.tree.map(lambda part: np.asarray(fetch(part)), changed).dequantize()[..., inputs]


def _rows_of_panels(array: PanelArray, chosen: np.ndarray) -> np.ndarray:
    """Return the weights that rows of a matrix, or of each of a stack, stand for."""
    if array.ndim == 2:
        return array.rows(chosen).dequantize()
    matrices = zip(*array.matrix)
    return np.stack(
        [_rows_of_panels(PanelArray.of_panels(array.form, parts, array.num_outputs), chosen) for parts in matrices]
    )
