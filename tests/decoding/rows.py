"""Runs batches of requests without text around them, and measures how near their draws were to other ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LanguageModel, SamplingParams, Strategy
from jaxinfer.decoding.batch import Request, RowCounts, RunningBatch, prompt_bucket
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.sampling import History, margins, sampling_arrays

PLAIN = Autoregressive()
# Screened texts differ from the nearest others by more than programs of other shapes differ numerically.
LEAST_MARGIN = 1e-4

# Greedy, sampled, truncated, and with every penalty: what a row may ask for.
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=12),
    # Few tokens compete, so that every one's penalty, of the last few tokens too, decides what comes next.
    SamplingParams(
        logit_bias=dict.fromkeys(range(30, 36), 20.0),
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=1.5,
    ),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.5, min_new_tokens=6, seed=2**62 + 5),
)


class Row(NamedTuple):
    """The output of one request."""

    tokens: list[int]
    logprobs: list[float]
    counts: RowCounts


def request(prompt: Sequence[int], max_new_tokens: int, sampling: SamplingParams | None = None) -> Request:
    """Ask for so many tokens after a prompt, and their log-probabilities."""
    return Request(prompt, len(prompt) + max_new_tokens, replace(sampling or SamplingParams(), logprobs=True))


def run(
    lm: LanguageModel,
    requests: Sequence[Request],
    strategy: Strategy = PLAIN,
    eos_token_ids: Sequence[int] = (),
    num_rows: int | None = None,
) -> list[Row]:
    """Decode requests as one batch to their end."""
    batch = RunningBatch(lm.programs, lm.adapted_params, strategy, requests, eos_token_ids, lm.max_len, num_rows)
    rows: list[list[int]] = [[] for _ in requests]
    while True:
        for row, news in zip(rows, batch.new_tokens()):
            row += news
        if batch.done:
            break
        batch.advance(32)
    return [Row(row, batch.log_probabilities(at, len(row)), batch.counts(at)) for at, row in enumerate(rows)]


def least_margin(lm: LanguageModel, asked: Request, tokens: Sequence[int], eos_token_ids: Sequence[int] = ()) -> float:
    """Return the least change of logits that would have made one of these output tokens another."""
    prompt, nodes, width = list(asked.prompt), len(tokens), prompt_bucket(len(tokens))
    # The output is a tree without branches below the prompt's last token; what pads it to a common width comes last.
    node_tokens = [prompt[-1], *tokens[:-1], *[0] * (width - nodes)]
    history = History(
        jnp.asarray([prompt + [0] * (prompt_bucket(len(prompt)) - len(prompt))], jnp.int32),
        jnp.asarray([len(prompt)], jnp.int32),
        jnp.asarray([len(prompt)], jnp.int32),
        jnp.asarray([node_tokens], jnp.int32),
        jnp.tril(jnp.ones((1, width, width), bool)),
    )
    logits_1TV = lm.logits([prompt + list(tokens)])[:, len(prompt) - 1 : -1]
    logits_1MV = jnp.pad(logits_1TV, ((0, 0), (0, width - nodes), (0, 0)))
    positions_1M = len(prompt) + jnp.arange(width, dtype=jnp.int32)[None]
    arrays = sampling_arrays([asked.sampling], [asked.sample], eos_token_ids, lm.config.vocab_size)
    return float(np.min(_jitted_margins(logits_1MV, positions_1M, arrays, history)[0, :nodes]))


_jitted_margins = jax.jit(margins)
