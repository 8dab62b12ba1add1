"""What changes while a batch of texts grows: one frozen pytree."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.notation import Array, Bool, Int
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.history import History


class DecodeState(NamedTuple):
    """One batch of texts between two steps. Rows are left-aligned, each with its own length.

    ``tokens_BS`` int32 holds prompt and output; ``lengths_B`` counts them. The cache holds the positions
    ``0 .. length - 2``; the token at ``length - 1`` is *current*: known, not yet written. ``limits_B`` is the length at
    which a row ends for lack of room. ``context_lengths_B``, which rotary positions depend on (`rotary_tables`), is the
    length of text that prefill filled the cache for: the prompt's, or a later one (`jaxinfer.decoding.rope_crossing`).
    ``logprobs_BS`` float32 and ``from_draft_BS`` bool (was the token accepted from a draft, or the target's own?) stand
    beside ``tokens_BS`` and are zero in the prompt; log-probabilities also in rows that do not ask for them.
    ``steps_B`` counts a row's verifications by the target after prefill, ``passes_B`` float32 the reads of its blocks
    that they and drafting took (layers read / layers), ``steps_ahead_B`` the steps of a model that decoded ahead;
    ``drafted_B`` and ``accepted_B`` the draft tokens that they verified and took, ``accepted_by_depth_BM`` the latter
    by depth in the tree (column 0: depth 1).
    ``adapters_B`` int32 is the loaded adapter that a row has (`jaxinfer.models.adapters`), 0 for none.
    ``grammar_states_B`` int32 is the state of the row's grammar after its text, -1 without one.
    """

    tokens_BS: Any
    lengths_B: Any
    prompt_lengths_B: Any
    context_lengths_B: Any
    limits_B: Any
    finished_B: Any
    logprobs_BS: Any
    from_draft_BS: Any
    steps_B: Any
    passes_B: Any
    steps_ahead_B: Any
    drafted_B: Any
    accepted_B: Any
    accepted_by_depth_BM: Any
    grammar_states_B: Any
    adapters_B: Any
    cache: LayeredCache
    sampling: SamplingArrays

    @property
    def history(self) -> History:
        """The committed text, as the sampling transforms read it."""
        states_B1 = self.grammar_states_B[:, None]
        return History(self.tokens_BS, self.prompt_lengths_B, self.lengths_B, grammar_states_BM=states_B1)


def is_stop(state: DecodeState, tokens_BM: Int[Array, "B M"]) -> Bool[Array, "B M"]:
    """Return which tokens end their row: one of its stop ids."""
    return (tokens_BM[:, :, None] == state.sampling.stop_ids_BE[:, None, :]).any(axis=-1)


def initial_state(
    prompts: list[list[int]],
    max_new_tokens: list[int],
    num_slots: int,
    max_depth: int,
    cache: LayeredCache,
    sampling: SamplingArrays,
    grammar_states_B: np.ndarray | None = None,
    adapters_B: np.ndarray | None = None,
) -> DecodeState:
    """Place prompts into a state that nothing has been computed for; an empty prompt marks a row that pads the batch.

    Without ``grammar_states_B`` no row has a grammar, without ``adapters_B`` none an adapter. ``num_slots`` is the
    cache's; every prompt, its new tokens and the strategy's headroom fit into it.
    """
    batch = len(prompts)
    tokens_BS = np.zeros((batch, num_slots), np.int32)
    lengths_B = np.zeros((batch,), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, : len(prompt)] = prompt
        lengths_B[row] = len(prompt)

    def counts(*columns: int) -> np.ndarray:
        return np.zeros((batch, *columns), np.int32)

    rows = {
        "tokens_BS": tokens_BS,
        "lengths_B": np.maximum(lengths_B, 1),
        "prompt_lengths_B": np.maximum(lengths_B, 1),
        "context_lengths_B": np.maximum(lengths_B, 1),
        "limits_B": lengths_B + np.asarray(max_new_tokens, np.int32),
        "finished_B": lengths_B == 0,
        "logprobs_BS": np.zeros((batch, num_slots), np.float32),
        "from_draft_BS": np.zeros((batch, num_slots), bool),
        "steps_B": counts(),
        "passes_B": np.zeros((batch,), np.float32),
        "steps_ahead_B": counts(),
        "drafted_B": counts(),
        "accepted_B": counts(),
        "accepted_by_depth_BM": counts(max(max_depth, 1)),
        "grammar_states_B": np.full((batch,), -1, np.int32) if grammar_states_B is None else grammar_states_B,
        "adapters_B": counts() if adapters_B is None else adapters_B,
    }
    # All at once, and made by NumPy: JAX would compile a program for each kind of them.
    return DecodeState(**jax.device_put(rows), cache=cache, sampling=sampling)
