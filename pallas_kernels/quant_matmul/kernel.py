"""The bodies of `quant_matmul`: weights are read from HBM in their stored form and widened in vector memory.

A step multiplies all rows of the activations by one block of weights, [block_k, block_f]. Blocks along the rows of the
weights (the last axis of the grid) add up in a float32 accumulator.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TILE = 128  # rows of weights that the matrix unit takes at once

# Four bits in the upper part of a bfloat16's mantissa, with the exponent of 16, read as 16 + number.
_SIXTEEN = 0x41804180
_MANTISSA = 0x00780078
_FLIP_SIGNS = -0x77777778  # 0x88888888: -8..7 become 0..15
BIAS = 24.0


def int8_body(_layer, x_ref, weights_ref, scales_ref, rows_ref, out_ref, sum_ref):
    """Multiply by int8 weights: on int8 units if the activations are int8 too, else widened to bfloat16."""
    _start(sum_ref)
    weights = weights_ref[...]
    if x_ref.dtype == jnp.int8:
        product = jnp.dot(x_ref[...], weights, preferred_element_type=jnp.int32)
    else:
        product = jnp.dot(x_ref[...], weights.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    sum_ref[...] += product

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        scaled = sum_ref[...].astype(jnp.float32) * scales_ref[...]
        out_ref[...] = (scaled * rows_ref[...]).astype(out_ref.dtype)


def int4_body(group: int) -> Callable[..., None]:
    """Return the body for int4 weights with one scale per ``group`` of their rows.

    If a group is smaller than TILE, the activations hold each row once per group, with zeros in the rest of the tile.
    Then one pass through the matrix unit gives each group's sum in separate rows, and the weights need no scaling.
    """
    parts = TILE // group

    def body(
        layer: Any,
        x_ref: Any,
        sums_ref: Any,
        weights_ref: Any,
        scales_ref: Any,
        rows_ref: Any,
        out_ref: Any,
        sum_ref: Any,
    ):
        del layer
        _start(sum_ref)
        rows = out_ref.shape[0]
        words = pltpu.bitcast(weights_ref[...], jnp.int32) ^ _FLIP_SIGNS
        total = sum_ref[...]
        for tile in range(weights_ref.shape[0] // TILE):
            part = words[tile * TILE // 8 : (tile + 1) * TILE // 8]
            product = jnp.dot(x_ref[tile], _widen(part), preferred_element_type=jnp.float32)
            product -= sums_ref[tile]
            for index in range(parts):
                scale = scales_ref[tile * parts + index : tile * parts + index + 1]
                total += product[index * rows : (index + 1) * rows] * scale
        sum_ref[...] = total

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            out_ref[...] = (sum_ref[...] * rows_ref[...]).astype(out_ref.dtype)

    return body


def _start(sum_ref: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)


def _widen(words: jax.Array) -> jax.Array:
    """Return words of eight four-bit numbers as bfloat16, each too large by BIAS, in the order of `row_order`."""
    pieces = []
    for index in range(4):
        shift = 4 * index - 3
        moved = words << 3 if shift < 0 else lax.shift_right_logical(words, jnp.full_like(words, shift))
        pieces.append(pltpu.bitcast((moved & _MANTISSA) | _SIXTEEN, jnp.bfloat16))
    return jnp.concatenate(pieces, axis=0)


def row_order() -> list[int]:
    """Return which row of a tile of weights is at each place after `_widen`.

    A word holds rows 8w to 8w + 7. Each of its halves gives one number per shift: rows 8w + i and 8w + i + 4.
    """
    return [8 * word + index + 4 * half for index in range(4) for word in range(TILE // 8) for half in range(2)]
