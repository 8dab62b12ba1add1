"""Measures how often answers are right for how much compute: plain decoding, the best of n samples, tree search.

Who chooses among the texts decides what is compared. By default that is the task's checker, which knows the right
answer. With a value head each way is measured three times: chosen by the checker, by the head, and by likelihood, which
know no answer.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxinfer.bench.search.tasks import Problem, Task
from jaxinfer.decoding.strategies.mcts import TreeSearch
from jaxinfer.language_model import LanguageModel
from jaxinfer.results import GenerationResult
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.text_scores import value_text
from jaxinfer.text_values import Candidate

# Searches of a way that searches more than once: each has its share of the budget.
_SEARCHES = 4
GREEDY, BEST, ONE, SEVERAL, SHORT = "greedy", "best of n", "one search", f"{_SEARCHES} searches", "short looks"
_CHECKER, _HEAD, _LIKELIHOOD = "checker", "value head", "likelihood"
# The tokens that a short look decides, and by which a node's text is continued there.
_SHORT = 2


@dataclass(frozen=True)
class Way:
    """A way to answer, and who chooses among its texts; plain decoding has no choice.

    A search of ``short looks`` decides a few tokens, by texts that are no longer than these: that takes someone who can
    judge a text that has only begun.
    """

    kind: str
    judge: str = _CHECKER
    names_judge: bool = False

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.kind} by {self.judge}" if self.names_judge else self.kind


_PLAIN = Way(GREEDY)
_BY_CHECKER = (Way(BEST), Way(ONE), Way(SEVERAL))
_BY_EACH = (
    *(Way(kind, judge, True) for judge in (_CHECKER, _HEAD, _LIKELIHOOD) for kind in (BEST, ONE)),
    Way(SHORT, _HEAD, True),
)


def ways_of(value: str | None) -> tuple[Way, ...]:
    """Return the ways that are measured with every budget, with a value head or without one."""
    return _BY_CHECKER if value is None else _BY_EACH


@dataclass(frozen=True)
class Point:
    """What a way to answer reaches with a budget of so many texts a problem, and the tokens that it ran the model on.

    ``right`` counts answers; ``worth`` is their mean by the task's scorer; ``tokens`` are a problem's, prompts apart.
    """

    task: str
    way: str
    texts: int
    problems: int
    right: int
    worth: float
    tokens: float
    seconds: float


@dataclass(frozen=True)
class SearchReport:
    """A measurement, with what it was made on."""

    model: str
    dtype: str
    device: str
    cores: int
    temperature: float
    actions: int
    points: tuple[Point, ...]
    value: str | None = None


def measure_search(
    name: str,
    model: LanguageModel,
    tasks: Sequence[Task],
    budgets: Sequence[int],
    *,
    temperature: float,
    actions: int = 8,
    advance: Callable[[str], None] = lambda way: None,
    value: str | None = None,
) -> SearchReport:
    """Answer all problems of all tasks in every way and with every budget, multiples of 4 texts a problem.

    ``value`` is the folder of a value head.
    """
    points = []
    for task in tasks:
        ways = [(_PLAIN, 1), *((way, budget) for budget in budgets for way in ways_of(value))]
        for way, budget in ways:
            points.append(_measure(model, task, way, budget, temperature, actions, value))
            advance(f"{task.name}, {way.name}")
    device, dtype = jax.devices()[0].device_kind, str(model.backend.param_dtype)
    return SearchReport(name, dtype, device, os.cpu_count() or 1, temperature, actions, tuple(points), value)


def num_runs(tasks: Sequence[Task], budgets: Sequence[int], value: str | None = None) -> int:
    """Return how often `measure_search` advances."""
    return len(tasks) * (1 + len(budgets) * len(ways_of(value)))


def _measure(
    model: LanguageModel, task: Task, way: Way, budget: int, temperature: float, actions: int, value: str | None
) -> Point:
    began, problems = time.perf_counter(), task.problems
    prompts = [problem.prompt for problem in problems]
    by_prompt = {problem.prompt: problem for problem in problems}

    def by_checker(candidates: list[Candidate]) -> list[float]:
        return [by_prompt[str(one.prompt)].worth(one.text, one.is_whole) for one in candidates]

    def judged(problem: Problem, result: GenerationResult) -> float:
        if way.judge == _CHECKER:
            return _worth(problem, result)
        if way.judge == _LIKELIHOOD:
            return sum(result.logprobs) / len(result.logprobs)
        assert value is not None
        # As a search by the head, which reads no stop token.
        ids = result.tokens[:-1] if result.tokens[-1] in model.eos_token_ids else result.tokens
        return value_text(model, [*model.tokenizer.encode(problem.prompt), *ids], value)[-1]

    # A search looks in other places by itself, and then has plain decoding's text among those that it chooses from.
    sampling = SamplingParams(temperature=temperature if way.kind == BEST else 0, stop=task.stop, seed=1, logprobs=True)
    asked: dict[str, Any] = {"max_new_tokens": task.max_new_tokens, "batch_size": len(problems)}
    if way.kind in (GREEDY, BEST):
        results = model.generate(prompts, sampling=replace(sampling, n=budget), **asked)
        tokens = sum(result.stats.new_tokens for result in results)
        samples = [results[at : at + budget] for at in range(0, len(results), budget)]
        chosen = [max(of, key=lambda one: judged(problem, one)) for problem, of in zip(problems, samples)]
    else:
        strategy = _search(way, budget, task.max_new_tokens, actions)
        if way.judge == _HEAD:
            strategy = replace(strategy, value=str(value))
        asked["value"] = by_checker if way.judge == _CHECKER else None
        chosen = model.generate(prompts, sampling=sampling, strategy=strategy, **asked)
        tokens = sum(result.stats.target_passes for result in chosen)
    worths = [_worth(problem, result) for problem, result in zip(problems, chosen)]
    return Point(
        task.name,
        way.name,
        budget,
        len(problems),
        sum(worth >= 1 for worth in worths),
        sum(worths) / len(worths),
        tokens / len(problems),
        time.perf_counter() - began,
    )


def _search(way: Way, budget: int, most_tokens: int, actions: int) -> TreeSearch:
    """Return a search that runs about as many tokens as ``budget`` texts have."""
    if way.kind == SHORT:
        looks = -(-most_tokens // _SHORT)
        # A simulation runs a node, its continuation and, for the head, the last token of that.
        simulations = budget * most_tokens // (looks * (_SHORT + 1)) - 1
        return TreeSearch(simulations=max(1, simulations), actions=actions, depth=_SHORT, tokens=_SHORT)
    searches = 1 if way.kind == ONE else _SEARCHES
    tokens = -(-most_tokens // searches)
    return TreeSearch(simulations=max(1, budget // searches - 1), actions=actions, depth=most_tokens, tokens=tokens)


def _worth(problem: Problem, result: GenerationResult) -> float:
    return problem.worth(result.text, True)
