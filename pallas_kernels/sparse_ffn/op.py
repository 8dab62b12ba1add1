"""Products of a few rows with live blocks of a feed-forward layer's weights, which alone are read from HBM."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.sparse_ffn.blocks import UNITS, LiveBlocks, count_blocks
from pallas_kernels.sparse_ffn.kernel import inputs_body, outputs_body
from pallas_kernels.tuning import current_chip, tuned_blocks

MOST_ROWS = 64
# Of a core's vector memory; the rest is for what the compiler keeps between products.
_SHARE = 0.6


def live_inputs(
    hidden_MF: jax.Array,
    kernel: jax.Array,
    blocks: LiveBlocks,
    *,
    layer: jax.Array | int | None = None,
    expected: float = 1.0,
    together: int | None = None,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Return ``hidden_MF @ kernel.T`` ``[M, D]`` in float32, over the listed blocks of 128 hidden units alone.

    This is the down product of a feed-forward layer, with a kernel ``[D, F]``, or ``[L, D, F]`` of which ``layer`` is
    read in place. M is at most 64; both operands are bfloat16, or both float32, which is multiplied exactly. The
    weights of blocks that are not listed are not read. If the hidden units of these are zero, the result has the bits
    that it has with all blocks listed. A row's bits do not depend on other rows.

    ``together`` blocks are read at a time, by default as in tuned.json for ``chip``, or for the chip that is compiled
    for. ``expected`` is the share of blocks that the estimate of the cost counts. Raise ValueError if arguments do not
    match or do not fit into vector memory (`fits`).
    """
    kernel, layer_1 = _stacked(kernel, layer, interpret)
    _check("live_inputs", hidden_MF, kernel, blocks, kernel.shape[2], kernel.shape[2])
    model_dim, units = kernel.shape[1:]
    rows, chip = _padded(hidden_MF), chip or current_chip()
    together = _together(rows.shape[0], model_dim, units, rows.dtype, together, chip)
    spec = pl.BlockSpec
    specs = [
        *(spec((rows.shape[0], UNITS), _at(place, together, lambda block, _: (0, block))) for place in range(together)),
        *(
            spec((None, model_dim, UNITS), _at(place, together, lambda block, layer: (layer, 0, block)))
            for place in range(together)
        ),
    ]
    return _call(
        inputs_body(together, units, _precision(rows)),
        (layer_1, blocks),
        [*[rows] * together, *[kernel] * together],
        specs,
        (rows.shape[0], model_dim),
        together,
        expected,
        chip,
        interpret,
    )[: len(hidden_MF)]


