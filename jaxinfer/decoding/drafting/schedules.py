"""How many tokens a draft model drafts next, from how many were accepted."""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Int

Schedule = Literal["constant", "heuristic", "confidence", "bass"]
SCHEDULES: tuple[str, ...] = ("constant", "heuristic", "confidence", "bass")

# What each begins with, and the most that it reaches: transformers' constants, and those of BASS (2404.15778).
FIRST = {"constant": 5, "heuristic": 5, "confidence": 20, "bass": 7}
MOST = {"constant": 5, "heuristic": 20, "confidence": 20, "bass": 32}
_BASS_INCREASE, _BASS_DIVISOR = 2, 10


class Lengths(NamedTuple):
    """Draft lengths of the next step, and, for BASS, 1 after a step in which no row accepted all."""

    counts_B: Int[Array, " B"]
    shrank: Int[Array, ""]


def first_lengths(batch: int, first: int) -> Lengths:
    """Return the lengths of the first step."""
    return Lengths(jnp.full((batch,), first, jnp.int32), jnp.int32(0))


def next_lengths(
    schedule: str, lengths: Lengths, accepted_B: Int[Array, " B"], running_B: Bool[Array, " B"], most: int
) -> Lengths:
    """Return the lengths after a step in which each row accepted ``accepted_B`` of its ``lengths.counts_B`` drafts.

    ``heuristic`` is each row's own: two more after full acceptance, else one less. ``bass`` has one length for the
    batch, set by the row that accepted most. The others stay as they are.
    """
    counts_B, shrank = lengths
    if schedule == "heuristic":
        grown_B = jnp.where(accepted_B >= counts_B, counts_B + 2, counts_B - 1)
        return Lengths(jnp.clip(grown_B, 1, most), shrank)
    if schedule == "bass":
        best = jnp.max(jnp.where(running_B, accepted_B, 0))
        length = counts_B[0]
        shorter = length - -(-length // _BASS_DIVISOR) - shrank
        shorter = jnp.maximum(jnp.maximum(1, best), shorter)
        is_full = best >= length
        length = jnp.where(is_full, jnp.minimum(length + _BASS_INCREASE, most), shorter)
        return Lengths(jnp.broadcast_to(length, counts_B.shape), jnp.where(is_full, 0, 1).astype(jnp.int32))
    return lengths
