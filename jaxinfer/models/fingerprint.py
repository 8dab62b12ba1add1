"""A few letters that stand for a model's weights, so that what was made for them is known to fit no others."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.models.layers import locate

_EVERY_ROW = 31


def fingerprint(params: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits of a model's parameters.

    They are of every 31st row of every matrix and all of every vector, rounded to bfloat16: the same for parameters
    loaded in float32 and in bfloat16, stacked or not, and others after any training that touches these.
    """
    pieces = sorted((name, np.ascontiguousarray(array)) for name, array in _named(params, ()))
    digest = hashlib.sha256()
    for name, array in pieces:
        digest.update(f"{name}{array.shape}".encode())
        digest.update(array.view(np.uint16).tobytes())
    return digest.hexdigest()[:16]


def _named(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _named(value, (*path, key))
            continue
        layers, stacked, name, transposed = locate((*path, key), value.shape)
        for index, layer in enumerate(layers or ("",)):
            array = np.asarray(value[index] if stacked else value)
            rows = array.T if transposed else array
            rows = rows[::_EVERY_ROW] if rows.ndim > 1 else rows
            yield f"{layer}.{name}", rows.astype(ml_dtypes.bfloat16)
