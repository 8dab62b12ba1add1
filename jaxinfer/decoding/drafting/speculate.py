"""Decoding ahead on a cache that is cheaper than the target's: speculation inside speculation."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import decode_step
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.decoding.trees.tree import DraftTree, chain
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int


def speculate(
    model: Model,
    strategy: Strategy,
    memory: Any,
    drafter_params: Any,
    state: DecodeState,
    cache: LayeredCache,
    count: int | Int[Array, " B"],
) -> tuple[DecodeState, Any]:
    """Decode each text up to ``count`` tokens further by a strategy over another cache.

    Return that future, and what the strategy then remembers. It draws with the target's own noise, and ends where the
    text will: at a stop token, and one token short of its limit, as verifying gives one more. The future's ``passes_B``
    count from zero. Steps have no fixed rows, since drafts need nobody's bits.
    """
    model = replace(model, decoder=replace(model.decoder, backend=replace(model.decoder.backend, step_rows=1)))
    limits_B = jnp.minimum(state.lengths_B + count, state.limits_B - 1)
    future = state._replace(
        cache=cache,
        limits_B=limits_B,
        finished_B=state.finished_B | (state.lengths_B >= limits_B),
        # Nobody reads log-probabilities of drafts, and each takes every logit.
        sampling=state.sampling._replace(reports_B=jnp.zeros_like(state.sampling.reports_B)),
        passes_B=jnp.zeros_like(state.passes_B),
    )

    def advance(carry: tuple[DecodeState, Any]) -> tuple[DecodeState, Any]:
        return decode_step(model, strategy, drafter_params, *carry)

    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[0].finished_B), advance, (future, memory))


def future_chain(state: DecodeState, future: DecodeState, count: int) -> DraftTree:
    """Return the current tokens and what a future has after them, as a chain of ``count`` drafts."""
    index_1M = jnp.arange(count + 1)[None, :]
    tokens_BM = jnp.take_along_axis(future.tokens_BS, state.lengths_B[:, None] - 1 + index_1M, axis=1, mode="clip")
    return chain(tokens_BM, index_1M <= (future.lengths_B - state.lengths_B)[:, None])
