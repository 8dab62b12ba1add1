"""The endpoint that embeds texts."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.server.api.embeddings import embeddings_answer, read_embeddings
from jaxinfer.server.http.answers import json_response
from jaxinfer.server.http.body import read_body
from jaxinfer.server.http.events import unless_gone
from jaxinfer.server.http.rates import CLIENT
from jaxinfer.server.served import Served


class Embeddings:
    """``/v1/embeddings`` of a served model."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def answer(self, request: Request) -> Response:
        """Return the embeddings of texts."""
        served, options = self._served, self._served.options
        body = await read_body(request, options.max_body_bytes, options.read_seconds)
        served.check_open()
        lm = served.lm
        dimensions = lm.config.model_dim
        # In another thread: long texts, and many of them, would keep everybody waiting.
        job = await asyncio.to_thread(read_embeddings, body, served.limits, lm.tokenizer, dimensions)
        served.rates.spend(request.scope[CLIENT], job.num_tokens)
        served.check_open()
        work = served.until_the_end(served.scorer.embed(job.texts, options.request_seconds, job.adapter))
        vectors = await unless_gone(request.receive, work)
        fingerprint = served.system_fingerprint(job.adapter)
        return json_response(embeddings_answer(job, vectors, job.adapter or options.model, fingerprint))