def live_outputs(
    x_MD: jax.Array,
    kernel: jax.Array,
    blocks: LiveBlocks,
    *,
    layer: jax.Array | int | None = None,
    expected: float = 1.0,
    together: int | None = None,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Return ``x_MD @ kernel.T`` ``[M, F]`` in float32 for the listed blocks of hidden units, and zeros elsewhere.

    This is the up product of a gated feed-forward layer, with a kernel ``[F, D]`` or ``[L, F, D]``. Otherwise as
    `live_inputs`.
    """
    kernel, layer_1 = _stacked(kernel, layer, interpret)
    units, model_dim = kernel.shape[1:]
    _check("live_outputs", x_MD, kernel, blocks, model_dim, units)
    rows, chip = _padded(x_MD), chip or current_chip()
    together = _together(rows.shape[0], model_dim, units, rows.dtype, together, chip)
    specs = [
        pl.BlockSpec(rows.shape, lambda i, layer, index, count: (0, 0)),
        *(
            pl.BlockSpec((None, UNITS, model_dim), _at(place, together, lambda block, layer: (layer, block, 0)))
            for place in range(together)
        ),
    ]
    return _call(
        outputs_body(together, _precision(rows)),
        (layer_1, blocks),
        [rows, *[kernel] * together],
        specs,
        (rows.shape[0], count_blocks(units) * UNITS),
        together,
        expected,
        chip,
        interpret,
    )[: len(x_MD), :units]


def fits(rows: int, model_dim: int, units: int, dtype: Any, chip: str | None = None) -> bool:
    """Whether both products fit into a chip's vector memory, for so many rows and a kernel of so many numbers."""
    most = _room(_round_up(rows, _tile(dtype)), model_dim, units, jnp.dtype(dtype), chip or current_chip())
    return 0 < rows <= MOST_ROWS and most > 0


def shape_key(rows: int, model_dim: int, units: int, dtype: Any) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    return {"rows": rows, "D": model_dim, "F": units, "dtype": jnp.dtype(dtype).name}


def _call(
    body: Callable[..., None],
    scalars: tuple[jax.Array, LiveBlocks],
    operands: list[Any],
    specs: list[pl.BlockSpec],
    shape: tuple[int, int],
    together: int,
    expected: float,
    chip: str,
    interpret: Any,
) -> jax.Array:
    layer_1, (index_I, count) = scalars
    rows, kernel = operands[0], operands[-1]
    weights = kernel.size // kernel.shape[0]
    count_1 = jnp.asarray(count, jnp.int32).reshape(1)
    return pl.pallas_call(
        body,
        name="sparse_ffn",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            # A grid has at least one step.
            grid=(jnp.maximum(pl.cdiv(count_1[0], together), 1),),
            in_specs=specs,
            out_specs=pl.BlockSpec(shape, lambda i, layer, index, count: (0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=int(CHIPS[chip].vmem_bytes * 0.9)
        ),
        cost_estimate=pl.CostEstimate(
            flops=round(2 * len(rows) * weights * expected),
            bytes_accessed=round(weights * kernel.dtype.itemsize * expected)
            + rows.size * rows.dtype.itemsize
            + 4 * shape[0] * shape[1],
            transcendentals=0,
        ),
        interpret=interpret,
    )(layer_1, index_I.astype(jnp.int32), count_1, *operands)


def _at(place: int, together: int, where: Callable[[Any, Any], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return the index map of the operand at a place of a step.

    Past the end of the list it is where it was in the step before, and so not fetched again.
    """

    def index_map(i: Any, layer: Any, index: Any, count: Any) -> tuple[Any, ...]:
        entry = i * together + place
        entry = jnp.where(entry < count[0], entry, jnp.maximum(entry - together, 0))
        return where(index[entry], layer[0])

    return index_map


def _stacked(kernel: Any, layer: Any, interpret: Any) -> tuple[Any, jax.Array]:
    """Return a kernel as a stack of layers, and the place of its layer."""
    if layer is None:
        return kernel[None], jnp.zeros(1, jnp.int32)
    if not interpret:
        # Else the compiler may copy a whole stack into vector memory.
        kernel = pltpu.with_memory_space_constraint(kernel, pltpu.HBM)
    return kernel, jnp.asarray(layer, jnp.int32).reshape(1)


def _together(rows: int, model_dim: int, units: int, dtype: Any, together: int | None, chip: str) -> int:
    """Return how many blocks a step reads: as many as are tuned, or given, and fit."""
    if together is None:
        together = tuned_blocks("sparse_ffn", shape_key(rows, model_dim, units, dtype), chip)["together"]
    found = min(together, count_blocks(units), _room(rows, model_dim, units, dtype, chip))
    if found < 1:
        raise ValueError(f"sparse_ffn: {rows} rows and blocks of {model_dim} do not fit into {chip}'s vector memory")
    return found


def _room(rows: int, model_dim: int, units: int, dtype: Any, chip: str) -> int:
    """Return how many blocks vector memory has room for; each is copied while the one before is multiplied."""
    wide = 4 * rows * (model_dim + count_blocks(units) * UNITS) + rows * model_dim * dtype.itemsize
    block = UNITS * (model_dim + rows) * dtype.itemsize
    return (int(CHIPS[chip].vmem_bytes * _SHARE) - 2 * wide) // (2 * block)


def _padded(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, -len(rows) % _tile(rows.dtype)), (0, 0)))


def _tile(dtype: Any) -> int:
    """Return the rows of a tile."""
    return 32 // jnp.dtype(dtype).itemsize


def _round_up(count: int, to: int) -> int:
    return -(-count // to) * to


def _precision(rows: jax.Array) -> lax.Precision:
    return lax.Precision.HIGHEST if rows.dtype == jnp.float32 else lax.Precision.DEFAULT


def _check(name: str, rows: Any, kernel: Any, blocks: LiveBlocks, width: int, units: int) -> None:
    if rows.ndim != 2 or kernel.ndim != 3 or rows.shape[1] != width:
        raise ValueError(f"{name}: rows {rows.shape} do not fit a kernel {kernel.shape[1:]}")
    if not 0 < len(rows) <= MOST_ROWS:
        raise ValueError(f"{name}: {len(rows)} rows are not 1 to {MOST_ROWS}")
    if rows.dtype not in (jnp.bfloat16, jnp.float32) or kernel.dtype != rows.dtype:
        raise ValueError(f"{name}: rows are {rows.dtype}, the kernel {kernel.dtype}: both bfloat16 or both float32")
    if blocks.index_I.shape != (count_blocks(units),):
        raise ValueError(f"{name}: {units} units are {count_blocks(units)} blocks, the list is {blocks.index_I.shape}")
