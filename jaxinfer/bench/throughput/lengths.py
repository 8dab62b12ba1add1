"""Texts of drawn lengths, and static batches of them: what continuous batching is compared with."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.decoding.batch import Request, RunningBatch
from jaxinfer.language_model import LanguageModel
from jaxinfer.sampling.params import SamplingParams

# Steps between looks at whether all rows have ended.
_STEPS = 32


def draw_lengths(mean: int, spread: float, rooms: Sequence[int]) -> list[int]:
    """Return a number of new tokens for each room, the same in every run: at least one, and no more than its room.

    They follow a gamma distribution whose standard deviation is ``spread`` times its mean: of 1, an exponential one.
    """
    rng = np.random.default_rng(0)
    lengths = rng.gamma(spread**-2, mean * spread**2, len(rooms)) if spread else np.full(len(rooms), mean)
    return [int(np.clip(round(length), 1, room)) for length, room in zip(lengths, rooms)]


def run_static(
    lm: LanguageModel, asked: Sequence[tuple[Sequence[int], int]], strategy: str, sampling: SamplingParams
) -> int:
    """Decode prompts, each to its number of new tokens, as one batch until all have ended; return the tokens in all."""
    requests = [Request(list(prompt), len(prompt) + limit, sampling) for prompt, limit in asked]
    batch = RunningBatch(lm.programs, lm.adapted_params, lm.resolve(strategy), requests, (), lm.max_len)
    while not batch.done:
        batch.advance(_STEPS)
    return sum(map(len, batch.new_tokens()))
