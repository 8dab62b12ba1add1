"""Checks that a strategy writes what plain decoding writes, and that it had drafts enough to go wrong."""

from collections import Counter

from jaxinfer import LanguageModel, Strategy
from jaxinfer.decoding.programs import Programs
from tests.decoding.covered_models import ALONE, Asked, Covered, least_margins
from tests.decoding.rows import LEAST_MARGIN
from tests.decoding.watched import run_watched


def check_screened(lm: LanguageModel, asked: Asked) -> None:
    assert least_margins(lm, asked).min() > LEAST_MARGIN


def check_identical(
    lm: LanguageModel, asked: Asked, strategy: Strategy, alone: bool = False, stride: int = 32
) -> Counter[str]:
    """Check all rows as one batch, or some of them each alone, and return what was seen."""
    seen: Counter[str] = Counter()
    for rows in [[row] for row in ALONE] if alone else [list(range(len(asked.requests)))]:
        found = run_watched(lm, [asked.requests[row] for row in rows], strategy, asked.eos_token_ids, stride)
        assert found.tokens == [asked.oracle[row].tokens for row in rows]
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
