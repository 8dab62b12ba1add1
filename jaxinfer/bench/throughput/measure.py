"""Measures how many requests an engine serves, beside static batches of the same requests."""

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import EngineRequest
from jaxinfer.language_model import LanguageModel
from jaxinfer.sampling.params import SamplingParams


@dataclass(frozen=True)
class Workload:
    """What is served: each prompt once, up to ``max_new_tokens`` or its natural end.

    ``at_once`` are numbers of clients, each of which sends its next request when the last one has ended. ``rates`` are
    requests per second that arrive at random (a Poisson process). Each load is measured ``repeats`` times.
    """

    strategy: str
    at_once: tuple[int, ...]
    rates: tuple[float, ...]
    max_new_tokens: int
    repeats: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Load:
    """How one load was served, medians of the repeats; times in seconds.

    ``kind`` is ``clients``, ``arrivals`` or ``static``; ``size`` the clients, the requests per second, or the rows of a
    static batch. The first token's times are from the request's submission; of static batches there are none, since
    nobody sees a token before the batch ends. ``token_p50`` and ``token_p99`` are percentiles over requests of the mean
    time between tokens.
    """

    kind: str
    size: float
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_second: float
    first_token_p50: float | None = None
    first_token_p99: float | None = None
    token_p50: float | None = None
    token_p99: float | None = None


@dataclass(frozen=True)
class ThroughputReport:
    """All loads, and what they ran on."""

    model: str
    device: str
    cores: int
    dtype: str
    strategy: str
    max_new_tokens: int
    repeats: int
    loads: tuple[Load, ...]


def measure_throughput(
    name: str,
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    work: Workload,
    options: dict[str, Any],
    advance: Callable[[str], None] = lambda name: None,
) -> ThroughputReport:
    """Measure every load, static batches in turns with clients; ``options`` are the engine's.

    The engine's programs are compiled first, and everything runs once before it is timed, so that nothing is compiled
    meanwhile. No run finds what an earlier one has cached. ``advance`` is called with a name after each of `num_runs`.
    """
    loads = [("clients", float(size)) for size in work.at_once]
    loads = [load for pair in zip([("static", size) for _, size in loads], loads) for load in pair]
    loads += [("arrivals", rate) for rate in work.rates]
    found: dict[tuple[str, float], list[Load]] = {load: [] for load in loads}
    with lm.engine(strategy=work.strategy, **options) as engine:
        engine.warm_up()
        advance("programs")
        for repeat, load in itertools.product(range(work.repeats + 1), loads):
            measured = _measure(lm, engine, prompts, work, *load, salt=f"{load_name(*load)}, run {repeat}")
            if repeat:
                found[load].append(measured)
            advance(load_name(*load))
    import jax

    device = jax.devices()[0]
    return ThroughputReport(
        model=name,
        device=getattr(device, "device_kind", device.platform),
        cores=os.cpu_count() or 1,
        dtype=lm.backend.param_dtype,
        strategy=work.strategy,
        max_new_tokens=work.max_new_tokens,
        repeats=work.repeats,
        loads=tuple(_median(runs) for runs in found.values()),
    )


def num_runs(work: Workload) -> int:
    """Return how many runs `measure_throughput` makes; compiling the engine's programs counts as one."""
    return 1 + (work.repeats + 1) * (2 * len(work.at_once) + len(work.rates))


def load_name(kind: str, size: float) -> str:
    """Return what a load is called."""
    names = {"static": f"batches of {size:g}", "clients": f"{size:g} at once"}
    return names.get(kind, f"{size:g} a second")


def _measure(
    lm: LanguageModel,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    work: Workload,
    kind: str,
    size: float,
    *,
    salt: str,
) -> Load:
    began = time.perf_counter()
    if kind == "static":
        options = {
            "max_new_tokens": work.max_new_tokens,
            "sampling": work.sampling,
            "strategy": work.strategy,
            "batch_size": int(size),
        }
        groups = [prompts[first : first + int(size)] for first in range(0, len(prompts), int(size))]
        results = [one for group in groups for one in lm.generate([list(prompt) for prompt in group], **options)]
        seconds = time.perf_counter() - began
        tokens = sum(len(result.tokens) for result in results)
        return Load(kind, size, len(results), tokens, seconds, tokens / seconds)

    def submit(prompt: Sequence[int]) -> EngineRequest:
        options = {"max_new_tokens": work.max_new_tokens, "sampling": work.sampling, "cache_salt": salt}
        return engine.submit(list(prompt), **options)

    requests = _by_clients(submit, prompts, int(size)) if kind == "clients" else _by_arrival(submit, prompts, size)
    seconds = time.perf_counter() - began
    stats = [request.stats for request in requests]
    tokens = sum(len(one.token_seconds) for one in stats)
    first = [one.first_token_seconds or 0.0 for one in stats]
    between = [
        (one.token_seconds[-1] - one.token_seconds[0]) / (len(one.token_seconds) - 1)
        for one in stats
        if len(one.token_seconds) > 1
    ] or [0.0]
    times = (float(np.percentile(values, place)) for values in (first, between) for place in (50, 99))
    return Load(kind, size, len(requests), tokens, seconds, tokens / seconds, *times)


def _by_clients(
    submit: Callable[[Sequence[int]], EngineRequest], prompts: Sequence[Sequence[int]], clients: int
) -> list[EngineRequest]:
    """Serve all prompts, ``clients`` at a time."""
    waiting, requests, errors, lock = list(reversed(prompts)), [], [], threading.Lock()

    def ask() -> None:
        while True:
            try:
                with lock:
                    if not waiting or errors:
                        return
                    request = submit(waiting.pop())
                    requests.append(request)
                request.result()
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return requests


def _by_arrival(
    submit: Callable[[Sequence[int]], EngineRequest], prompts: Sequence[Sequence[int]], rate: float
) -> list[EngineRequest]:
    """Serve all prompts as they arrive, at the same random times in every run."""
    gaps = np.random.default_rng(0).exponential(1 / rate, len(prompts))
    requests = []
    for gap, prompt in zip(gaps, prompts):
        time.sleep(float(gap))
        requests.append(submit(prompt))
    for request in requests:
        request.result()
    return requests


def _median(runs: list[Load]) -> Load:
    first = runs[0]

    def of(name: str) -> Any:
        values = [getattr(run, name) for run in runs]
        return None if values[0] is None else statistics.median(values)

    times = {name: of(name) for name in ("first_token_p50", "first_token_p99", "token_p50", "token_p99")}
    measured = of("output_tokens"), of("seconds"), of("tokens_per_second")
    return Load(first.kind, first.size, first.requests, *measured, **times)
