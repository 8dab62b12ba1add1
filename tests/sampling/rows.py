"""Small batches for the sampling tests."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling import History, SamplingArrays, SamplingParams, sampling_arrays

EOS = 2


def arrays_of(params: Sequence[SamplingParams], vocab_size: int, samples: Sequence[int] | None = None):
    """Build the arrays of rows that end at token 2."""
    return sampling_arrays(params, samples or [0] * len(params), [EOS], vocab_size)


def history_of(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], slots: int = 16) -> History:
    """Lay prompt and output out in rows whose unused slots hold token 1."""
    tokens = np.ones((len(prompts), slots), np.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens[row, : len(prompt) + len(output)] = [*prompt, *output]
    prompt_lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    lengths = prompt_lengths + jnp.array([len(output) for output in outputs], jnp.int32)
    return History(jnp.asarray(tokens), prompt_lengths, lengths)


def blank_history(rows: int) -> History:
    """Give each row a prompt of one token and no output."""
    return history_of([[1]] * rows, [[]] * rows)


def row_of(arrays: SamplingArrays, rows: Sequence[int]) -> SamplingArrays:
    """Take rows of the arrays in the given order."""
    return SamplingArrays(*(field[np.asarray(rows)] for field in arrays))
