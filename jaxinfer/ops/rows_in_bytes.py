"""Rows of a cache in bytes: keys or values of 8 bits, rounded before they are written, with a scale for each head.

A row of a slot holds the bytes of all heads side by side, then the upper bytes of the heads' scales, then the lower
ones, then zeros, so many that any vector of 16 bytes that begins in a head ends in the row. So a scale goes wherever
its slot goes: into another slot, a page, another cache. Where a mesh splits the heads, each device's part of a row is
such a row of its heads.

A scale is a bfloat16, rounded up. Its head's largest number is then at most 127, or 448 for floats of 8 bits, and
nothing overflows. Rounding a scale costs 0.3% more error than a float32 would, and half the bytes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Integer

# The dtypes of caches by the names that users give: integers, and the bytes of floats (float8_e4m3fn).
CACHE_DTYPES = {"int8": "int8", "fp8": "uint8"}
# The bytes of a scale.
SCALE_BYTES = 2
# The longest vector of bytes that a kernel reads at a time.
_VECTOR = 16

_MOST = {"int8": 127.0, "uint8": 448.0}
# A head of smaller numbers is all zeros: their scale would have no inverse.
_LEAST = 1e-30


def holds_bytes(dtype: Any) -> bool:
    """Whether a cache of this dtype holds rows in bytes."""
    return jnp.dtype(dtype).name in _MOST


def row_lanes(num_kv_heads: int, head_dim: int) -> int:
    """Return how many bytes a row has."""
    after = max(num_kv_heads * SCALE_BYTES, _VECTOR)
    return -(-(num_kv_heads * head_dim + after) // _VECTOR) * _VECTOR


def to_bytes(rows_BTKH: Float[Array, "B T K H"], dtype: Any, lanes: int, shards: int) -> Integer[Array, "B T F"]:
    """Round rows to bytes; each of the ``shards`` parts of a row is filled up with zeros."""
    name = jnp.dtype(dtype).name
    wide = rows_BTKH.astype(jnp.float32)
    largest_BTK1 = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    bits = jax.lax.bitcast_convert_type(largest_BTK1 * jnp.float32(1 / _MOST[name]), jnp.uint32)
    bits = jnp.where(largest_BTK1 < _LEAST, 0, (bits + 0xFFFF) >> 16)
    scales_BTK1 = jax.lax.bitcast_convert_type(bits << 16, jnp.float32)
    inverse_BTK1 = jnp.where(scales_BTK1 == 0, 0, 1 / scales_BTK1)
    numbers = jnp.clip(wide * inverse_BTK1, -_MOST[name], _MOST[name])
    if name == "int8":
        codes = jnp.round(numbers).astype(jnp.int8)
    else:
        codes = jax.lax.bitcast_convert_type(numbers.astype(jnp.float8_e4m3fn), jnp.uint8)
    upper, lower = (_as_bytes(each, dtype) for each in (bits >> 8, bits & 0xFF))
    return from_heads(jnp.concatenate([codes, upper, lower], axis=-1), lanes, shards)


def to_numbers(
    rows: Integer[Array, "*lead F"], num_kv_heads: int, head_dim: int, shards: int, dtype: Any
) -> Float[Array, "*lead KH"]:
    """Return the numbers of rows in bytes, the heads side by side."""
    heads = by_head(rows, num_kv_heads, head_dim, shards)
    codes, upper, lower = heads[..., :head_dim], heads[..., head_dim : head_dim + 1], heads[..., head_dim + 1 :]
    bits = (_unsigned(upper) << 24) | (_unsigned(lower) << 16)
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
    if rows.dtype == jnp.uint8:
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    numbers = codes.astype(jnp.float32) * scales
    return numbers.astype(dtype).reshape(*rows.shape[:-1], num_kv_heads * head_dim)


def by_head(
    rows: Integer[Array, "*lead F"], num_kv_heads: int, head_dim: int, shards: int
) -> Integer[Array, "*lead K X"]:
    """Return each head's bytes and, after them, those of its scale."""
    lead, heads = rows.shape[:-1], num_kv_heads // shards
    parts = rows.reshape(*lead, shards, -1)
    codes = parts[..., : heads * head_dim].reshape(*lead, num_kv_heads, head_dim)
    scales = parts[..., heads * head_dim : heads * (head_dim + SCALE_BYTES)]
    scales = jnp.swapaxes(scales.reshape(*lead, shards, SCALE_BYTES, heads), -1, -2)
    return jnp.concatenate([codes, scales.reshape(*lead, num_kv_heads, SCALE_BYTES)], axis=-1)


def from_heads(heads: Integer[Array, "*lead K X"], lanes: int, shards: int) -> Integer[Array, "*lead F"]:
    """Return the rows of which these are the heads (`by_head`)."""
    *lead, num_kv_heads, width = heads.shape
    own, head_dim = num_kv_heads // shards, width - SCALE_BYTES
    parts = heads.reshape(*lead, shards, own, width)
    codes = parts[..., :head_dim].reshape(*lead, shards, own * head_dim)
    scales = jnp.swapaxes(parts[..., head_dim:], -1, -2).reshape(*lead, shards, own * SCALE_BYTES)
    rows = jnp.concatenate([codes, scales], axis=-1)
    rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, lanes // shards - rows.shape[-1])])
    return rows.reshape(*lead, lanes)


def _as_bytes(numbers: Any, dtype: Any) -> Any:
    found = numbers.astype(jnp.uint8)
    return found if jnp.dtype(dtype) == jnp.uint8 else jax.lax.bitcast_convert_type(found, jnp.int8)


def _unsigned(bytes_: Any) -> Any:
    found = bytes_ if bytes_.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(bytes_, jnp.uint8)
    return found.astype(jnp.uint32)
