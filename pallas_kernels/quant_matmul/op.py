"""Products of activations and weights of 8 or 4 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.quant_matmul.kernel import (
    BIAS,
    TILE,
    int4_body,
    int8_body,
    row_order,
    scaled_body,
    scaled_row_order,
    split_in_three,
)
from pallas_kernels.tuning import current_chip, tuned_blocks

GROUPS = (32, 64, 128)
_MOST_ROWS = 512
_FEW_ROWS = 16  # of which sums of small groups are scaled; for more rows, weights are
_VMEM_LIMIT = 48 << 20


def quant_matmul(
    x_MD: jax.Array,
    weights: jax.Array,
    scales: jax.Array,
    *,
    minima: jax.Array | None = None,
    offset: int = 0,
    layer: jax.Array | int | None = None,
    activation_scales_M: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    block_k: int | None = None,
    block_f: int | None = None,
    chip: str | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Return ``x_MD @ (weights_DF * scales)``, [M, F]; each weight is read once, in its stored form.

    Activations are bfloat16, or int8 with ``activation_scales_M``. Weights are int8 with one scale per channel, [F], or
    int4 with one per channel and group of 32, 64 or 128 rows, [D / group, F]; D is a multiple of 128. Weights may also
    be uint4 codes, each too large by ``offset``. Four bits may have ``minima``, added to every weight of a group.
    Scales and minima of groups are float32, or int16: the bits of float16. With ``layer``, all of these have a leading
    axis of layers, and that layer is read in place. Products are exact and add up in float32 (int8 with int8: in
    int32); but for more than 16 rows, weights in groups of 32 and 64 are rounded to bfloat16. More than 512 rows are
    processed 512 at a time, and the weights are read each time.

    ``block_k`` x ``block_f`` weights are widened at a time; by default the sizes are those of
    `pallas_kernels.quant_matmul` 's tuned.json for ``chip``, or for the chip that is compiled for. Raise ValueError if
    arguments do not match.
    """
    group = _check(x_MD, weights, scales, minima, layer, activation_scales_M)
    num_rows, model_dim = x_MD.shape
    if num_rows > _MOST_ROWS:
        pieces = [slice(start, start + _MOST_ROWS) for start in range(0, num_rows, _MOST_ROWS)]
        parts = [
            quant_matmul(
                x_MD[piece],
                weights,
                scales,
                minima=minima,
                offset=offset,
                layer=layer,
                activation_scales_M=None if activation_scales_M is None else activation_scales_M[piece],
                out_dtype=out_dtype,
                block_k=block_k,
                block_f=block_f,
                chip=chip,
                interpret=interpret,
            )
            for piece in pieces
        ]
        return jnp.concatenate(parts)
    chip = chip or current_chip()
    if block_k is None or block_f is None:
        tuned = tuned_blocks("quant_matmul", shape_key(num_rows, model_dim, weights.shape[-1], group), chip)
        block_k, block_f = block_k or tuned["block_k"], block_f or tuned["block_f"]
    of_groups = [scales] if minima is None else [scales, minima]
    if layer is None:
        weights, of_groups, layer = weights[None], [each[None] for each in of_groups], 0
    elif not interpret:
        # Else the compiler may copy a whole stack of scales into vector memory, again for every layer.
        weights, *of_groups = (pltpu.with_memory_space_constraint(each, pltpu.HBM) for each in (weights, *of_groups))
    if group == 0:
        of_groups = [each[:, None] for each in of_groups]
    rows_M1 = jnp.ones((num_rows,), jnp.float32) if activation_scales_M is None else activation_scales_M
    padded = -(-num_rows // 8) * 8 if group else -(-num_rows // 32) * 32 if x_MD.dtype == jnp.int8 else num_rows
    x_MD = jnp.pad(x_MD, ((0, padded - num_rows), (0, 0)))
    rows_M1 = jnp.pad(rows_M1.astype(jnp.float32), (0, padded - num_rows))[:, None]
    if group or CHIPS[chip].int8_peak is None:
        x_MD = x_MD.astype(jnp.bfloat16)
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    call = functools.partial(
        _call,
        group=group,
        bias=BIAS + (offset if weights.dtype == jnp.uint4 else 8),
        block_k=fit_block(model_dim, block_k, group),
        block_f=block_f,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return call(x_MD, weights, of_groups, rows_M1, layer_1)[:num_rows]


def shape_key(num_rows: int, model_dim: int, channels: int, group: int) -> dict[str, int | str]:
    """Return what the best blocks depend on; ``group`` is 0 for int8 weights. Rows count as powers of two from 16."""
    rows = max(16, 1 << (num_rows - 1).bit_length())
    return {"rows": rows, "D": model_dim, "F": channels, "weights": f"int4/{group}" if group else "int8"}


def _call(x_MD, weights_LDF, of_groups, rows_M1, layer_1, *, group, bias, block_k, block_f, out_dtype, interpret):
    num_rows, model_dim = x_MD.shape
    channels = weights_LDF.shape[2]
    block_f = min(block_f, -(-channels // TILE) * TILE)
    steps_k = model_dim // block_k
    if group:
        tiles, parts = block_k // TILE, TILE // group
        scale_rows, sum_dtype = block_k // group, jnp.float32
        scratch = [pltpu.VMEM((scale_rows, block_f), jnp.float32)]
        if num_rows > _FEW_ROWS and parts > 1:
            operands = (_spread_rows(x_MD, 1, scaled_row_order()),)
            in_specs = [pl.BlockSpec((tiles, num_rows, TILE), lambda f, k, layer: (k, 0, 0))]
            body, scratch = scaled_body(group, bias), scratch * 2
        else:
            operands = _spread_rows(x_MD, parts, row_order()), _group_sums(x_MD, group, steps_k)
            in_specs = [
                pl.BlockSpec((tiles, parts * num_rows, TILE), lambda f, k, layer: (k, 0, 0)),
                pl.BlockSpec((None, 3 * num_rows, scale_rows), lambda f, k, layer: (k, 0, 0)),
            ]
            body = int4_body(group, bias)
    else:
        operands = (x_MD,)
        in_specs = [pl.BlockSpec((num_rows, block_k), lambda f, k, layer: (0, k))]
        body, scale_rows, scratch = int8_body, 1, []
        sum_dtype = jnp.int32 if x_MD.dtype == jnp.int8 else jnp.float32
    # Scales of groups change with the block of rows; those of channels are the same for all blocks of rows.
    scales_at = (lambda f, k, layer: (layer[0], k, f)) if group else (lambda f, k, layer: (layer[0], 0, f))
    in_specs += [
        pl.BlockSpec((None, block_k, block_f), lambda f, k, layer: (layer[0], k, f)),
        *[pl.BlockSpec((None, scale_rows, block_f), scales_at)] * len(of_groups),
        pl.BlockSpec((num_rows, 1), lambda f, k, layer: (0, 0)),
    ]
    weight_bytes = model_dim * channels * (4 if group else 8) // 8
    weight_bytes += sum(each.size // each.shape[0] * each.dtype.itemsize for each in of_groups)
    return pl.pallas_call(
        body,
        name="quant_matmul",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(channels, block_f), steps_k),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((num_rows, block_f), lambda f, k, layer: (0, f)),
            scratch_shapes=[pltpu.VMEM((num_rows, block_f), sum_dtype), *scratch],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, channels), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * model_dim * channels, bytes_accessed=weight_bytes, transcendentals=0
        ),
        interpret=interpret,
    )(layer_1, *operands, weights_LDF, *of_groups, rows_M1)


def _spread_rows(x_MD: jax.Array, parts: int, order_of_rows: list[int]) -> jax.Array:
    """Return the activations as [D / 128, parts x M, 128] in the order of the widened weights.

    Part p of a tile holds only the columns of the p-th group, with zeros elsewhere.
    """
    order = np.array(order_of_rows)
    num_rows, model_dim = x_MD.shape
    chosen_TO = np.arange(TILE)[:, None] == order
    of_part_PO = order // (TILE // parts) == np.arange(parts)[:, None]
    choice_PTO = jnp.asarray(chosen_TO & of_part_PO[:, None], x_MD.dtype)
    # A product with ones and zeros moves columns exactly, and faster than a gather or a transposition.
    tiled_MGT = x_MD.reshape(num_rows, model_dim // TILE, TILE)
    spread = jnp.einsum("mgt,pto->gpmo", tiled_MGT, choice_PTO, preferred_element_type=jnp.float32)
    return spread.reshape(model_dim // TILE, parts * num_rows, TILE).astype(x_MD.dtype)


def _group_sums(x_MD: jax.Array, group: int, steps: int) -> jax.Array:
    """Return the activations' sums over each group, [steps, 3 M, groups of a step], in three parts."""
    num_rows, model_dim = x_MD.shape
    sums_MG = x_MD.astype(jnp.float32).reshape(num_rows, model_dim // group, group).sum(2)
    sums_SMG = sums_MG.reshape(num_rows, steps, -1).swapaxes(0, 1)
    return jnp.concatenate(split_in_three(sums_SMG), axis=1)


def fit_block(model_dim: int, most: int, group: int) -> int:
    """Return the rows of weights per step: the largest allowed divisor of all rows, or all rows.

    Scales come in blocks of eight rows, so a step has eight groups or a multiple.
    """
    unit = 8 * group if group else TILE
    sizes = [size for size in range(unit, model_dim + 1, unit) if model_dim % size == 0]
    return max((size for size in sizes if size <= most), default=min(sizes, default=model_dim))


def _check(x_MD, weights, scales, minima, layer, activation_scales_M) -> int:
    """Return the size of the groups, 0 for none; raise ValueError if arguments do not match."""
    stacked = 0 if layer is None else 1
    if x_MD.ndim != 2 or weights.ndim != 2 + stacked:
        raise ValueError(
            f"activations {x_MD.shape} and weights {weights.shape} must be [M, D] and "
            f"{'[L, D, F]' if stacked else '[D, F] without layer='}"
        )
    num_rows, model_dim = x_MD.shape
    rows, channels = weights.shape[-2:]
    if rows != model_dim or model_dim % TILE:
        raise ValueError(f"weights of {rows} rows do not fit activations of {model_dim}, or no multiple of {TILE}")
    if num_rows == 0:
        raise ValueError("no activations: x has 0 rows")
    if x_MD.dtype not in (jnp.bfloat16, jnp.int8):
        raise ValueError(f"activations are {x_MD.dtype}, not bfloat16 or int8")
    if (x_MD.dtype == jnp.int8) != (activation_scales_M is not None):
        raise ValueError("int8 activations, and only they, need activation_scales_M")
    if activation_scales_M is not None and activation_scales_M.shape != (num_rows,):
        raise ValueError(f"activation_scales_M is {activation_scales_M.shape}, not ({num_rows},)")
    lead = weights.shape[:stacked]
    if weights.dtype == jnp.int8:
        if minima is not None:
            raise ValueError("int8 weights have no minima")
        if scales.shape != (*lead, channels):
            raise ValueError(f"scales of int8 weights {weights.shape} are {scales.shape}, not {(*lead, channels)}")
        return 0
    if scales.dtype not in (jnp.float32, jnp.int16):
        raise ValueError(f"scales are {scales.dtype}, not float32 or the bits of float16 as int16")
    if weights.dtype not in (jnp.int4, jnp.uint4):
        raise ValueError(f"weights are {weights.dtype}, not int8, int4 or uint4")
    if minima is not None and (minima.shape, minima.dtype) != (scales.shape, scales.dtype):
        raise ValueError(f"minima are {minima.dtype}{minima.shape}, but scales {scales.dtype}{scales.shape}")
    sizes = {group: (*lead, model_dim // group, channels) for group in GROUPS}
    for group, shape in sizes.items():
        if scales.shape == shape:
            return group
    raise ValueError(f"scales of int4 weights {weights.shape} are {scales.shape}, of groups of 32, 64 or 128 rows")
