"""Metrics in the form that Prometheus reads."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import RequestStats
from jaxinfer.results import GenerationStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)

_GAUGES = {
    "waiting": "Sequences that wait for a row: the length of the queue.",
    "prefilling": "Sequences whose prompt is being computed.",
    "running": "Sequences that decode.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens that were computed.",
    "cached_tokens": "Prompt tokens that were found in the prefix cache.",
    "output_tokens": "Tokens that were decoded.",
    "accepted_tokens": "Decoded tokens that were accepted from a draft.",
    "steps": "Decoding steps of the device.",
    "row_steps": "Decoding steps of each sequence, summed.",
    "preemptions": "Sequences that had to make room.",
    "compilations": "Programs that were compiled.",
    "compile_seconds": "Seconds that compiling took.",
}


class ServerMetrics:
    """What an engine counts, read when it is asked for, and what the server adds of each request."""

    def __init__(self, engine: Engine, facts: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        Info("jaxinfer", "What is served.", registry=self._registry).info(dict(facts))
        self._queue = self._histogram("queue_seconds", "From submission to the first computed token.", _SECONDS)
        self._first = self._histogram("first_token_seconds", "From submission to the first token.", _SECONDS)
        self._between = self._histogram("between_tokens_seconds", "From one token to the next.", _BETWEEN)
        self._per_step = self._histogram("tokens_per_step", "Tokens of a step, the mean of a sequence.", _TOKENS)
        self._responses = Counter(
            "jaxinfer_http_responses", "Answers by path and status.", ("path", "status"), registry=self._registry
        )
        self._errors = Counter("jaxinfer_errors", "Errors by their code.", ("code",), registry=self._registry)

    def count_response(self, path: str, status: int) -> None:
        """Count an answer; ``path`` must be one of a few."""
        self._responses.labels(path, str(status)).inc()

    def count_error(self, code: str) -> None:
        """Count an error, in an answer or in a stream."""
        self._errors.labels(code).inc()

    def observe(self, requests: Sequence[RequestStats], outputs: Sequence[GenerationStats]) -> None:
        """Add the times of requests that have ended, and how many tokens the steps of their outputs gave."""
        for stats in requests:
            if stats.queue_seconds is not None:
                self._queue.observe(stats.queue_seconds)
            if stats.first_token_seconds is not None:
                self._first.observe(stats.first_token_seconds)
            for before, after in zip(stats.token_seconds, stats.token_seconds[1:]):
                self._between.observe(after - before)
        for output in outputs:
            if output.steps:
                self._per_step.observe(output.tokens_per_step)

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"jaxinfer_{name}", text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    """Reads an engine's metrics when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Name nothing beforehand: the engine need not be asked yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this moment."""
        now = self._engine.metrics()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"jaxinfer_requests_{name}", text, getattr(now, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"jaxinfer_{name}", text, getattr(now, name))
        pages = GaugeMetricFamily("jaxinfer_pages", "Pages of the cache by what holds them.", labels=["state"])
        for state in ("free", "cached", "in_use"):
            pages.add_metric([state], getattr(now, f"pages_{state}"))
        yield pages
        ended = CounterMetricFamily("jaxinfer_sequences_ended", "Sequences by how they ended.", labels=["how"])
        for how in ("finished", "cancelled", "timed_out", "failed"):
            ended.add_metric([how], getattr(now, how))
        yield ended
