"""Sparse weights, compacted: which of a row are kept, and where they are (`Format.kept`).

Arrays are NumPy's or JAX's; all but `largest` return what they are given.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.notation import Array, Bool, Float
from jaxinfer.ops.few_bits.formats import Format

# The weights of a byte of places.
_BYTE = 8


def largest(scores: Float[Array, "*lead K"], form: Format) -> Bool[Array, "*lead K"]:
    """Return which weights a form keeps: those of the largest scores, the first of equal ones; of blocks, sums.

    What is no number is kept, so that it is found there.
    """
    assert form.kept is not None
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    if form.block > 1:
        sums = jnp.sum(scores.reshape(*scores.shape[:-1], -1, form.block), axis=-1)
        ranks = jnp.argsort(jnp.argsort(-sums, axis=-1, stable=True), axis=-1)
        return jnp.repeat(ranks < form.num_kept(sums.shape[-1]), form.block, axis=-1)
    count, among = form.kept
    groups = scores.reshape(*scores.shape[:-1], -1, among)
    # Of so few, comparing each with each is faster than sorting.
    one, other = groups[..., :, None], groups[..., None, :]
    is_ahead = (other > one) | ((other == one) & np.tri(among, k=-1, dtype=bool))
    return (jnp.sum(is_ahead, axis=-1) < count).reshape(scores.shape)


def compacted(weights: Float[Array, "*lead K"], is_kept: Bool[Array, "*lead K"], form: Format) -> tuple[Array, Array]:
    """Return the weights that are kept, in bfloat16, and their places; as many of a row as the form says."""
    assert form.kept is not None
    lead, weights = weights.shape[:-1], weights.astype(jnp.bfloat16)
    if form.block > 1:
        is_there = is_kept.reshape(*lead, -1, form.block)[..., 0]
        places = jnp.argsort(~is_there, axis=-1, stable=True)[..., : form.num_kept(is_there.shape[-1])]
        blocks = jnp.take_along_axis(weights.reshape(*lead, -1, form.block), places[..., None], axis=-2)
        return blocks.reshape(*lead, -1), places.astype(jnp.uint16)
    count, among = form.kept
    is_kept, groups = is_kept.reshape(*lead, -1, among), weights.reshape(*lead, -1, among)
    ranks = jnp.cumsum(is_kept, axis=-1) - is_kept
    stored = [jnp.sum(jnp.where(is_kept & (ranks == rank), groups, 0), axis=-1) for rank in range(count)]
    bits = is_kept.reshape(*lead, -1, _BYTE).astype(jnp.uint8) << np.arange(_BYTE, dtype=np.uint8)
    return jnp.stack(stored, axis=-1).reshape(*lead, -1), jnp.sum(bits, axis=-1, dtype=jnp.uint8)


def spread(stored: Any, places: Any, form: Format) -> Any:
    """Return the weights in float32, with zeros for those that are not stored."""
    assert form.kept is not None
    numpy: Any = np if isinstance(stored, np.ndarray) else jnp
    lead, stored = stored.shape[:-1], stored.astype(np.float32)
    if form.block > 1:
        blocks = stored.reshape(*lead, -1, form.block)
        every = np.arange(form.width_of(stored.shape[-1] * form.bits // 8) // form.block)
        is_own = places[..., None, :].astype(np.int32) == every[:, None]
        found = numpy.take_along_axis(blocks, numpy.argmax(is_own, axis=-1)[..., None], axis=-2)
        return numpy.where(numpy.any(is_own, axis=-1)[..., None], found, 0).reshape(*lead, -1)
    count, among = form.kept
    bits = (places[..., None] >> np.arange(_BYTE, dtype=np.uint8)) & 1
    bits = bits.reshape(*lead, -1, among).astype(np.int32)
    ranks, stored = numpy.cumsum(bits, axis=-1) - bits, stored.reshape(*lead, -1, count)
    weights = numpy.zeros((), np.float32)
    for rank in range(count):
        weights = numpy.where((bits == 1) & (ranks == rank), stored[..., rank : rank + 1], weights)
    return weights.reshape(*lead, -1)


def are_places(places: np.ndarray, width: int, form: Format) -> bool:
    """Whether places are those of as many weights as rows of ``width`` store; products read what they say."""
    if form.block > 1:
        return bool((np.diff(places.astype(np.int32), axis=-1) > 0).all() and (places < width // form.block).all())
    assert form.kept is not None
    count, among = form.kept
    bits = np.unpackbits(places.reshape(-1), bitorder="little").reshape(-1, among)
    return bool((np.sum(bits, axis=-1) == count).all())
