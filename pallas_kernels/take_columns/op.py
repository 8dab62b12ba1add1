"""Takes columns of a table in few bits, which lies as products read it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.take_columns.kernel import LANES, take_body
from pallas_kernels.tuning import tuned_blocks

_VMEM_LIMIT_BYTES = 48 << 20
_DTYPES = tuple(map(jnp.dtype, (jnp.int4, jnp.uint4, jnp.int8, jnp.uint8, jnp.int16, jnp.float32)))


def take_columns(
    parts: Sequence[jax.Array], columns_T: jax.Array, *, rows: int | None = None, interpret: Any = False
) -> list[jax.Array]:
    """Return the columns ``columns_T`` of each part ``[K, V]``, as rows ``[T, K]`` of its dtype, in the same bits.

    Parts are the codes, scales and minima of one table: integers of 4, 8 or 16 bits or float32, of one V and any K.
    Columns are in ``[0, V)``. For each of them the kernel reads the tiles of 128 columns that hold it, so it is for a
    step's tokens; 100,000 fill a v5e's scalar memory. ``rows`` of a part are turned at once.
    """
    columns_T = columns_T.astype(jnp.int32)
    _check(parts, columns_T)
    rows = rows or tuned_blocks("take_columns", take_shape(parts))["rows"]
    count = columns_T.shape[0]
    if not count:
        return [jnp.zeros((0, part.shape[0]), part.dtype) for part in parts]
    found = pl.pallas_call(
        take_body(rows, len(parts)),
        out_shape=[jax.ShapeDtypeStruct((count, 1, part.shape[0]), jnp.int32) for part in parts],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(count,),
            in_specs=[pl.BlockSpec((part.shape[0], LANES), lambda step, tiles, _: (0, tiles[step])) for part in parts],
            out_specs=[pl.BlockSpec((None, 1, part.shape[0]), lambda step, *_: (step, 0, 0)) for part in parts],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=count * sum(column_bytes(part) + 4 * part.shape[0] for part in parts),
        ),
        interpret=interpret,
        name="take_columns",
    )(columns_T // LANES, columns_T % LANES, *parts)
    return [_narrowed(bits[:, 0], part.dtype) for bits, part in zip(found, parts, strict=True)]


def take_shape(parts: Sequence[Any]) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    return {"K": parts[0].shape[0], "dtype": jnp.dtype(parts[0].dtype).name}


def column_bytes(part: Any) -> int:
    """Return the bytes that are read of a part for one column: those of the tiles that it lies in."""
    bits = 4 if jnp.dtype(part.dtype) in (jnp.int4, jnp.uint4) else 8 * jnp.dtype(part.dtype).itemsize
    return part.shape[0] * LANES * bits // 8


def _narrowed(bits_TK: jax.Array, dtype: Any) -> jax.Array:
    """Return numbers of a dtype that have these bits."""
    return lax.bitcast_convert_type(bits_TK, dtype) if dtype == jnp.float32 else bits_TK.astype(dtype)


def _check(parts: Sequence[jax.Array], columns_T: jax.Array) -> None:
    """Raise ValueError if shapes or dtypes do not match."""
    shapes = [part.shape for part in parts]
    if not parts or any(len(shape) != 2 or 0 in shape or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(f"take_columns: parts {shapes} must be matrices of as many columns")
    for part in parts:
        if jnp.dtype(part.dtype) not in _DTYPES:
            known = ", ".join(dtype.name for dtype in _DTYPES)
            raise ValueError(f"take_columns: a part of {part.dtype} is not supported: use {known}")
    if columns_T.ndim != 1:
        raise ValueError(f"take_columns: columns {columns_T.shape} must be one list")
