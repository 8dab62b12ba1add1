"""Measures what strategies gain on prompts: tokens per step, acceptance rate, and speed-up over plain decoding."""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from jaxinfer.bench.acceptance.tally import Group, Tally, add_up
from jaxinfer.decoding.batch import cache_bucket
from jaxinfer.decoding.registry import STRATEGIES
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.errors import InvalidOption, JaxinferError
from jaxinfer.language_model import LanguageModel
from jaxinfer.planning.cost_model import StepCosts, drafter_seconds, measure_step_costs
from jaxinfer.results import GenerationStats
from jaxinfer.sampling.params import SamplingParams

BASELINE = "autoregressive"
# Runs that compiled are not counted, nor those beside which a thread did: the next run may use what that made. In a run
# a thread makes a program or a few, of the dozen that an engine's windows may need.
_MOST_WARMUPS = 20


@dataclass(frozen=True)
class Sample:
    """A prompt's token ids and its category."""

    tokens: Sequence[int]
    category: str = ""


@dataclass(frozen=True)
class Workload:
    """What to run: each strategy and the baseline in turn, on each group of ``batch`` prompts, ``repeats`` times."""

    strategies: tuple[str, ...]
    batches: tuple[int, ...]
    max_new_tokens: int
    repeats: int
    sampling: SamplingParams
    node_counts: tuple[int, ...]


@dataclass(frozen=True)
class StrategyReport:
    """The results of one strategy at one batch size; ``categories`` is empty if there is only one."""

    strategy: str
    nodes: int
    overall: Tally
    categories: dict[str, Tally]


@dataclass(frozen=True)
class BatchReport:
    """The results at one batch size. ``costs`` are relative to a step of one node."""

    batch: int
    groups: int
    slots: int
    one_node_seconds: float
    costs: dict[int, float]
    strategies: tuple[StrategyReport, ...]


@dataclass(frozen=True)
class AcceptanceReport:
    """All results; ``complete`` is false if the measurement was cut short."""

    model: str
    device: str
    cores: int
    dtype: str
    prompts: int
    max_new_tokens: int
    repeats: int
    temperature: float
    complete: bool
    batches: tuple[BatchReport, ...]


class Kept(Protocol):
    """Groups that an earlier run has measured; see `jaxinfer.bench.acceptance.kept_groups`."""

    def find(self, prompts: Sequence[Sequence[int]], num_new: int) -> Group | None:
        """Return what was measured with these prompts."""
        ...

    def add(self, prompts: Sequence[Sequence[int]], num_new: int, group: Group) -> None:
        """Keep a group."""
        ...


