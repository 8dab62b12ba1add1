"""Measures how many requests an engine serves, beside static batches of the same requests, or itself without drafts."""

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxinfer.bench.throughput.lengths import draw_lengths, run_static
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.request import EngineRequest
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.sampling.params import SamplingParams

# A prompt and the most new tokens.
Asked = tuple[Sequence[int], int]


@dataclass(frozen=True)
class Workload:
    """What is served: each prompt once, up to ``max_new_tokens`` or its natural end.

    ``at_once`` are numbers of clients, each of which sends its next request when the last one has ended. ``rates`` are
    requests per second that arrive at random (a Poisson process). Each load is measured ``repeats`` times. With
    ``spreads``, clients and batches are measured once for each, and no text ends by itself: lengths are drawn around
    ``max_new_tokens`` with so large a standard deviation, as a part of the mean. Clients are compared with those
    ``against``: ``static`` batches, or as many clients in the same engine whose requests are ``undrafted``.
    """

    strategy: str
    at_once: tuple[int, ...]
    rates: tuple[float, ...]
    max_new_tokens: int
    repeats: int
    sampling: SamplingParams
    spreads: tuple[float, ...] = ()
    against: Literal["static", "undrafted"] = "static"

    @property
    def loads(self) -> list["LoadKey"]:
        """What is measured, clients in turns with what they are compared with."""
        spreads = self.spreads or (None,)
        pairs = itertools.product(spreads, self.at_once, (self.against, "clients"))
        loads = [LoadKey(kind, float(size), spread) for spread, size, kind in pairs]
        return [*loads, *(LoadKey("arrivals", rate) for rate in self.rates)]


class LoadKey(NamedTuple):
    """One load: ``kind``, ``size`` and ``spread`` as `Load` has them."""

    kind: str
    size: float
    spread: float | None = None

    def __str__(self) -> str:
        clients = f"{self.size:g} at once"
        names = {"static": f"batches of {self.size:g}", "clients": clients, "undrafted": f"{clients}, no drafts"}
        name = names.get(self.kind, f"{self.size:g} a second")
        return name if self.spread is None else f"{name}, spread {self.spread:g}"


@dataclass(frozen=True)
class Load:
    """How one load was served, medians of the repeats; times in seconds.

    ``kind`` is ``clients``, ``undrafted`` ones, ``arrivals`` or ``static``; ``size`` the clients, the requests per
    second, or the rows of a static batch; ``spread`` that of lengths, None where texts end by themselves. The first
    token's times are from the request's submission; of static batches there are none, since nobody sees a token before
    the batch ends. ``token_p50`` and ``token_p99`` are percentiles over requests of the mean time between tokens.
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
    spread: float | None = None

    @property
    def key(self) -> LoadKey:
        """Which load this is."""
        return LoadKey(self.kind, self.size, self.spread)


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
    """Measure every load, in turns; ``options`` are the engine's.

    The engine's programs are compiled first, and everything runs once before it is timed, so that nothing is compiled
    meanwhile. No run finds what an earlier one has cached. ``advance`` is called with a name after each of `num_runs`.
    Raises InvalidOption for a prompt that leaves no room for a new token, and for a strategy without drafts that is
    compared with itself.
    """
    if work.against == "undrafted" and isinstance(parse_strategy(work.strategy), Autoregressive):
        raise InvalidOption(f"strategy {work.strategy!r} drafts nothing: name one that does, or compare static batches")
    for place, prompt in enumerate(prompts, 1):
        if len(prompt) >= lm.max_len:
            raise InvalidOption(
                f"prompt {place} has {len(prompt)} tokens, which leaves no room for new ones within "
                f"max_len={lm.max_len}: leave it out, or raise max_len"
            )
    found: dict[LoadKey, list[Load]] = {load: [] for load in work.loads}
    with lm.engine(strategy=work.strategy, **options) as engine:
        engine.warm_up()
        advance("programs")
        for repeat, load in itertools.product(range(work.repeats + 1), found):
            measured = _measure(lm, engine, prompts, work, load, salt=f"{load}, run {repeat}")
            if repeat:
                found[load].append(replace(measured, spread=load.spread))
            advance(str(load))
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
    return 1 + (work.repeats + 1) * len(work.loads)


def _measure(
    lm: LanguageModel,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    work: Workload,
    load: LoadKey,
    *,
    salt: str,
) -> Load:
    kind, size, spread = load
    sampling = work.sampling if spread is None else replace(work.sampling, ignore_eos=True)
    rooms = [lm.max_len - len(prompt) for prompt in prompts]
    limits = (
        [work.max_new_tokens] * len(prompts) if spread is None else draw_lengths(work.max_new_tokens, spread, rooms)
    )
    asked: list[Asked] = list(zip(prompts, limits))
    began = time.perf_counter()
    if kind == "static":
        groups = [asked[first : first + int(size)] for first in range(0, len(asked), int(size))]
        tokens = 0
        for group in groups:
            if spread is None:
                options = {"max_new_tokens": work.max_new_tokens, "sampling": sampling, "strategy": work.strategy}
                results = lm.generate([list(prompt) for prompt, _ in group], batch_size=int(size), **options)
                tokens += sum(len(result.tokens) for result in results)
            else:
                tokens += run_static(lm, group, work.strategy, sampling)
        seconds = time.perf_counter() - began
        return Load(kind, size, len(prompts), tokens, seconds, tokens / seconds)

    def submit(one: Asked) -> EngineRequest:
        prompt, limit = one
        drafts = kind != "undrafted"
        return engine.submit(list(prompt), max_new_tokens=limit, sampling=sampling, cache_salt=salt, drafts=drafts)

    requests = _by_arrival(submit, asked, size) if kind == "arrivals" else _by_clients(submit, asked, int(size))
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


def _by_clients(submit: Callable[[Any], EngineRequest], asked: Sequence[Any], clients: int) -> list[EngineRequest]:
    """Serve all that is asked, ``clients`` at a time."""
    waiting, requests, errors, lock = list(reversed(asked)), [], [], threading.Lock()

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


def _by_arrival(submit: Callable[[Any], EngineRequest], asked: Sequence[Any], rate: float) -> list[EngineRequest]:
    """Serve all that is asked as it arrives, at the same random times in every run."""
    gaps = np.random.default_rng(0).exponential(1 / rate, len(asked))
    requests = []
    for gap, one in zip(gaps, asked):
        time.sleep(float(gap))
        requests.append(submit(one))
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
    return Load(first.kind, first.size, first.requests, *measured, **times, spread=first.spread)
