"""Runs an engine's core step by step: requests arrive, are cancelled and end at steps that a test names."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxinfer import LanguageModel, Strategy
from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.programs import Programs
from jaxinfer.engine.arrivals import sequences_of
from jaxinfer.engine.assembly import group_models, make_core
from jaxinfer.engine.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.pace import Pace
from jaxinfer.engine.request import EngineRequest
from jaxinfer.engine.sequence import EngineSequence
from jaxinfer.notation import Params
from jaxinfer.parallel.held import HeldPartitioner
from jaxinfer.parallel.partitioner import Partitioner
from jaxinfer.text_generation import TextRequest

# Three rows of one to three at a time, whose pages hold little more than the longest text.
SMALL = EngineConfig(max_rows=3, page_size=8, pages=15, prefill_chunk=16, steps_per_look=4)


@dataclass(frozen=True)
class Arrival:
    """A request that comes at a step of the engine, and is cancelled so many steps later if at all."""

    step: int
    request: Request
    priority: int = 0
    cancelled_after: int | None = None
    salt: str = ""
    drafts: bool = True


class Restless(Pace):
    """Lets drafters rest for a window or two, and begin again with as many nodes or fewer, whatever it costs."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(widths)
        self.widths, self.windows = tuple(widths), 0

    def nodes(self, sequences: Sequence[EngineSequence], ready: Sequence[int] | None = None) -> int:
        self.windows += 1
        return 1 if self.windows % 7 in (3, 5, 6) else self.widths[1:][self.windows % len(self.widths[1:])]

    def ran(self, sequences: Sequence[EngineSequence], nodes: int, steps: int, seconds: float) -> None:
        """Learn nothing from a clock that counts steps."""


class Harness:
    """An engine's core for one strategy, whose clock counts its steps."""

    def __init__(
        self,
        lm: LanguageModel,
        strategy: Strategy,
        config: EngineConfig = SMALL,
        eos_token_ids: Sequence[int] = (),
        tell: Callable[[Any], None] | None = None,
    ) -> None:
        self.now, self.numbers, self.restored, self.config = 0, itertools.count(), 0, config
        self.eos_token_ids = tuple(eos_token_ids)
        # Of several groups of devices the last one.
        *_, group = group_models(lm.programs, lm.params, lm.params, partial(_on_group, lm, strategy))
        self.strategy = group.strategy
        self.programs = Programs(group.programs.decoder, partitioner=HeldPartitioner(group.programs.partitioner.mesh))
        self.core: EngineCore = make_core(
            self.programs,
            group.params,
            self.strategy,
            config,
            max_len=lm.max_len,
            eos_token_ids=eos_token_ids,
            clock=lambda: float(self.now),
            tell=tell,
        )

        if self.core._pace is not None:
            self.core._pace = Restless(tuple(self.core._device.strategies))
        restored = self.scheduler.restored

        def count(sequence: EngineSequence) -> None:
            self.restored += 1
            restored(sequence)

        self.scheduler.restored = count

    @property
    def scheduler(self):
        return self.core.scheduler

    def change(self, **options: object) -> None:
        """Replace options that no program depends on."""
        self.scheduler.config = self.scheduler.held.config = replace(self.config, **options)

    def submit(self, arrival: Arrival) -> EngineSequence:
        """Let a request wait; of a beam search, all of its texts."""
        count = self.strategy.rows_per_prompt or 1
        texts = [TextRequest(None, replace(arrival.request, sample=sample)) for sample in range(count)]
        (sequence,) = sequences_of(
            self.strategy,
            texts if count > 1 else [TextRequest(None, arrival.request)],
            EngineRequest(count, len(arrival.request.prompt), lambda handle: None),
            self.numbers,
            eos_token_ids=self.eos_token_ids,
            tokenizer=None,
            now=float(self.now),
            priority=arrival.priority,
            salt=arrival.salt,
            drafts=arrival.drafts,
        )
        self.core.add(sequence)
        return sequence

    def serve(self, arrivals: Sequence[Arrival], most: int = 3000) -> list[EngineSequence]:
        """Run until all have ended; after each step no page and no row is lost."""
        begin, pending = self.now, sorted(enumerate(arrivals), key=lambda pair: pair[1].step)
        sequences: dict[int, EngineSequence] = {}
        for _ in range(most):
            while pending and begin + pending[0][1].step <= self.now:
                index, arrival = pending.pop(0)
                sequences[index] = self.submit(arrival)
            for index, sequence in sequences.items():
                after = arrivals[index].cancelled_after
                if after is not None and self.now >= sequence.arrival + after:
                    sequence.is_cancelled = True
            did_something = self.core.step()
            self.scheduler.check()
            self.now += 1
            if not did_something and not pending:
                assert self.scheduler.is_idle
                assert self.scheduler.held.pool.in_use == sum(map(len, self.scheduler.held.pinned.values()))
                return [sequences[index] for index in range(len(arrivals))]
        raise AssertionError("the engine never comes to an end")


def _on_group(lm: LanguageModel, strategy: Strategy, on: Partitioner, params: Params) -> Strategy:
    """Return a strategy that is resolved for all devices as those of a group have it."""
    return strategy if on is lm.programs.partitioner else lm._resolve(strategy, on, params)


def tokens_of(sequence: EngineSequence) -> list[int]:
    """Return what a sequence has drawn."""
    return sequence.origin.row.tokens