class AcceptanceRun:
    """A measurement in progress. It can be reported at any time, for example after an interrupt.

    What is ``kept`` is not measured again.
    """

    def __init__(
        self, model: LanguageModel, samples: Sequence[Sample], workload: Workload, kept: Kept | None = None
    ) -> None:
        self.model, self.samples, self.workload, self._kept = model, samples, workload, kept
        self.groups: list[Group] = []
        self.costs: dict[int, StepCosts] = {}
        self.drafters: dict[tuple[int, str], float] = {}
        names = dict.fromkeys((BASELINE, *workload.strategies))
        self.strategies: dict[str, Strategy] = {name: model.resolve(name) for name in names}
        for name, strategy in self.strategies.items():
            if strategy.is_search:
                raise InvalidOption(
                    f"{name} is a search for other texts, so it has no speed-up over plain decoding: leave it out"
                )
        longest = max(len(sample.tokens) for sample in samples)
        if longest + workload.max_new_tokens > model.max_len:
            raise InvalidOption(
                f"the longest prompt has {longest} tokens; with {workload.max_new_tokens} new ones it exceeds the "
                f"model's context of {model.max_len}: shorten it or lower --max-new-tokens"
            )

    @property
    def num_runs(self) -> int:
        """The number of counted runs in all."""
        groups = sum(-(-len(self.samples) // batch) for batch in self.workload.batches)
        return groups * self.workload.repeats * len(self.strategies)

    @property
    def is_complete(self) -> bool:
        """Tell whether all groups have been run."""
        return len(self.groups) * self.workload.repeats * len(self.strategies) == self.num_runs

    def measure(self, advance: Callable[[str], None] = lambda label: None) -> None:
        """Run everything; call ``advance`` after each counted run."""
        for batch in self.workload.batches:
            # Step costs are measured at one cache size only: that of the prompt of median length.
            length = statistics.median_high(len(sample.tokens) for sample in self.samples)
            slots = cache_bucket(length + self.workload.max_new_tokens, 1, self.model.max_len)
            decoder, params = self.model.programs.decoder, self.model.adapted_params
            self.costs[batch] = measure_step_costs(decoder, params, batch, slots, self.workload.node_counts)
            for name, strategy in self.strategies.items():
                self.drafters[batch, name] = drafter_seconds(strategy, batch, slots)
            for rows, num_new in _cut(self.samples, batch):
                self.groups.append(self._run_group(batch, rows, num_new, advance))

    def report(self, model_name: str) -> AcceptanceReport:
        """Sum up the groups that have run."""
        return AcceptanceReport(
            model=model_name,
            device=jax.devices()[0].device_kind,
            cores=os.cpu_count() or 1,
            dtype=str(self.model.backend.param_dtype),
            prompts=len(self.samples),
            max_new_tokens=self.workload.max_new_tokens,
            repeats=self.workload.repeats,
            temperature=self.workload.sampling.temperature,
            complete=self.is_complete,
            batches=tuple(self._report_batch(batch) for batch in self.costs),
        )

    def _run_group(self, batch: int, rows: Sequence[Sample], num_new: int, advance: Callable[[str], None]) -> Group:
        prompts = [list(sample.tokens) for sample in rows]
        known = None if self._kept is None else self._kept.find(prompts, num_new)
        if known is not None:
            for name in [*self.strategies] * self.workload.repeats:
                advance(f"batch {batch}, {name}")
            return known
        stats: dict[str, tuple[GenerationStats, ...]] = {}
        seconds: dict[str, list[float]] = {name: [] for name in self.strategies}
        for _ in range(self.workload.repeats):
            for name in self.strategies:
                stats[name] = self._run_warm(prompts, name)
                seconds[name].append(stats[name][0].decode_seconds)
                advance(f"batch {batch}, {name}")
        group = Group(
            batch,
            tuple(sample.category for sample in rows[:num_new]),
            stats,
            {name: statistics.median(found) for name, found in seconds.items()},
        )
        if self._kept is not None:
            self._kept.add(prompts, num_new, group)
        return group

    def _run_warm(self, prompts: list[list[int]], name: str) -> tuple[GenerationStats, ...]:
        made = self.model.programs.settle()
        for _ in range(_MOST_WARMUPS):
            results = self.model.generate(
                prompts,
                max_new_tokens=self.workload.max_new_tokens,
                sampling=self.workload.sampling,
                strategy=self.strategies[name],
                batch_size=len(prompts),
            )
            before, made = made, self.model.programs.settle()
            if made == before and results[0].stats.compile_seconds == 0:
                break
        return tuple(result.stats for result in results)

    def _report_batch(self, batch: int) -> BatchReport:
        costs = self.costs[batch]
        groups = [group for group in self.groups if group.batch == batch]
        categories = sorted({category for group in groups for category in group.categories})
        reports = []
        for name, strategy in self.strategies.items():

            def tally(category: str | None, name: str = name, strategy: Strategy = strategy) -> Tally:
                drafter = self.drafters.get((batch, name), 0.0)
                return add_up(groups, category, name, BASELINE, strategy, costs, drafter)

            by_category = {category: tally(category) for category in categories} if len(categories) > 1 else {}
            reports.append(StrategyReport(name, strategy.num_nodes, tally(None), by_category))
        return BatchReport(batch, len(groups), costs.slots, costs.of(1), costs.relative, tuple(reports))


def usable_strategies(model: LanguageModel) -> tuple[list[str], dict[str, str]]:
    """Return the names of all strategies that speed up this model as it is, and of the others why not."""
    names, refused = list[str](), dict[str, str]()
    for name in STRATEGIES:
        try:
            found = model.resolve(name)
        except JaxinferError as error:
            refused[name] = str(error)
        else:
            names += [name] if not found.is_search and name != BASELINE else []
    return names, refused


def pick(samples: Sequence[Sample], per_category: int | None) -> list[Sample]:
    """Return the first ``per_category`` samples of each category, in their order, or all samples for None."""
    taken: dict[str, int] = {}
    picked = []
    for sample in samples:
        taken[sample.category] = taken.get(sample.category, 0) + 1
        if per_category is None or taken[sample.category] <= per_category:
            picked.append(sample)
    return picked


def _cut(samples: Sequence[Sample], batch: int) -> Iterator[tuple[list[Sample], int]]:
    """Cut samples into batches. The last one is filled with samples from the start, which count for time only."""
    for first in range(0, len(samples), batch):
        rows = list(samples[first : first + batch])
        fillers = [samples[at % len(samples)] for at in range(batch - len(rows))]
        yield rows + fillers, len(rows)
