"""Keyed noise: a function of only (seed, sample, position, role, token id).

Threefry-2x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) is implemented here, in the layout of
JAX's partitionable random bits, so no JAX setting and no array shape changes a token's noise.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.notation import Array, Float, Int, UInt32

# The use of a random number. Draft, accept and residual noise differ at every level of nested speculation.
ROLE_TARGET = 0
ROLE_DRAFT = 1
ROLE_ACCEPT = 2
ROLE_RESIDUAL = 3

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def role(kind: int, level: int = 0) -> int:
    """Return the role number of a kind of noise at a level of nested speculation; the target's is always 0."""
    return ROLE_TARGET if kind == ROLE_TARGET else kind + 3 * level


def threefry2x32(key0: Any, key1: Any, counter0: Any, counter1: Any) -> tuple[Any, Any]:
    """Encrypt the counters with the keys: uint32 arrays of NumPy or JAX, broadcast together."""
    # Unrolled: on XLA's CPU backend the rolled loop of JAX's own primitive is four times slower.
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    x, y = counter0 + keys[0], counter1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def request_key(seed: int, sample: int = 0) -> UInt32[np.ndarray, "2"]:
    """Return the key data of one sample of a request.

    The key is ``jax.random.key(seed, impl="threefry2x32")``, but keeps the upper half of a seed beyond 32 bits (JAX
    drops it unless x64 is on). Samples from 1 on fold in their number.
    """
    key = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    if sample == 0:
        return key
    halves = threefry2x32(key[:1], key[1:], np.zeros(1, np.uint32), np.array([sample], np.uint32))
    return np.concatenate(halves)


def fold_in(key_data: UInt32[Array | np.ndarray, "*rows 2"], number: Any) -> UInt32[Array, "... 2"]:
    """Fold a non-negative integer into each key, as ``jax.random.fold_in`` does; the two broadcast."""
    number = jnp.asarray(number).astype(jnp.uint32)
    return jnp.stack(threefry2x32(key_data[..., 0], key_data[..., 1], jnp.zeros_like(number), number), axis=-1)


def random_bits(
    key_data: UInt32[Array | np.ndarray, "*rows 2"], token_ids_V: Int[Array, "V"] | UInt32[Array, "V"]
) -> UInt32[Array, "*rows V"]:
    """Draw 32 bits for each token id, like ``jax.random.bits`` for a vector in its partitionable form."""
    ids_V = token_ids_V.astype(jnp.uint32)
    high, low = threefry2x32(key_data[..., :1], key_data[..., 1:], jnp.zeros_like(ids_V), ids_V)
    return high ^ low


def gumbel_of_bits(bits: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Convert uniform bits to standard Gumbel noise in float32, finite for all bits.

    Small bits give large values, because there float32 resolves the uniform to 2**-33. The upper tail, which decides
    draws, then ends at 22.9 instead of 16.6.
    """
    uniform = (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    exponential = -jnp.log1p(-jnp.minimum(uniform, np.float32(1 - 2.0**-24)))
    return -jnp.log(exponential)


def gumbel(
    key_data: UInt32[Array | np.ndarray, "*rows 2"],
    position: Int[Array, "..."],
    role: int | Int[Array, ""],
    token_ids_V: Int[Array, "V"] | UInt32[Array, "V"],
) -> Float[Array, "... V"]:
    """Draw the Gumbel noise of each token id at each position; keys and positions broadcast."""
    return gumbel_of_bits(random_bits(fold_in(fold_in(key_data, position), role), token_ids_V))


def uniform(
    key_data: UInt32[Array | np.ndarray, "*rows 2"],
    position: Int[Array, "..."],
    role: int | Int[Array, ""],
    lanes_V: Int[Array, "V"] | UInt32[Array, "V"],
) -> Float[Array, "... V"]:
    """Draw numbers between 0 and 1, both excluded, for each lane at each position; keys and positions broadcast."""
    bits = random_bits(fold_in(fold_in(key_data, position), role), lanes_V)
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24) + np.float32(2.0**-25)


def vocabulary_ids(vocab_size: int) -> Int[Array, "V"]:
    """Return the token ids from 0 on."""
    return lax.iota(jnp.int32, vocab_size)
