"""Records what a strategy drafts at every step, in the program that the steps run in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer import LanguageModel, Strategy
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.batch import Request, RunningBatch
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prefilled, Proposal, Verified
from jaxinfer.models.model import Model
from tests.decoding.wrapped import Wrapped


class Record(NamedTuple):
    """A strategy's own memory, and the nodes of its last tree."""

    inner: Any
    tokens_BM: Any
    parents_BM: Any


@dataclass(frozen=True)
class Recorded(Wrapped):
    """Draft as another strategy does, and keep the last tree."""

    name: ClassVar[str] = "recorded"

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Record:
        shape = state.lengths_B.shape[0], self.strategy.num_nodes
        inner = self.strategy.start(model, params, state, prefilled)
        return Record(inner, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32))

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Record) -> Proposal:
        proposal = self.strategy.propose(model, params, state, memory.inner)
        return proposal._replace(memory=Record(proposal.memory, proposal.tree.tokens_BM, proposal.tree.parents_BM))

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Record:
        inner = proposal._replace(memory=proposal.memory.inner)
        return proposal.memory._replace(
            inner=self.strategy.observe(model, params, state, inner, verified, draws_BM, walk)
        )


class Drafted(NamedTuple):
    """A row's text before a step, and the nodes after its current token: each one's path from there, and its parent."""

    row: int
    text: list[int]
    paths: list[list[int]]
    parents: list[int]


def record(lm: LanguageModel, strategy: Strategy, requests: Sequence[Request], steps: int) -> Iterator[Drafted]:
    """Yield what is drafted for every row in each of some steps; the root's path is empty."""
    batch = RunningBatch(lm.programs, lm.params, Recorded(strategy), requests, (), lm.max_len)
    for _ in range(steps):
        tokens_BS, lengths_B = (np.asarray(part) for part in (batch._state.tokens_BS, batch._state.lengths_B))
        texts = [tokens_BS[row, : lengths_B[row]].tolist() for row in range(len(requests))]
        batch.advance(1)
        for row, text in enumerate(texts):
            tokens_M, parents_M = (
                np.asarray(part)[row] for part in (batch._memory.tokens_BM, batch._memory.parents_BM)
            )
            paths: list[list[int]] = [[]]
            for node in range(1, len(tokens_M)):
                paths.append([*paths[int(parents_M[node])], int(tokens_M[node])])
            yield Drafted(row, text, paths, [-1, *parents_M[1:].tolist()])
