"""What all endpoints share: the model, its engine, and what is going on."""

import asyncio
import time
from collections.abc import Coroutine
from functools import cached_property
from typing import Any, TypeVar

from jaxinfer import __version__
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.engine.engine import Engine
from jaxinfer.errors import InvalidOption, RequestCancelled
from jaxinfer.language_model import LanguageModel
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.server.api.choices import Head
from jaxinfer.server.api.errors import from_library, not_ready
from jaxinfer.server.api.sampling import Job, Limits
from jaxinfer.server.api.tools import Calling, calling_of
from jaxinfer.server.fingerprint import system_fingerprint
from jaxinfer.server.generation import Generation
from jaxinfer.server.http.rates import Rates
from jaxinfer.server.log.entry import Entry, LoggedAnswer, LoggedPrompt
from jaxinfer.server.log.writer import RequestLog
from jaxinfer.server.metrics import ServerMetrics
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.progress import Progress
from jaxinfer.server.scoring import Scorer

Result = TypeVar("Result")


class Served:
    """A model that is served by an engine; ``live`` is what has not ended: generations, and texts that are scored.

    With a ``log``, all generations are written there once they have ended.
    """

    def __init__(
        self, lm: LanguageModel, engine: Engine, options: ServerOptions, strategy: str, log: RequestLog | None = None
    ) -> None:
        if getattr(parse_strategy(strategy), "n", 1) != 1:
            raise InvalidOption(f"strategy {strategy}: leave n out: each request says how many texts it wants")
        self.lm, self.engine, self.options, self.strategy, self.log = lm, engine, options, strategy, log
        self.created = int(time.time())
        self.rates = Rates(options.requests_per_minute, options.tokens_per_minute)
        self.scorer = Scorer(lm, engine.config.max_waiting)
        self._fingerprints: dict[str | None, str] = {}
        self.live: set[Generation | asyncio.Task[Any]] = set()
        self.is_warm = self.is_draining = False
        self.progress = Progress()
        dtype = lm.backend.param_dtype
        facts = {"model": options.model, "strategy": strategy, "dtype": dtype, "version": __version__}
        self.metrics = ServerMetrics(engine, {**facts, "weights": lm.fingerprint})

    def system_fingerprint(self, adapter: str | None = None) -> str:
        """Return what decides an answer besides the request; an adapter is one of those that are loaded."""
        # A model keeps its adapters while its engine runs.
        if adapter not in self._fingerprints:
            self._fingerprints[adapter] = system_fingerprint(self.lm, adapter)
        return self._fingerprints[adapter]

    @cached_property
    def calling(self) -> Calling:
        """How the model calls functions."""
        return calling_of(self.lm.tokenizer, self.options.tool_format)

    @property
    def limits(self) -> Limits:
        """What requests may ask of the model now."""
        names = tuple(self.lm.adapters)
        return Limits(self.options.model, self.lm.config.vocab_size, self.engine.longest_text, names)

    def check_open(self) -> None:
        """Raise ApiError if no requests are taken any more."""
        if self.is_draining:
            raise not_ready("the server is shutting down")

    async def until_the_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do some work, unless the server ends before it: then raise RequestCancelled."""
        task = asyncio.ensure_future(work)
        self.live.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise RequestCancelled("the server ends")
            return task.result()
        finally:
            task.cancel()
            self.live.discard(task)

    def record(self, head: Head, job: Job, generation: Generation) -> None:
        """Write a generation that has ended, whichever way, to the log, if there is one."""
        if self.log is None:
            return
        choices = generation.choices
        ended = "finished" if all(choice.result for choice in choices) else "client_gone"
        if generation.error is not None:
            error = from_library(generation.error)
            ended = error.code or error.kind
        entry = Entry(
            id=head.id,
            created=head.created,
            fingerprint=head.system_fingerprint,
            strategy=self.strategy,
            ended=ended,
            sampling=job.sampling,
            prompts=tuple(map(LoggedPrompt, job.prompts, generation.new_tokens)),
            answers=tuple(LoggedAnswer(tuple(one.tokens), tuple(one.logprobs), one.finish_reason) for one in choices),
            adapter=job.adapter,
        )
        self.log.write(entry)

    def why_not_ready(self) -> str | None:
        """Return why a client should go elsewhere, None if it need not."""
        is_stuck = self.progress.is_stuck(self.engine.metrics(), time.monotonic())
        if not self.engine.is_open:
            return "the engine is closed"
        if self.is_draining:
            return "the server is shutting down"
        if not self.is_warm:
            return "programs are being compiled"
        return "requests wait, and nothing runs" if is_stuck else None

    def warm(self) -> None:
        """Compute a prompt of more than a chunk and a few tokens: the largest programs, which all others wait for.

        Smaller ones are compiled in the background, once requests ask for them; on several processes all of them, for
        there a request waits for the one that fits it.
        """
        config, most = self.engine.config, self.engine.longest_text // 2
        request = self.engine.submit(
            [0] * min(config.prefill_chunk + 1, most),
            max_new_tokens=min(2 * config.steps_per_look, most),
            sampling=SamplingParams(ignore_eos=True),
            cache_salt="warm",
        )
        request.result()
        self.is_warm = True
        if self.lm.programs.partitioner.is_multi_process:
            self.engine.warm_up(self._check_not_draining)

    def _check_not_draining(self, done: int, total: int) -> None:
        if self.is_draining:
            raise RequestCancelled("the server ends before all programs are compiled")
