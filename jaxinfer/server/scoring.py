"""Scores texts and embeds them beside the engine, one at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

from jaxinfer.errors import EngineBusy, InvalidOption, RequestTimedOut
from jaxinfer.language_model import LanguageModel
from jaxinfer.notation import Float
from jaxinfer.server.api.alternatives import Alternative, Scored, Spelling
from jaxinfer.server.api.choices import Choice
from jaxinfer.server.api.sampling import Job
from jaxinfer.text_scores import TextScores, embed_text, score_text
from jaxinfer.tokenizers import TextStream

Result = TypeVar("Result")


class Scorer:
    """Runs a model over whole texts in a thread of its own; texts wait for each other.

    More than ``most_waiting`` texts are refused with `EngineBusy`; what takes more than ``seconds``, waiting included,
    ends with `RequestTimedOut`.
    """

    def __init__(self, lm: LanguageModel, most_waiting: int) -> None:
        self._lm, self._most_waiting, self._waiting = lm, most_waiting, 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="jaxinfer-score")

    def check(self) -> None:
        """Raise InvalidOption where no text can be scored."""
        if self._lm.programs.partitioner.is_multi_process:
            # The other processes run what the engine runs, and in its order.
            raise InvalidOption("a model on several processes scores and embeds no texts: ask for its answers alone")

    async def add_scores(self, job: Job, choices: Sequence[Choice], seconds: float) -> None:
        """Score the answers of a job that has ended: what it asks for is added to its choices."""
        async with _in_time(seconds):
            made: dict[tuple[int, ...], TextScores] = {}
            for choice in choices:
                # The whole text is computed once more, in no row of the engine: its bits are the same.
                ids = (*choice.prompt, *(choice.tokens if job.top_logprobs else ()))
                if ids not in made:
                    made[ids] = await self._run(partial(score_text, self._lm, ids, job.top_logprobs, job.adapter))
                choice.scored = await self._run(partial(self._scored, job, choice, made[ids]))
                choice.echo = "".join(choice.scored.prompt_texts)

    async def embed(
        self, texts: Sequence[Sequence[int]], seconds: float, adapter: str | None = None
    ) -> list[Float[Any, " D"]]:
        """Return the embeddings of texts, in float32; ``adapter`` names a loaded adapter."""
        async with _in_time(seconds):
            return [await self._run(partial(embed_text, self._lm, ids, adapter)) for ids in texts]

    async def _run(self, work: Callable[[], Result]) -> Result:
        self.check()
        if self._waiting >= self._most_waiting:
            raise EngineBusy(f"{self._most_waiting} texts wait to be scored already: try again later")
        self._waiting += 1
        try:
            # A text that nobody waits for any more is not begun.
            return await asyncio.wrap_future(self._worker.submit(work))
        finally:
            self._waiting -= 1

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self._lm.tokenizer)

    def _scored(self, job: Job, choice: Choice, scores: TextScores) -> Scored:
        num_prompt = len(choice.prompt)
        best = [tuple(self._spelling.alternative(*one) for one in each) for each in scores.best]
        answer_best = tuple(best[num_prompt - 1 :]) if job.top_logprobs else ()
        if not job.echoes:
            return Scored(best=answer_best)
        nothing: tuple[Alternative, ...] = ()
        return Scored(
            prompt_texts=self._texts(choice.prompt),
            prompt_logprobs=(None, *scores.logprobs[: num_prompt - 1]),
            prompt_best=(nothing, *best[: num_prompt - 1]),
            best=answer_best,
        )

    def _texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text that became certain with each token of a prompt."""
        stream = TextStream(self._lm.tokenizer)
        texts = [stream.push([token]) for token in ids]
        return (*texts[:-1], texts[-1] + stream.finish())


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise RequestTimedOut(f"the texts were not scored within {seconds:g} seconds") from None
