"""The endpoints: each reads a request, has it served, and answers."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.server.api.chat import ChatForm, read_chat
from jaxinfer.server.api.choices import Form, Head, count_usage, new_head
from jaxinfer.server.api.completions import CompletionForm, read_completion
from jaxinfer.server.api.errors import ApiError, from_library
from jaxinfer.server.api.fields import shown
from jaxinfer.server.api.response_form import ResponseForm
from jaxinfer.server.api.responses import read_response
from jaxinfer.server.api.sampling import Job
from jaxinfer.server.api.tokens import answer_detokenize, answer_tokenize
from jaxinfer.server.generation import Generation, submit
from jaxinfer.server.http.answers import json_response
from jaxinfer.server.http.body import read_body
from jaxinfer.server.http.events import DONE, EventStream, event, unless_gone
from jaxinfer.server.http.rates import CLIENT
from jaxinfer.server.openapi import describe
from jaxinfer.server.served import Served

_LOG = logging.getLogger("jaxinfer.server")


class Endpoints:
    """The endpoints of one served model."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        lm, limits = self._served.lm, self._served.limits
        return await self._generate(
            request, lambda body: read_completion(body, limits, lm.tokenizer), "cmpl", CompletionForm
        )

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        lm, limits, calling = self._served.lm, self._served.limits, self._served.calling
        return await self._generate(
            request, lambda body: read_chat(body, limits, lm.encode_chat, calling), "chatcmpl", ChatForm
        )

    async def responses(self, request: Request) -> Response:
        """Answer a conversation in items."""
        lm, limits, calling = self._served.lm, self._served.limits, self._served.calling
        return await self._generate(
            request, lambda body: read_response(body, limits, lm.encode_chat, calling), "resp", ResponseForm
        )

    async def models(self, request: Request) -> Response:
        """List the model and its adapters."""
        return json_response({"object": "list", "data": [self._model(name) for name in self._served.limits.models]})

    async def model(self, request: Request) -> Response:
        """Describe a model."""
        name = request.path_params["name"]
        if name not in self._served.limits.models:
            raise ApiError(404, f"the model {shown(name)!r} is not served here", param="model", code="model_not_found")
        return json_response(self._model(name))

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a text or a conversation."""
        body, lm, limits = await self._body(request), self._served.lm, self._served.limits
        calling = self._served.calling
        return json_response(
            await asyncio.to_thread(answer_tokenize, body, limits, lm.tokenizer, lm.encode_chat, calling)
        )

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids."""
        body, lm, limits = await self._body(request), self._served.lm, self._served.limits
        return json_response(await asyncio.to_thread(answer_detokenize, body, limits, lm.tokenizer))

    async def health(self, request: Request) -> Response:
        """Tell whether the server lives."""
        is_alive = self._served.engine.is_open or self._served.is_draining
        return json_response({"status": "ok" if is_alive else "the engine is closed"}, 200 if is_alive else 503)

    async def ready(self, request: Request) -> Response:
        """Tell whether requests would be served soon."""
        reason = self._served.why_not_ready()
        return json_response({"status": reason or "ok"}, 503 if reason else 200)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics."""
        return Response(self._served.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """Describe the server."""
        served = self._served
        return json_response(describe(served.limits, served.lm.tokenizer, served.lm.config.model_dim))

    def _model(self, name: str) -> dict[str, Any]:
        served = self._served
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "jaxinfer",
            "max_model_len": served.engine.longest_text,
            "system_fingerprint": served.system_fingerprint(),
        }

    async def _body(self, request: Request) -> Mapping[str, Any]:
        options = self._served.options
        return await read_body(request, options.max_body_bytes, options.read_seconds)

    async def _generate(
        self,
        request: Request,
        read: Callable[[Mapping[str, Any]], Job],
        prefix: str,
        make_form: Callable[[Head, Job], Form],
    ) -> Response:
        served = self._served
        body = await self._body(request)
        served.check_open()

        def begin() -> tuple[Job, Generation]:
            job = read(body)
            if job.is_scored:
                served.scorer.check()
            served.check_open()
            seconds, logs = served.options.request_seconds, served.log is not None
            return job, submit(served.engine, job, seconds, logprobs=logs)

        # In another thread: long texts, and many of them, would keep everybody waiting.
        job, generation = await asyncio.to_thread(begin)
        served.live.add(generation)
        client = request.scope[CLIENT]
        served.rates.spend(client, sum(map(len, job.prompts)))
        model, fingerprint = job.adapter or served.options.model, served.system_fingerprint(job.adapter)
        head = new_head(prefix, model, fingerprint, job.sampling.seed)
        form, on_end = make_form(head, job), partial(self._end, generation, job, head, client)
        if job.stream:
            return EventStream(self._events(generation, form), on_end)
        try:
            await unless_gone(request.receive, self._collect(generation, job))
        finally:
            on_end()
        return json_response(form.whole(generation.choices, count_usage(generation.choices, generation.stats)))

    async def _events(self, generation: Generation, form: Form) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; one that fails ends with an error."""

        def events(parts: Iterable[dict[str, Any]]) -> Iterable[bytes]:
            return (event(part, is_typed=form.is_typed) for part in parts)

        try:
            for one in events(form.first(generation.choices)):
                yield one
            async with aclosing(generation.pieces()) as pieces:
                async for choice, start, piece in pieces:
                    last = () if piece.result is None else form.last(choice)
                    for one in events(itertools.chain(form.delta(choice, start, piece), last)):
                        yield one
            for one in events(form.end(generation.choices, count_usage(generation.choices, generation.stats))):
                yield one
            if not form.is_typed:
                yield DONE
        except Exception as error:
            known = from_library(error)
            if known.status == 500:
                _LOG.error("a stream failed", exc_info=error)
            self._served.metrics.count_error(known.code or known.kind)
            yield event(form.failed(known), is_typed=form.is_typed)

    async def _collect(self, generation: Generation, job: Job) -> None:
        async with aclosing(generation.pieces()) as pieces:
            async for _ in pieces:
                pass
        if job.is_scored:
            served = self._served
            await served.until_the_end(
                served.scorer.add_scores(job, generation.choices, served.options.request_seconds)
            )

    def _end(self, generation: Generation, job: Job, head: Head, client: str) -> None:
        """Forget a generation, whichever way it ended."""
        generation.cancel()
        self._served.live.discard(generation)
        outputs = [choice.result.stats for choice in generation.choices if choice.result is not None]
        self._served.metrics.observe(generation.stats, outputs)
        self._served.rates.spend(client, sum(len(choice.tokens) for choice in generation.choices))
        self._served.record(head, job, generation)
