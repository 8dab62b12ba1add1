"""Checks that a strategy writes what plain decoding writes, and that it had drafts enough to go wrong.

On a CPU with kernels of its own that is plain decoding of each row alone, whose log-probabilities are the same in every
bit, on meshes too whose devices do not split sums. Elsewhere tokens are the same where texts are screened.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from jaxinfer import LanguageModel, SamplingParams, Strategy
from jaxinfer.decoding.programs import Programs
from tests.decoding.covered_models import ALONE, Asked, Covered, least_margins
from tests.decoding.rows import LEAST_MARGIN
from tests.decoding.strategy_cases import forced_depth
from tests.decoding.watched import WatchedRun, run_watched


def check_screened(lm: LanguageModel, asked: Asked) -> None:
    assert least_margins(lm, asked).min() > LEAST_MARGIN


def keeps_bits(lm: LanguageModel) -> bool:
    """Tell whether a model's results are those of one device in every bit."""
    backend = lm.programs.decoder.backend
    return backend.cpu_kernels and backend.kv_shards == 1


def check_identical(
    lm: LanguageModel,
    asked: Asked,
    strategy: Strategy,
    alone: bool = False,
    stride: int = 32,
    bits: bool | None = None,
) -> Counter[str]:
    """Check all rows as one batch, or some of them each alone, and return what was seen.

    ``bits`` tells whether log-probabilities are the same in every bit (None: if those of one device are).
    """
    bits = keeps_bits(lm) if bits is None else bits
    seen: Counter[str] = Counter()
    for rows in [[row] for row in ALONE] if alone else [list(range(len(asked.requests)))]:
        found = run_watched(lm, [asked.requests[row] for row in rows], strategy, asked.eos_token_ids, stride)
        assert found.tokens == [asked.oracle[row].tokens for row in rows]
        if bits:
            assert found.logprobs == [asked.oracle[row].logprobs for row in rows]
        seen += Counter({**found.seen, "steps": max(found.steps)})
    return seen


def check_not_vacuous(strategy: Strategy, seen: Counter[str]) -> None:
    if strategy.max_depth:
        assert seen["deep"] > 0
        assert seen["refused"] > 0
    assert strategy.branches or not seen["branched"]
    assert (seen["later"] > 0) == (seen["branched"] > 0)


def forget_programs(lm: LanguageModel) -> None:
    """Free compiled programs: those of all cases together map more memory regions than a process may have."""
    lm.programs = Programs(lm.programs.decoder, lm.programs.layout, lm.programs.partitioner)


def check_covered(one: Covered, strategy: Strategy, alone: bool = False) -> None:
    forget_programs(one.lm)
    seen = sum((check_identical(one.lm, asked, strategy, alone) for asked in (one.whole, one.stopped)), Counter())
    check_not_vacuous(strategy, seen)
    assert one.lm.programs.compilations == 2


def fewest_steps(limits: Sequence[int], depth: int) -> list[int]:
    """Count steps of ``depth`` + 1 tokens after the first token, which prefill draws."""
    return [-(-(limit - 1) // (depth + 1)) for limit in limits]


def run_forced(lm: LanguageModel, asked: Asked, strategy: Strategy, forced: int) -> WatchedRun:
    """Check texts of which a bias leaves one token alone, at several temperatures."""
    samplings = [
        SamplingParams(temperature=0.7 * (row % 3), logit_bias={forced: 1000.0}, seed=row)
        for row in range(len(asked.requests))
    ]
    requests = [replace(one, sampling=sampling) for one, sampling in zip(asked.requests, samplings)]
    found = run_watched(lm, requests, strategy)
    assert found.tokens == [[forced] * len(row.tokens) for row in asked.oracle]
    return found


def check_forced(lm: LanguageModel, asked: Asked, strategy: Strategy, warm_up: int, forced: int = 0) -> None:
    """Check that drafters that know the sampling parameters draft such texts whole; no prompt has the forced token."""
    found = run_forced(lm, asked, strategy, forced)
    depth = forced_depth(strategy)
    # A step of the warm-up gives one token at least.
    most = [warm_up + steps for steps in fewest_steps([len(row.tokens) - warm_up for row in asked.oracle], depth)]
    assert all(steps <= enough for steps, enough in zip(found.steps, most))
