"""One HTTP request's work: its requests to the engine, and their pieces as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import EngineRequest, RequestStats
from jaxinfer.results import GenerationResult, GenerationStats, StreamPiece
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.server.api.choices import Choice
from jaxinfer.server.api.sampling import Job


class Generation:
    """The choices of a job, a request to the engine for each of its prompts.

    ``new_tokens`` are how many each prompt may get. ``error`` is what ended it early, None as long as nothing has.
    """

    def __init__(self, job: Job, requests: Sequence[EngineRequest], new_tokens: Sequence[int]) -> None:
        self._requests, self._num_samples, self.new_tokens = requests, job.sampling.n, tuple(new_tokens)
        self.error: Exception | None = None
        self.choices = [
            Choice(index, prompt, job.echoes[index // self._num_samples] if job.echoes else "")
            for index, prompt in enumerate(prompt for prompt in job.prompts for _ in range(self._num_samples))
        ]

    @property
    def stats(self) -> list[RequestStats]:
        """The times so far, of each prompt's first sample."""
        return [request.stats for request in self._requests]

    async def pieces(self) -> AsyncGenerator[tuple[Choice, int, StreamPiece], None]:
        """Add pieces to choices as they come; yield the choice, how many tokens it had before, and the piece.

        If one request fails, all end.
        """
        news: asyncio.Queue[tuple[int, StreamPiece | Exception]] = asyncio.Queue()

        async def read(number: int, request: EngineRequest) -> None:
            try:
                async for piece in request:
                    news.put_nowait((number, piece))
            except Exception as error:
                news.put_nowait((number, error))

        readers = [asyncio.ensure_future(read(*numbered)) for numbered in enumerate(self._requests)]
        num_open = len(self.choices)
        try:
            while num_open:
                number, piece = await news.get()
                if isinstance(piece, Exception):
                    self.error = piece
                    raise piece
                choice = self.choices[number * self._num_samples + piece.sample]
                num_open -= piece.result is not None
                yield choice, choice.take(piece), piece
        finally:
            self.cancel()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def cancel(self) -> None:
        """End what has not ended."""
        for request in self._requests:
            if not request.done:
                request.cancel()


def submit(engine: Engine, job: Job, seconds: float, *, logprobs: bool = False) -> Generation:
    """Hand a job to the engine; if it does not take all of it, it runs none of it.

    ``logprobs`` asks for log-probabilities even where the job does not.
    """
    requests: list[EngineRequest] = []
    sampling = replace(job.sampling, logprobs=logprobs or job.sampling.logprobs)
    longest_text = engine.longest_text
    new_tokens = [job.new_tokens(prompt, longest_text) for prompt in job.prompts]
    if not any(new_tokens):
        return Generation(job, [_ended(prompt, sampling) for prompt in job.prompts], new_tokens)
    try:
        for prompt, most in zip(job.prompts, new_tokens):
            request = engine.submit(
                prompt,
                max_new_tokens=most,
                sampling=sampling,
                priority=job.priority,
                timeout=seconds,
                cache_salt=job.cache_salt,
                drafts=job.drafts,
                adapter=job.adapter,
            )
            requests.append(request)
    except BaseException:
        for request in requests:
            request.cancel()
        raise
    return Generation(job, requests, new_tokens)


def _ended(prompt: Sequence[int], sampling: SamplingParams) -> EngineRequest:
    """Return a request for no tokens, which has ended."""
    stats = GenerationStats(len(prompt), 0, 0, 0.0, 0.0, 0, 0, (), 0.0, 0.0, 0.0, 0.0, sampling.seed)
    request = EngineRequest(sampling.n, len(prompt), lambda request: None)
    for sample in range(sampling.n):
        result = GenerationResult(None, "", (), (), "length", stats, sample)
        request.finish(result, RequestStats(len(prompt)))
    return request
