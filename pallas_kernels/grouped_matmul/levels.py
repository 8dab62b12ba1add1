"""Codes of 4 bits that are numbers of any 16 levels, such as quantiles, widened in vector memory.

A look-up in a vector register is done by the unit that moves lanes, a choice among constants by those that compute:
each has a part of a tile's codes, so that both are at work.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LANES, _BITS = 128, 4
# Of the four numbers of half a word, so many are looked up.
_LOOKED_UP = 2


def one_level(levels: tuple[float, ...], words: jax.Array, index: int) -> jax.Array:
    """Return the level of one of the eight codes of each word, in float32."""
    if index % _BITS < _LOOKED_UP:
        found = _looked_up(_bits_of(levels) << 16, words, index)
    else:
        bits = [_is_set(words, _BITS * index + bit) for bit in range(_BITS)]
        found = _chosen(_bits_of(levels) << 16, bits)
    return lax.bitcast_convert_type(found, jnp.float32)


def pair_of_levels(levels: tuple[float, ...], words: jax.Array, index: int) -> jax.Array:
    """Return the levels of the codes ``index`` of both halves of each word, as bfloat16 numbers."""
    numbers = _bits_of(levels)
    if index < _LOOKED_UP:
        return _looked_up(numbers, words, index) | _looked_up(numbers << 16, words, index + _BITS)
    return _chosen(numbers << 16 | numbers, [_is_set_in_halves(words, _BITS * index + bit) for bit in range(_BITS)])


def _bits_of(levels: tuple[float, ...]) -> np.ndarray:
    """Return the bits of levels as bfloat16 numbers, in int32."""
    return np.array(levels, np.float32).astype(jnp.bfloat16).view(np.uint16).astype(np.int32)


def _looked_up(table: np.ndarray, words: jax.Array, index: int) -> jax.Array:
    """Return what a table has for one of the eight codes of each word."""
    count, channels = words.shape
    lane = lax.broadcasted_iota(jnp.int32, (count, _LANES), 1)
    in_lanes = jnp.zeros((count, _LANES), jnp.int32)
    for place, number in enumerate(table):
        in_lanes = jnp.where(lane == place, jnp.int32(int(number)), in_lanes)
    codes = lax.shift_right_logical(words, jnp.full_like(words, _BITS * index)) & 15
    parts = [codes[:, start : start + _LANES] for start in range(0, channels, _LANES)]
    found = [jnp.take_along_axis(in_lanes, part, axis=1, mode="promise_in_bounds") for part in parts]
    return jnp.concatenate(found, axis=1)


def _is_set(words: jax.Array, bit: int) -> jax.Array:
    """Return all ones where a bit is set."""
    return lax.shift_right_arithmetic(words << (31 - bit), jnp.full_like(words, 31))


def _is_set_in_halves(words: jax.Array, bit: int) -> jax.Array:
    """Return all ones in the halves in which a bit is set."""
    ones = lax.shift_right_logical(words, jnp.full_like(words, bit)) & 0x00010001
    return (ones << 16) - ones


def _chosen(table: np.ndarray, bits: list[jax.Array]) -> jax.Array:
    """Return of each two neighbours the one that a bit chooses, the lowest bit first, until one is left."""
    choices = [jnp.int32(int(number)) for number in table]
    for bit in bits:
        choices = [low ^ (bit & (low ^ high)) for low, high in zip(choices[::2], choices[1::2], strict=True)]
    return choices[0]
