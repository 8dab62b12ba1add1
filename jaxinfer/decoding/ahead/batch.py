"""One batch whose drafts come from devices of their own: the host's side of two programs that run at the same time."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxinfer.decoding.ahead.step import Ahead, GivenChain, draft_ahead, next_chain, seen_by_drafter, start_ahead
from jaxinfer.decoding.batch import Request, RowCounts, RunningBatch
from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.models.decoder import Decoder
from jaxinfer.notation import Params
from jaxinfer.parallel.partitioner import Partitioner
from jaxinfer.parallel.rules import batch_shardings


class _Drafting(NamedTuple):
    """The chain's verification, and what the drafter keeps on its devices."""

    given: Any
    ahead: Ahead


class AheadBatch(RunningBatch):
    """Runs as every batch does, but the host starts each step, and the next drafts beside it, and waits for neither."""

    def __init__(
        self,
        programs: Programs,
        params: Params,
        strategy: DraftModel,
        requests: Sequence[Request],
        eos_token_ids: Sequence[int],
        max_len: int,
        num_rows: int | None = None,
    ) -> None:
        assert strategy.config is not None
        assert strategy.backend is not None
        assert strategy.place is not None
        self._drafter, self._given = strategy, GivenChain(strategy.max_depth)
        self._there: Partitioner = strategy.place
        self._drafting = programs.drafting(Decoder(strategy.config, strategy.backend), strategy.place)
        self._seen: Any = None
        self._memory: Any = None
        self._drafting_before = self._drafting.compile_seconds
        super().__init__(programs, params, strategy, requests, eos_token_ids, max_len, num_rows)

    @property
    def compile_seconds(self) -> float:
        return super().compile_seconds + self._drafting.compile_seconds - self._drafting_before

    def counts(self, row: int) -> RowCounts:
        reused_B = self._there.fetch(self._memory.ahead.reused_B)
        return replace(super().counts(row), drafted_ahead=int(reused_B[row]))

    def _prefill(self, num_tokens: int, state: DecodeState) -> tuple[DecodeState, _Drafting]:
        state, given = self._programs.prefill(self._given, num_tokens, self._params, state)
        self._seen = self._copied(seen_by_drafter(state))
        ahead = self._run(start_ahead, (num_tokens,), (), self._seen)
        if self._memory is not None:
            # The same texts go on with a new cache.
            ahead = ahead._replace(reused_B=self._memory.ahead.reused_B)
        return state, _Drafting(given, ahead)

    def _decode(self, max_steps: int) -> tuple[DecodeState, _Drafting]:
        state, (given, ahead) = self._state, self._memory
        for step in range(max_steps):
            before, seen = self._seen, self._look(state)
            chain, ahead = self._run(next_chain, (), (2,), seen, ahead)
            given = jax.device_put(chain, jax.tree.map(lambda old: old.sharding, given), may_alias=False)
            state, given = self._programs.decode(self._given, self._params, state, given, 1)
            ahead = self._run(draft_ahead, (), (2,), seen, ahead)
            # The step before last has ended by now, or is waited for: so few are begun in vain.
            if step and self._there.fetch(before.finished_B).all():
                break
        return state, _Drafting(given, ahead)

    def _look(self, state: DecodeState) -> DecodeState:
        """Copy to the drafter's devices what steps change of what it reads."""
        read = {name: getattr(state, name) for name in ("tokens_BS", "lengths_B", "finished_B", "grammar_states_B")}
        self._seen = self._seen._replace(**self._copied(read))
        return self._seen

    def _copied(self, tree: Any) -> Any:
        """Copy a part of a state to the drafter's devices; the state itself is given away."""
        assert self._there.mesh is not None
        return jax.device_put(tree, batch_shardings(tree, self._there.mesh), may_alias=False)

    def _run(self, function: Any, static: tuple[int, ...], donated: tuple[int, ...], *arguments: Any) -> Any:
        strategy = self._drafter
        bound = partial(function, self._drafting.decoder, strategy, *static)
        return self._drafting.run((function.__name__, strategy, *static), bound, donated, strategy.params, *arguments)
