"""Compares the bits of strategies with those of plain decoding, and says which differ: what only a device can show.

`jaxinfer.decoding.fixed_rows` argues why they should be equal where a model was loaded with ``exact="bits"``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.bench.identity.strategies import GREEDY, SAMPLED, make_strategy
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.language_model import LanguageModel
from jaxinfer.results import GenerationResult
from jaxinfer.sampling.params import SamplingParams

NAMES = ("prompt_lookup", "jacobi", "draft_model", "layerskip", "triforce", "lookahead", "medusa")
# How many times as many tokens the run in a longer cache has room for.
_LONGER = 8


@dataclass(frozen=True)
class BitsOutcome:
    """What one way of running the prompts shares with another: ``strategy``, ``company`` say which.

    Of ``tokens`` output tokens, ``tokens_equal`` are the same up to the first other one of their text, and
    ``bits_equal`` of these have the same log-probability in every bit. ``first`` is the prompt and the token of the
    first difference. ``largest_difference`` is that of the log-probabilities of same tokens. ``is_promised`` tells
    whether all bits must be equal.
    """

    strategy: str
    company: str
    is_promised: bool
    tokens: int
    tokens_equal: int
    bits_equal: int
    first: tuple[int, int] | None
    largest_difference: float

    @property
    def passes(self) -> bool:
        """Tell whether the bits are equal, or need not be."""
        return self.first is None or not self.is_promised

    def line(self) -> str:
        """Return the outcome as one line of text."""
        mark = "equal  " if self.first is None else "differs" if self.passes else "FAILED "
        said = f"{mark} {self.strategy}, {self.company}: {self.tokens_equal} of {self.tokens} tokens the same"
        said += f", {self.bits_equal} in every bit"
        if self.first is not None:
            said += f"; first at token {self.first[1]} of prompt {self.first[0]}"
            said += f", log-probabilities differ by up to {self.largest_difference:.1e}"
        return said

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {**asdict(self), "passes": self.passes}


def compare_bits(
    model: LanguageModel,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 48,
    names: Sequence[str] = NAMES,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Compare strategies with plain decoding, both alone and in a batch; return a report with the key ``passes``.

    Plain decoding alone is also compared with itself in a batch and in a longer cache.
    """
    ids = [model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    outcomes = []
    for outcome in _outcomes(model, ids, max_new_tokens, names):
        say(outcome.line())
        outcomes.append(outcome)
    return {
        "dtype": str(model.backend.param_dtype),
        "passes": all(outcome.passes for outcome in outcomes),
        "bits": [outcome.to_json() for outcome in outcomes],
    }


def keeps_plain_bits(strategy: Strategy, model: LanguageModel) -> bool:
    """Tell whether a resolved strategy has the bits of plain decoding in a batch of the same size."""
    backend = model.programs.decoder.backend
    if backend.keeps_bits:
        return strategy.exactness == "identical"
    is_chain = strategy.max_depth == 0 or not strategy.branches
    return is_chain and strategy.fills_steps and step_headroom(strategy, backend) == backend.fixed_rows > 1


def _outcomes(
    model: LanguageModel, prompts: list[list[int]], max_new_tokens: int, names: Sequence[str]
) -> Iterator[BitsOutcome]:
    backend = model.programs.decoder.backend

    def run(strategy: str | Strategy, batch_size: int, num_tokens: int = max_new_tokens) -> list[GenerationResult]:
        return [
            result
            for sampling in (GREEDY, SAMPLED)
            for result in _run(model, prompts, strategy, sampling, batch_size, num_tokens)
        ]

    companies = {"alone": 1, f"in a batch of {len(prompts)}": len(prompts)}
    plain = {company: run("autoregressive", size) for company, size in companies.items()}
    (_, alone), *batched = plain.items()
    for company, results in batched:
        yield _compare("autoregressive", f"{company} beside alone", backend.keeps_bits, alone, results)
    longer = run("autoregressive", 1, _LONGER * max_new_tokens)
    is_promised = backend.keeps_bits or (backend.fixed_rows > 1 and backend.kernels in ("pallas", "interpret"))
    yield _compare("autoregressive", "alone in a longer cache", is_promised, alone, longer)
    for name in names:
        strategy = model.resolve(make_strategy(name, model))
        is_promised = keeps_plain_bits(strategy, model)
        for company, size in companies.items():
            yield _compare(name, company, is_promised, plain[company], run(strategy, size))


def _run(
    model: LanguageModel,
    prompts: list[list[int]],
    strategy: str | Strategy,
    sampling: SamplingParams,
    batch_size: int,
    max_new_tokens: int,
) -> list[GenerationResult]:
    sampling = replace(sampling, logprobs=True)
    return model.generate(
        prompts, max_new_tokens=max_new_tokens, sampling=sampling, strategy=strategy, batch_size=batch_size
    )


def _compare(
    strategy: str,
    company: str,
    is_promised: bool,
    expected: Sequence[GenerationResult],
    found: Sequence[GenerationResult],
) -> BitsOutcome:
    """Compare results prompt by prompt, as far as the expected ones go."""
    tokens = tokens_equal = bits_equal = 0
    first, largest = None, 0.0
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        count = len(one.tokens)
        mine, theirs = np.asarray(one.tokens), np.asarray(other.tokens[:count])
        is_same = np.zeros(count, bool)
        is_same[: len(theirs)] = mine[: len(theirs)] == theirs
        shared = count if is_same.all() else int(np.argmin(is_same))
        ours, others = (np.asarray(each.logprobs[:shared], np.float32) for each in (one, other))
        # Bits, because the zeros do not differ.
        has_bits = ours.view(np.uint32) == others.view(np.uint32)
        tokens, tokens_equal, bits_equal = tokens + count, tokens_equal + shared, bits_equal + int(has_bits.sum())
        largest = max(largest, float(np.max(np.abs(ours - others), initial=0.0)))
        if first is None and not (has_bits.all() and shared == count):
            first = number, shared if has_bits.all() else int(np.argmin(has_bits))
    return BitsOutcome(strategy, company, is_promised, tokens, tokens_equal, bits_equal, first, largest)
