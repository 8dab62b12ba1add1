"""Estimates the speed of plain decoding from a few of its steps, measured after another strategy has run."""

from collections.abc import Sequence
from dataclasses import replace

from jaxinfer.decoding.batch import Request
from jaxinfer.decoding.runner import start_batch
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.language_model import LanguageModel
from jaxinfer.results import GenerationResult
from jaxinfer.sampling.params import SamplingParams

_WARM_STEPS = 4
TIMED_STEPS = 16
# As many as between two updates of a streamed output.
_STEPS_PER_LOOK = 8


def plain_step_seconds(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    adapter: str | None = None,
) -> float | None:
    """Return the seconds of one plain step for these rows, after warm steps and without compiling.

    The cache has the size that these prompts and ``max_new_tokens`` need. None if a sequence has no room for the steps.
    """
    sampling = replace(sampling, n=1, stop=(), ignore_eos=True)
    limits = [min(len(prompt) + max_new_tokens, model.max_len) for prompt in prompts]
    needed = 1 + _WARM_STEPS + TIMED_STEPS
    if any(len(prompt) + needed > model.max_len for prompt in prompts):
        return None
    numbers = model.loaded_adapters.numbers(adapter, len(prompts))
    requests = [
        Request(prompt, max(limit, len(prompt) + needed), sampling, adapter=number)
        for prompt, limit, number in zip(prompts, limits, numbers)
    ]
    batch = start_batch(model.programs, model.adapted_params, Autoregressive(), requests, (), model.max_len)
    batch.advance(_WARM_STEPS)
    before = batch.decode_seconds
    for _ in range(TIMED_STEPS // _STEPS_PER_LOOK):
        batch.advance(_STEPS_PER_LOOK)
    return (batch.decode_seconds - before) / TIMED_STEPS


def speed_up(batches: Sequence[Sequence[GenerationResult]], step_seconds: float) -> float | None:
    """Return how many times faster these batches ran than plain decoding would; None if no token was decoded."""
    decoded = [batch for batch in batches if batch and batch[0].stats.decode_seconds > 0]
    seconds = sum(batch[0].stats.decode_seconds for batch in decoded)
    # Plain decoding takes one step per token of the longest output, except the first token, which prefill draws.
    plain = sum(max(result.stats.new_tokens - 1 for result in batch) for batch in decoded) * step_seconds
    return plain / seconds if seconds else None
