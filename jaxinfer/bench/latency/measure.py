"""Measures the latency of one batch, beside the roofline and beside Hugging Face transformers."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.bench.latency.machine import Bandwidth, measure_bandwidth, measure_product
from jaxinfer.bench.latency.roofline import Cost, decode_cost, prefill_cost
from jaxinfer.bench.latency.times import Times
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.model_loading import load
from jaxinfer.ops.backend import choose_backend, default_platform
from jaxinfer.parallel.partitioner import Partitioner, partitioner_of
from jaxinfer.results import GenerationStats
from jaxinfer.sampling.params import SamplingParams


@dataclass(frozen=True)
class Workload:
    """What to run: ``batch`` prompts of random tokens, decoded greedily, ``repeats`` times."""

    prompt_tokens: int
    new_tokens: int
    batch: int
    repeats: int


@dataclass(frozen=True)
class Speed:
    """Medians over warm runs. ``bytes_per_second`` is the bytes that a decode step must read, divided by its time."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    bytes_per_second: float
    share_of_bandwidth: float
    first_token_seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class Run:
    """The results in one dtype. The rooflines are in tokens per second, from this machine's measured limits.

    The bubbles are the fraction of a pass in which a pipeline stage is idle.
    """

    dtype: str
    operations_per_second: float
    decode_bytes_per_step: float
    prefill_roofline: float
    decode_roofline: float
    prefill_bubble: float
    decode_bubble: float
    jaxinfer: Speed
    transformers: Speed | None
    ratios: dict[str, float] | None


@dataclass(frozen=True)
class LatencyReport:
    """All results of a latency measurement."""

    model: str
    device: str
    cores: int
    workload: Workload
    bandwidth: Bandwidth
    runs: tuple[Run, ...]


def measure_latency(
    model: str,
    dtypes: Sequence[str],
    workload: Workload,
    *,
    rival: str | None = None,
    layers: int | None = None,
    weights: str | None = None,
    activations: str | None = None,
    cache_dtype: str | None = None,
    mesh: str | None = None,
    exact: str | None = None,
    notice: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LatencyReport:
    """Measure a model in each dtype; with ``rival="transformers"`` also that, on the same checkpoint and prompts.

    ``layers``, ``weights``, ``activations`` and ``cache_dtype`` are as for `load`.
    """
    for dtype in dtypes:
        choose_backend(dtype, exact=exact, cache_dtype=cache_dtype, activations=activations)
    partitioner = partitioner_of(mesh)
    if rival is not None and layers is not None:
        raise InvalidOption(f"layers {layers}: transformers runs all layers: measure it without")
    if rival is not None:
        # Imported here: transformers is optional. Imported first: its absence must not show at the end of a run.
        from jaxinfer.bench.latency.transformers import check_rival

        check_rival(dtypes)
    checkpoint = open_checkpoint(model, notice=notice, progress=progress)
    path = checkpoint.folder or Path(checkpoint.origin)
    # A device has its own memory, but virtual devices share the CPU's.
    num_devices = 1 if default_platform() == "cpu" else partitioner.num_devices
    bandwidth = measure_bandwidth()
    bandwidth = replace(bandwidth, bytes_per_second=bandwidth.bytes_per_second * num_devices)
    options: dict[str, Any] = {"layers": layers, "weights": weights, "activations": activations}
    options |= {"cache_dtype": cache_dtype, "exact": exact}
    runs = tuple(
        _measure_dtype(path, dtype, options, workload, rival, bandwidth, partitioner, num_devices, progress)
        for dtype in dtypes
    )
    return LatencyReport(str(model), jax.devices()[0].device_kind, os.cpu_count() or 1, workload, bandwidth, runs)


def _measure_dtype(
    path: Path,
    dtype: str,
    options: dict[str, Any],
    workload: Workload,
    rival: str | None,
    bandwidth: Bandwidth,
    partitioner: Partitioner,
    num_devices: int,
    progress: Callable[[int, int], None] | None,
) -> Run:
    model = load(path, dtype=dtype, **options, mesh=partitioner.mesh, progress=progress)
    config, size = model.config, workload.prompt_tokens + workload.new_tokens
    if size > model.max_len:
        raise InvalidOption(
            f"{workload.prompt_tokens} prompt tokens and {workload.new_tokens} new ones pass the model's context of "
            f"{model.max_len}: lower --prompt-tokens or --new-tokens"
        )
    shape = (workload.batch, workload.prompt_tokens)
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, shape).tolist()
    mean_length = workload.prompt_tokens + workload.new_tokens / 2
    decode = decode_cost(config, model.params, model.backend, workload.batch, mean_length)
    prefill = prefill_cost(config, model.params, model.backend, workload.batch, workload.prompt_tokens)
    operations = measure_product(dtype) * num_devices
    first, times = _time_model(model, prompts, workload)
    speed = _summarize(times, first.compile_seconds, workload, decode, bandwidth)
    other = None
    if rival is not None:
        del model  # two copies of the weights may not fit into memory
        from jaxinfer.bench.latency.transformers import time_transformers

        times = time_transformers(path, dtype, prompts, workload.new_tokens, workload.repeats)
        other = _summarize(times, 0.0, workload, decode, bandwidth)
    limits = (bandwidth.bytes_per_second, operations)
    return Run(
        dtype=dtype,
        operations_per_second=operations,
        decode_bytes_per_step=decode.num_bytes,
        prefill_roofline=workload.batch * workload.prompt_tokens / prefill.seconds(*limits),
        decode_roofline=workload.batch / decode.seconds(*limits),
        prefill_bubble=first.prefill_bubble,
        decode_bubble=first.decode_bubble,
        jaxinfer=speed,
        transformers=other,
        ratios=None if other is None else _compare(speed, other),
    )


def _time_model(
    model: LanguageModel, prompts: list[list[int]], workload: Workload
) -> tuple[GenerationStats, list[Times]]:
    """Return the statistics of the first run, which compiles, and the times of the warm runs."""
    sampling = SamplingParams(ignore_eos=True)
    first, times = None, []
    for _ in range(1 + workload.repeats):
        began = time.perf_counter()
        results = model.generate(
            prompts, max_new_tokens=workload.new_tokens, sampling=sampling, batch_size=workload.batch
        )
        seconds, stats = time.perf_counter() - began, results[0].stats
        if first is None:
            first = stats
        else:
            times.append(Times(stats.prefill_seconds, stats.decode_seconds, seconds - stats.decode_seconds))
    assert first is not None
    return first, times


def _summarize(
    times: Sequence[Times], compile_seconds: float, workload: Workload, decode: Cost, bandwidth: Bandwidth
) -> Speed:
    prefill = statistics.median(one.prefill for one in times)
    step = statistics.median(one.decode for one in times) / (workload.new_tokens - 1)
    rate = decode.num_bytes / step
    return Speed(
        prefill_tokens_per_second=workload.batch * workload.prompt_tokens / prefill,
        decode_tokens_per_second=workload.batch / step,
        bytes_per_second=rate,
        share_of_bandwidth=rate / bandwidth.bytes_per_second,
        first_token_seconds=statistics.median(one.first_token for one in times),
        compile_seconds=compile_seconds,
    )


def _compare(speed: Speed, other: Speed) -> dict[str, float]:
    """Return how many times faster this library is."""
    return {
        "prefill": speed.prefill_tokens_per_second / other.prefill_tokens_per_second,
        "decode": speed.decode_tokens_per_second / other.decode_tokens_per_second,
        "first_token": other.first_token_seconds / speed.first_token_seconds,
    }
