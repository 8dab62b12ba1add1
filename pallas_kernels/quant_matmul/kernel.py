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
BIAS = 16.0


def int8_body(_layer, x_ref, weights_ref, scales_ref, rows_ref, out_ref, sum_ref):
    """Multiply by int8 weights: on int8 units if the activations are int8 too, else widened to bfloat16."""
    _start(sum_ref)
    weights = weights_ref[...]
    if x_ref.dtype == jnp.int8:
        product = jnp.dot(x_ref[...], weights, preferred_element_type=jnp.int32)
    else:
        product = jnp.dot(x_ref[...], weights.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    sum_ref[...] += product
    _finish(sum_ref, rows_ref, out_ref, scales_ref)


def int4_body(group: int, bias: float) -> Callable[..., None]:
    """Return the body for weights of four bits with one scale, and maybe a minimum, per ``group`` of their rows.

    If a group is smaller than TILE, the activations hold each row once per group, with zeros in the rest of the tile.
    Then one pass through the matrix unit gives each group's sum in separate rows, and the weights need no scaling.
    ``bias`` is what a widened number is too large by. It and the minima multiply sums of activations.
    """
    parts = TILE // group

    def body(_layer: Any, x_ref: Any, sums_ref: Any, weights_ref: Any, scales_ref: Any, *others: Any):
        *minima_ref, rows_ref, out_ref, sum_ref, scale_ref = others
        _start(sum_ref)
        rows = out_ref.shape[0]
        # In memory, from where one row of them is read into all rows of a register.
        scales = _as_float32(scales_ref[...])
        scale_ref[...] = scales
        total = sum_ref[...] + _products_of_sums(sums_ref, -bias * scales, *minima_ref)
        words = _words(weights_ref)
        for tile in range(weights_ref.shape[0] // TILE):
            part = words[tile * TILE // 8 : (tile + 1) * TILE // 8]
            product = jnp.dot(x_ref[tile], _widen(part), preferred_element_type=jnp.float32)
            for index in range(parts):
                of_group = product[index * rows : (index + 1) * rows]
                total += of_group * scale_ref[pl.ds(tile * parts + index, 1)]
        sum_ref[...] = total
        _finish(sum_ref, rows_ref, out_ref)

    return body


def scaled_body(group: int, bias: float) -> Callable[..., None]:
    """Return the body for many rows: weights are scaled, and rounded to bfloat16, before they are multiplied."""

    def body(_layer: Any, x_ref: Any, weights_ref: Any, scales_ref: Any, *others: Any):
        *minima_ref, rows_ref, out_ref, sum_ref, scale_ref, added_ref = others
        _start(sum_ref)
        scales = _as_float32(scales_ref[...])
        scale_ref[...] = scales
        added = -bias * scales
        for ref in minima_ref:
            added += _as_float32(ref[...])
        added_ref[...] = added
        words = _words(weights_ref)
        total = sum_ref[...]
        for tile in range(weights_ref.shape[0] // TILE):
            part = words[tile * TILE // 8 : (tile + 1) * TILE // 8]
            scale, add = (_of_words(ref, tile, group) for ref in (scale_ref, added_ref))
            pieces = [_one_of_eight(part, index) * scale + add for index in range(8)]
            weights = jnp.concatenate(pieces, axis=0).astype(jnp.bfloat16)
            total += jnp.dot(x_ref[tile], weights, preferred_element_type=jnp.float32)
        sum_ref[...] = total
        _finish(sum_ref, rows_ref, out_ref)

    return body


def _of_words(ref: Any, tile: int, group: int) -> jax.Array:
    """Return what each word of a tile, eight rows of weights, is multiplied by: [16, F]."""
    parts, words = TILE // group, group // 8
    rows = [jnp.broadcast_to(ref[pl.ds(tile * parts + part, 1)], (words, ref.shape[1])) for part in range(parts)]
    return jnp.concatenate(rows, axis=0)


def _one_of_eight(words: jax.Array, index: int) -> jax.Array:
    """Return one of the eight numbers of each word in float32, too large by BIAS."""
    shift = 4 * index - 19
    moved = words << -shift if shift < 0 else lax.shift_right_logical(words, jnp.full_like(words, shift))
    return lax.bitcast_convert_type((moved & 0x00780000) | 0x41800000, jnp.float32)


def _words(weights_ref: Any) -> jax.Array:
    """Return words of eight numbers of 0 to 15."""
    words = pltpu.bitcast(weights_ref[...], jnp.int32)
    return words ^ _FLIP_SIGNS if weights_ref.dtype == jnp.int4 else words


def _products_of_sums(sums_ref: Any, added: jax.Array, *minima_ref: Any) -> jax.Array:
    """Return sums of activations, in parts, times what is added to a group's weights, as exact as in float32."""
    for ref in minima_ref:
        added += _as_float32(ref[...])
    rows = sums_ref.shape[0] // 3
    total = jnp.zeros((rows, added.shape[1]), jnp.float32)
    # What is left out is less than the last bit of float32.
    for count, part in zip((3, 2, 1), split_in_three(added)):
        products = jnp.dot(sums_ref[: count * rows], part, preferred_element_type=jnp.float32)
        for index in range(count):
            total += products[index * rows : (index + 1) * rows]
    return total


def split_in_three(numbers: jax.Array) -> list[jax.Array]:
    """Return bfloat16 numbers that add up to float32 ones, the largest first."""
    parts = []
    for _ in range(3):
        # By bits: a compiler may take a rounded number for the one that it was rounded from.
        bits = lax.bitcast_convert_type(numbers, jnp.int32) & -0x10000
        high = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(high.astype(jnp.bfloat16))
        numbers -= high
    return parts


def _as_float32(numbers: jax.Array) -> jax.Array:
    """Return numbers in float32; those of 16 bits are the bits of float16, which the chip does not know."""
    if numbers.dtype == jnp.float32:
        return numbers
    bits = numbers.astype(jnp.int32)
    size = bits & 0x7FFF
    normal = lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    found = jnp.where(size < 0x400, size.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -found, found)


def _start(sum_ref: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)


def _finish(sum_ref: Any, rows_ref: Any, out_ref: Any, *scales_ref: Any) -> None:
    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        found = sum_ref[...].astype(jnp.float32)
        for ref in scales_ref:
            found *= ref[...]
        out_ref[...] = (found * rows_ref[...]).astype(out_ref.dtype)


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


def scaled_row_order() -> list[int]:
    """Return which row of a tile of weights is at each place in `scaled_body`."""
    return [8 * word + index for index in range(8) for word in range(TILE // 8)]
