"""Codes of 4 bits that are numbers of any 16 levels, such as quantiles, widened in vector memory."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BITS = 4


def one_level(levels: tuple[float, ...], words: jax.Array, index: int) -> jax.Array:
    """Return the level of one of the eight codes of each word, in float32."""
    bits = [_is_set(words, 4 * index + bit) for bit in range(_BITS)]
    pairs = [jnp.int32(int(word)) for word in _bits_of(levels) << 16]
    return lax.bitcast_convert_type(_chosen(pairs, bits), jnp.float32)


def pair_of_levels(levels: tuple[float, ...], words: jax.Array, index: int) -> jax.Array:
    """Return the levels of the codes ``index`` of both halves of each word, as bfloat16 numbers."""
    bits = [_is_set_in_halves(words, 4 * index + bit) for bit in range(_BITS)]
    pairs = [jnp.int32(int(word)) for word in _bits_of(levels) << 16 | _bits_of(levels)]
    return _chosen(pairs, bits)


def _bits_of(levels: tuple[float, ...]) -> np.ndarray:
    """Return the bits of levels as bfloat16 numbers, in int32."""
    return np.array(levels, np.float32).astype(jnp.bfloat16).view(np.uint16).astype(np.int32)


def _is_set(words: jax.Array, bit: int) -> jax.Array:
    """Return all ones where a bit is set."""
    return lax.shift_right_arithmetic(words << (31 - bit), jnp.full_like(words, 31))


def _is_set_in_halves(words: jax.Array, bit: int) -> jax.Array:
    """Return all ones in the halves in which a bit is set."""
    ones = lax.shift_right_logical(words, jnp.full_like(words, bit)) & 0x00010001
    return (ones << 16) - ones


def _chosen(choices: list[jax.Array], bits: list[jax.Array]) -> jax.Array:
    """Return of each two neighbours the one that a bit chooses, the lowest bit first, until one is left."""
    for bit in bits:
        choices = [low ^ (bit & (low ^ high)) for low, high in zip(choices[::2], choices[1::2], strict=True)]
    return choices[0]
