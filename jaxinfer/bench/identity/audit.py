"""Checks that a strategy gives what plain decoding of each prompt alone gives: the tokens, and the bits behind them.

Where the backend keeps bits (`jaxinfer.ops.backend.Backend.keeps_bits`), a strategy that promises identical tokens must
also give the same log-probabilities, bit for bit. Elsewhere programs of different shapes round differently, and a
margin within the rounding error explains another token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.batch import prompt_bucket
from jaxinfer.decoding.oracle import retell
from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.language_model import LanguageModel
from jaxinfer.results import GenerationResult
from jaxinfer.sampling.arrays import sampling_arrays
from jaxinfer.sampling.params import SamplingParams

# The largest difference between the logits of programs of different shapes, where bits are not kept. For the narrow
# dtypes it is the rounding error that a trained model accumulates over its layers; an explanation is weaker there.
NUMERIC_ERROR = (("float64", 1e-10), ("float32", 1e-4), ("float16", 0.05), ("bfloat16", 0.25))


@dataclass(frozen=True)
class Divergence:
    """The first difference between a strategy's output and plain decoding's.

    ``position`` counts output tokens from 0. If one output ends there, its token is None and ``margin`` is None.
    Otherwise ``margin`` says how close plain decoding's draw was to another token
    (`jaxinfer.decoding.oracle.Retelling`). ``oracle_agrees`` tells whether plain decoding, restarted after this token,
    gives the rest of the strategy's tokens, up to the numeric error.
    """

    position: int
    plain_token: int | None
    strategy_token: int | None
    margin: float | None
    within_error: bool
    oracle_agrees: bool

    @property
    def is_explained(self) -> bool:
        """Tell whether rounding explains the difference: a draw so close that both tokens are right, and no error after
        it.
        """
        return self.within_error and self.oracle_agrees


@dataclass(frozen=True)
class TextAudit:
    """The comparison of one prompt's two outputs, and the strategy's counters.

    ``bits_equal`` tells whether the tokens and all their log-probabilities are the same in every bit. The
    ``largest_difference`` is that of the log-probabilities before the first other token. If it ``needs_bits``, nothing
    but equal bits passes. ``plain_tokens`` is plain decoding's output.
    """

    new_tokens: int
    steps: int
    drafted: int
    accepted: int
    accepted_deep: int
    divergence: Divergence | None
    bits_equal: bool
    largest_difference: float
    needs_bits: bool
    plain_tokens: tuple[int, ...]

    @property
    def passes(self) -> bool:
        """Tell whether the outputs are identical or their difference is explained."""
        if self.needs_bits:
            return self.bits_equal
        return self.divergence is None or self.divergence.is_explained


def audit_texts(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    strategy: str | Strategy,
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    batch_size: int,
    tolerance: float,
) -> Iterator[TextAudit]:
    """Compare a strategy's batches with plain decoding of each prompt alone; ``tolerance`` is the numeric error."""
    reporting = replace(sampling, logprobs=True)
    needs_bits = model.programs.decoder.backend.keeps_bits and parse_strategy(strategy).exactness == "identical"

    def results(name: str | Strategy, batch_size: int) -> Iterator[GenerationResult]:
        for batch in model.generate_batches(
            prompts, max_new_tokens=max_new_tokens, sampling=reporting, strategy=name, batch_size=batch_size
        ):
            yield from batch

    both = zip(results("autoregressive", 1), results(strategy, batch_size), strict=True)
    for prompt, (expected, found) in zip(prompts, both, strict=True):
        divergence = explain(model, prompt, expected.tokens, found.tokens, sampling, tolerance)
        shared = len(found.tokens) if divergence is None else divergence.position
        plain, other = (np.asarray(result.logprobs[:shared]) for result in (expected, found))
        stats = found.stats
        yield TextAudit(
            stats.new_tokens,
            stats.steps,
            stats.drafted,
            stats.accepted,
            sum(stats.accepted_by_depth[1:]),
            divergence,
            # Bytes, because NaN differs from itself and the zeros do not differ.
            bits_equal=divergence is None and plain.tobytes() == other.tobytes(),
            largest_difference=float(np.max(np.abs(plain - other), initial=0.0)),
            needs_bits=needs_bits,
            plain_tokens=expected.tokens,
        )


def explain(
    model: LanguageModel,
    prompt: Sequence[int],
    plain: Sequence[int],
    found: Sequence[int],
    sampling: SamplingParams,
    tolerance: float,
) -> Divergence | None:
    """Return where ``found`` first differs from ``plain``, checked by the oracle, or None if they are equal."""
    shared = min(len(plain), len(found))
    position = next((at for at in range(shared) if plain[at] != found[at]), shared)
    if position == shared:
        if len(plain) == len(found):
            return None
        ends = (None if len(tokens) == shared else tokens[shared] for tokens in (plain, found))
        return Divergence(position, *ends, margin=None, within_error=False, oracle_agrees=False)
    draws, margins = retell_text(model, prompt, found, position, plain[position], sampling)
    later = slice(position + 1, len(found))
    agrees = (draws[later] == np.asarray(found[later])) | (margins[later] <= tolerance)
    margin = float(margins[position])
    return Divergence(position, plain[position], found[position], margin, margin <= tolerance, bool(agrees.all()))


def retell_text(
    model: LanguageModel,
    prompt: Sequence[int],
    found: Sequence[int],
    position: int,
    rival: int,
    sampling: SamplingParams,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the oracle's draws and margins along ``found``. At ``position``, they consider ``rival`` too."""
    text, num_outputs = [*prompt, *found], prompt_bucket(len(found))
    text_1T = np.zeros((1, prompt_bucket(len(prompt) + num_outputs)), np.int32)
    text_1T[0, : len(text)] = text
    rivals_1M = np.zeros((1, num_outputs), np.int32)
    rivals_1M[0, : len(found)] = [*found[:position], rival, *found[position + 1 :]]
    lengths = (len(prompt), len(text), len(prompt) + position)
    retelling = model.programs.run(
        "retell",
        partial(retell, model.programs.decoder, model.programs.layout),
        (),
        model.params,
        jnp.asarray(text_1T),
        *(jnp.asarray([length], jnp.int32) for length in lengths),
        jnp.asarray(rivals_1M),
        sampling_arrays([sampling], [0], model.eos_token_ids, model.config.vocab_size),
    )
    return np.asarray(retelling.draws_BM)[0, : len(found)], np.asarray(retelling.margins_BM)[0, : len(found)]
