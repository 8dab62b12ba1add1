"""Watches a strategy at work: how deep its drafts are taken, what is refused, and which sibling it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer import LanguageModel, Strategy
from jaxinfer.decoding.acceptance.walk import Walk, is_draft
from jaxinfer.decoding.batch import Request, RunningBatch
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prefilled, Proposal, Verified
from jaxinfer.models.model import Model
from tests.decoding.wrapped import Wrapped


class Sightings(NamedTuple):
    """In how many steps a row took a draft at depth 2, refused one, had siblings, and took one that was not the first.

    Of siblings only those count that are not the same token.
    """

    deep_B: Any
    refused_B: Any
    branched_B: Any
    later_B: Any


class Watch(NamedTuple):
    """A strategy's own memory, the rows as they were before the step, and what has been seen."""

    inner: Any
    running_B: Any
    lengths_B: Any
    seen: Sightings


@dataclass(frozen=True)
class Watched(Wrapped):
    """Do as another strategy does, and count what becomes of its drafts."""

    name: ClassVar[str] = "watched"

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Watch:
        zeros_B = jnp.zeros_like(state.lengths_B)
        inner = self.strategy.start(model, params, state, prefilled)
        # Copies, as one array cannot be given away twice.
        seen = Sightings(*(jnp.copy(zeros_B) for _ in Sightings._fields))
        return Watch(inner, ~state.finished_B, jnp.copy(state.lengths_B), seen)

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Watch) -> Proposal:
        proposal = self.strategy.propose(model, params, state, memory.inner)
        return proposal._replace(memory=Watch(proposal.memory, ~state.finished_B, state.lengths_B, memory.seen))

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Watch:
        watch: Watch = proposal.memory
        inner_proposal = proposal._replace(memory=watch.inner)
        inner = self.strategy.observe(model, params, state, inner_proposal, verified, draws_BM, walk)
        tree, draft_BM = proposal.tree, is_draft(proposal.tree)
        # A text may end within the path.
        accepted_B = jnp.minimum(walk.taken_B - 1, state.lengths_B - watch.lengths_B)
        last_B1 = jnp.take_along_axis(walk.path_BM, walk.taken_B[:, None] - 1, axis=1)
        goes_on_B = watch.running_B & ~state.finished_B
        refused_B = goes_on_B & (draft_BM & (tree.parents_BM == last_B1)).any(axis=1)
        deep_B = watch.running_B & (accepted_B >= 2)
        index_M = jnp.arange(draft_BM.shape[1])
        has_earlier_BMM = (tree.parents_BM[:, :, None] == tree.parents_BM[:, None]) & draft_BM[:, None]
        has_earlier_BMM &= (tree.tokens_BM[:, :, None] != tree.tokens_BM[:, None]) & (index_M[None] < index_M[:, None])
        is_later_BM = draft_BM & has_earlier_BMM.any(axis=2)
        place_1D = jnp.arange(walk.path_BM.shape[1])[None, :]
        in_path_BD = (place_1D > 0) & (place_1D <= accepted_B[:, None])
        later_B = watch.running_B & (jnp.take_along_axis(is_later_BM, walk.path_BM, axis=1) & in_path_BD).any(axis=1)
        now = Sightings(deep_B, refused_B, watch.running_B & is_later_BM.any(axis=1), later_B)
        seen = Sightings(*(old_B + new_B for old_B, new_B in zip(watch.seen, now)))
        return Watch(inner, watch.running_B, watch.lengths_B, seen)


class WatchedRun(NamedTuple):
    """The output of every request, the steps that it took, and what was seen in all rows together."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    steps: list[int]
    seen: dict[str, int]


def run_watched(
    lm: LanguageModel,
    requests: Sequence[Request],
    strategy: Strategy,
    eos_token_ids: Sequence[int] = (),
    stride: int = 32,
) -> WatchedRun:
    """Decode requests as one batch, so many steps at a time."""
    batch = RunningBatch(lm.programs, lm.params, Watched(strategy), requests, eos_token_ids, lm.max_len)
    while not batch.done:
        batch.advance(stride)
    # Not by `counts`, which asks the device anew for each of thousands of rows.
    steps_B = np.asarray(batch._state.steps_B)[: len(requests)]
    seen = {name[:-2]: int(np.sum(counts_B)) for name, counts_B in batch._memory.seen._asdict().items()}
    tokens = batch.new_tokens()
    logprobs = [batch.log_probabilities(row, len(found)) for row, found in enumerate(tokens)]
    return WatchedRun(tokens, logprobs, steps_B.tolist(), seen)
