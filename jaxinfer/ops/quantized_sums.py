"""Sums over devices of which only bytes are sent: each device's part and each sum in int8, with a scale for each block.

An all-reduce is a reduce-scatter and an all-gather. Here devices exchange int8 parts, each adds up its share of them in
float32, in the order of the devices, and sends the sums in int8 to all. Beside one float32 for each block of 128
numbers, that is half of what bfloat16 takes.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.notation import Array, Float, Int8
from jaxinfer.ops.backend import Backend

_BLOCK = 128
_MOST_BYTE = 127
# A tile of a TPU's memory.
_TILE_ROWS, _LANES = 8, 128


def added_over(part: Float[Array, "*rows D"], axis: str, backend: Backend) -> Float[Array, "*rows D"]:
    """Return the sum of the devices' parts along an axis of the mesh, as the backend's `collectives` say."""
    assert backend.mesh is not None
    devices = backend.mesh.shape[axis]
    if backend.collectives == "int8" and splits_into_blocks(part.shape[-1], devices):
        return added_in_bytes(part, axis, devices)
    if backend.platform == "cpu":
        # In the order of the devices; that of `lax.psum` is up to the runtime.
        return functools.reduce(operator.add, lax.all_gather(part, axis))
    return lax.psum(part, axis)


def scattered_over(parts: Float[Array, "N *rows D"], axis: str, backend: Backend) -> Float[Array, "O *rows D"]:
    """Return this device's share, of the leading axis, of the sum of the devices' parts along an axis of the mesh.

    In bytes it has the bits that `added_over` gives it.
    """
    assert backend.mesh is not None
    devices, (count, *row) = backend.mesh.shape[axis], parts.shape
    if backend.collectives == "int8" and splits_into_blocks(row[-1], devices):
        return _scattered_in_bytes(parts, axis, devices)
    own = count // devices, *row
    if backend.platform == "cpu":
        # In the order of the devices, as `added_over` does.
        return functools.reduce(operator.add, lax.all_to_all(parts.reshape(devices, *own), axis, 0, 0, tiled=True))
    if own[0] % _TILE_ROWS == 0 or row[-1] % _LANES:
        return lax.psum_scatter(parts, axis, tiled=True)
    # A TPU's compiler makes a reduce-scatter of whole tiles alone, and an all-reduce of others.
    return lax.psum_scatter(parts.reshape(devices, -1, _LANES), axis).reshape(own)


def splits_into_blocks(width: int, devices: int) -> bool:
    """Whether each device has whole blocks of a row to add up."""
    return width % (devices * _BLOCK) == 0


def bytes_of(numbers: int) -> tuple[int, int]:
    """Return the bytes of so many numbers' int8 codes, and those of their scales."""
    return numbers, numbers // _BLOCK * 4


def added_in_bytes(part: Float[Array, "*rows D"], axis: str, devices: int) -> Float[Array, "*rows D"]:
    """Return the sum of the devices' parts along an axis of the mesh; check `splits_into_blocks` first.

    Every device has the same bits. A number is off by at most a 254th of the largest of its block in each part, and
    once more in the sum.
    """
    lead, width = part.shape[:-1], part.shape[-1]
    rows = part.astype(jnp.float32).reshape(-1, devices, width // devices // _BLOCK, _BLOCK)
    # Device i gets the i-th share of every row from each device.
    codes, scales = (lax.all_to_all(each, axis, 1, 0, tiled=True) for each in _rounded(rows))
    count = rows.shape[0]
    parts = _widened(codes, scales).reshape(devices, count, *rows.shape[2:])
    share = functools.reduce(operator.add, parts)
    codes, scales = (lax.all_gather(each, axis, axis=1) for each in _rounded(share))
    return _widened(codes, scales).reshape(*lead, width).astype(part.dtype)


def _scattered_in_bytes(parts: jax.Array, axis: str, devices: int) -> jax.Array:
    count, *row = parts.shape
    rows = parts.astype(jnp.float32).reshape(devices, count // devices, *row[:-1], -1, _BLOCK)
    codes, scales = (lax.all_to_all(each, axis, 0, 0, tiled=True) for each in _rounded(rows))
    share = functools.reduce(operator.add, _widened(codes, scales))
    return _widened(*_rounded(share)).reshape(-1, *row).astype(parts.dtype)


def _rounded(numbers: jax.Array) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    most = jnp.max(jnp.abs(numbers), axis=-1, keepdims=True)
    scales = most / _MOST_BYTE
    codes = jnp.round(numbers / jnp.where(scales == 0, 1, scales))
    return codes.astype(jnp.int8), scales


def _widened(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32) * scales
