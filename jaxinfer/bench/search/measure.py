"""Measures how often answers are right for how much compute: plain decoding, the best of n samples, tree search."""

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
from jaxinfer.text_values import Candidate

# Searches of a way that searches more than once: each has its share of the budget.
_SEARCHES = 4
WAYS = ("greedy", "best of n", "one search", f"{_SEARCHES} searches")


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


def measure_search(
    name: str,
    model: LanguageModel,
    tasks: Sequence[Task],
    budgets: Sequence[int],
    *,
    temperature: float,
    actions: int = 8,
    advance: Callable[[str], None] = lambda way: None,
) -> SearchReport:
    """Answer all problems of all tasks in every way and with every budget, multiples of 4 texts a problem."""
    points = []
    for task in tasks:
        ways = [("greedy", 1), *((way, budget) for budget in budgets for way in WAYS[1:])]
        for way, budget in ways:
            points.append(_measure(model, task, way, budget, temperature, actions))
            advance(f"{task.name}, {way}")
    device, dtype = jax.devices()[0].device_kind, str(model.backend.param_dtype)
    return SearchReport(name, dtype, device, os.cpu_count() or 1, temperature, actions, tuple(points))


def num_runs(tasks: Sequence[Task], budgets: Sequence[int]) -> int:
    """Return how often `measure_search` advances."""
    return len(tasks) * (1 + len(budgets) * (len(WAYS) - 1))


def _measure(model: LanguageModel, task: Task, way: str, budget: int, temperature: float, actions: int) -> Point:
    began, problems = time.perf_counter(), task.problems
    prompts = [problem.prompt for problem in problems]
    by_prompt = {problem.prompt: problem for problem in problems}

    def value(candidates: list[Candidate]) -> list[float]:
        return [by_prompt[str(one.prompt)].worth(one.text, one.is_whole) for one in candidates]

    # A search looks in other places by itself, and then has plain decoding's text among those that it chooses from.
    sampling = SamplingParams(temperature=temperature if way == "best of n" else 0, stop=("\n\n",), seed=1)
    asked: dict[str, Any] = {"max_new_tokens": task.max_new_tokens, "batch_size": len(problems)}
    if way in ("greedy", "best of n"):
        results = model.generate(prompts, sampling=replace(sampling, n=budget), **asked)
        tokens = sum(result.stats.new_tokens for result in results)
        samples = [results[at : at + budget] for at in range(0, len(results), budget)]
        chosen = [max(of, key=lambda one: _worth(problem, one)) for problem, of in zip(problems, samples)]
    else:
        searches = 1 if way == "one search" else _SEARCHES
        strategy = TreeSearch(
            simulations=max(1, budget // searches - 1),
            actions=actions,
            depth=task.max_new_tokens,
            tokens=-(-task.max_new_tokens // searches),
        )
        chosen = model.generate(prompts, sampling=sampling, strategy=strategy, value=value, **asked)
        tokens = sum(result.stats.target_passes for result in chosen)
    worths = [_worth(problem, result) for problem, result in zip(problems, chosen)]
    return Point(
        task.name,
        way,
        budget,
        len(problems),
        sum(worth >= 1 for worth in worths),
        sum(worths) / len(worths),
        tokens / len(problems),
        time.perf_counter() - began,
    )


def _worth(problem: Problem, result: GenerationResult) -> float:
    return problem.worth(result.text, True)
