"""What changes while a batch of beam searches runs: one frozen pytree.

Letters: B searches, one a prompt; W running texts each (the width); Q = B * W rows of the cache, a search's rows side
by side; C candidates a step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.cache.paged import PagedCache
from jaxinfer.notation import Array, Int
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.history import History

# What transformers adds to a score that must not win. It is finite, so that such texts still have an order.
OUT_OF_RUNNING = -1e9


class SearchRule(NamedTuple):
    """How texts that ended are ranked, and when a search ends; scalars, so that changing them compiles nothing.

    ``ends_when_full`` is ``early_stopping=True``; ``may_grow_longer``, for "never" with a penalty that favours long
    texts, scores what still runs as if it reached its limit at no cost.
    """

    length_penalty: Any
    ends_when_full: Any
    may_grow_longer: Any


class Ended(NamedTuple):
    """The best texts that ended, best first; -inf scores mark free places. ``tokens_BWS`` holds the prompt too."""

    tokens_BWS: Any
    logprobs_BWS: Any
    lengths_BW: Any
    scores_BW: Any


class BeamState(NamedTuple):
    """A batch of searches between two steps.

    All running texts of a search are ``lengths_B`` tokens long, prompt included; the cache holds them all but for their
    last tokens. ``scores_BW`` is the log-probability of their new tokens after penalties and bias, best first.
    ``limits_B`` is the length at which every text ends, ``reach_B`` the length up to which the cache serves
    (`jaxinfer.decoding.rope_crossing`). ``adapters_B`` are the searches' loaded adapters, 0 for none. ``logprobs_BWS``
    are of the raw logits and zero in the prompt. ``sampling`` has one row a search.
    """

    tokens_BWS: Any
    logprobs_BWS: Any
    scores_BW: Any
    lengths_B: Any
    prompt_lengths_B: Any
    context_lengths_B: Any
    limits_B: Any
    reach_B: Any
    done_B: Any
    steps_B: Any
    adapters_B: Any
    ended: Ended
    cache: LayeredCache
    sampling: SamplingArrays

    @property
    def width(self) -> int:
        """W: how many texts each search has running."""
        return self.tokens_BWS.shape[1]

    @property
    def waits_B(self) -> Array:
        """Tell the searches that cannot go on before their cache is computed anew."""
        return ~self.done_B & (self.lengths_B >= self.reach_B)

    @property
    def history(self) -> History:
        """The running texts, as the sampling transforms read them."""
        tokens_QS = self.tokens_BWS.reshape(-1, self.tokens_BWS.shape[-1])
        return History(tokens_QS, self.each_row(self.prompt_lengths_B), self.each_row(self.lengths_B))

    @property
    def row_sampling(self) -> SamplingArrays:
        """The searches' sampling parameters, once for each of their rows."""
        return jax.tree.map(self.each_row, self.sampling)

    def each_row(self, values_B: Array) -> Array:
        """Repeat what each search has for its rows."""
        spread = jnp.broadcast_to(values_B[:, None], (values_B.shape[0], self.width, *values_B.shape[1:]))
        return spread.reshape(values_B.shape[0] * self.width, *values_B.shape[1:])


def initial_beams(
    prompts: list[list[int]],
    limits: Int[np.ndarray, " B"],
    reach: Int[np.ndarray, " B"],
    width: int,
    num_slots: int,
    cache: LayeredCache,
    sampling: SamplingArrays,
    dtype: Any,
    adapters: Int[np.ndarray, " B"] | None = None,
) -> BeamState:
    """Place prompts into a state that nothing has been computed for; an empty prompt marks a search that is padding.

    ``cache`` has one row a running text, ``sampling`` one a search; ``dtype`` is that of scores.
    """
    shape, count = (len(prompts), width, num_slots), len(prompts)
    tokens_BWS, lengths_B = np.zeros(shape, np.int32), np.zeros(count, np.int32)
    for search, prompt in enumerate(prompts):
        tokens_BWS[search, :, : len(prompt)] = prompt
        lengths_B[search] = len(prompt)
    # All texts are the prompt as yet: all but one stand back, or each continuation would count width times.
    scores_BW = np.full(shape[:2], OUT_OF_RUNNING, dtype)
    scores_BW[:, 0] = 0
    at_least_1_B = np.maximum(lengths_B, 1)
    arrays = {
        "tokens_BWS": tokens_BWS,
        "logprobs_BWS": np.zeros(shape, np.float32),
        "scores_BW": scores_BW,
        "lengths_B": at_least_1_B,
        "prompt_lengths_B": at_least_1_B,
        "context_lengths_B": at_least_1_B,
        "limits_B": limits,
        "reach_B": reach,
        "done_B": lengths_B == 0,
        "steps_B": np.zeros(count, np.int32),
        "adapters_B": np.zeros(count, np.int32) if adapters is None else adapters,
        "ended": Ended(
            tokens_BWS=tokens_BWS,
            logprobs_BWS=np.zeros(shape, np.float32),
            lengths_BW=np.zeros(shape[:2], np.int32),
            scores_BW=np.full(shape[:2], -np.inf, dtype),
        ),
    }
    # All at once, and made by NumPy: JAX would compile a program for each kind of them. Each is an array of its own,
    # since all are given away.
    return BeamState(**jax.tree.map(lambda array: jax.device_put(array.copy()), arrays), cache=cache, sampling=sampling)


def spread_rows(cache: LayeredCache, width: int) -> LayeredCache:
    """Return the cache with each row ``width`` times; every array of its parts is ``[L, B, ...]``."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=1), cache)


def follow_parents(cache: LayeredCache, parents_BW: Int[Array, "B W"], held_B: Int[Array, " B"]) -> LayeredCache:
    """Return the cache in which each text goes on from its parent's row, of which ``held_B`` slots are in use.

    Pages that are full change hands, and only the last one is copied; of a dense cache, whole rows are.
    """
    batch, width = parents_BW.shape
    if not any(isinstance(part, PagedCache) for part in cache.parts):
        return _reorder_rows(cache, parents_BW)
    parents_Q = (jnp.arange(batch, dtype=parents_BW.dtype)[:, None] * width + parents_BW).reshape(-1)
    held_Q = jnp.repeat(held_B, width)
    return cache._replace(
        parts=tuple(part.forked(parents_Q, held_Q) for part in cache.parts if isinstance(part, PagedCache))
    )


def _reorder_rows(cache: LayeredCache, parents_BW: Int[Array, "B W"]) -> LayeredCache:
    """Return the cache with each row in place of its parent's, in as much more memory as one layer takes."""

    def reorder(leaf: Array) -> Array:
        def reorder_layer(layer: Any, leaf: Array) -> Array:
            rows = leaf[layer].reshape(*parents_BW.shape, *leaf.shape[2:])
            chosen = jax.vmap(lambda rows, parents_W: jnp.take(rows, parents_W, axis=0, mode="clip"))(rows, parents_BW)
            return leaf.at[layer].set(chosen.reshape(leaf.shape[1:]))

        return jax.lax.fori_loop(0, leaf.shape[0], reorder_layer, leaf)

    return jax.tree.map(reorder, cache)
