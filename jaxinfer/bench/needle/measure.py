"""Measures how often facts in long texts are found, and how long a token takes, by the tokens that a query reads."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from jaxinfer.bench.needle.haystack import OTHERS, Haystack, haystack
from jaxinfer.bench.needle.mass import attention_mass, check_counted
from jaxinfer.cache.layouts import DENSE, CacheLayout, RetrievalLayout, StreamingLayout
from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.streaming import check_layout
from jaxinfer.sampling.params import SamplingParams

WAYS = ("full cache", "retrieval", "StreamingLLM")
# Tokens that are decoded after a question.
_NEW = 16
_SINKS, _CHUNK = 4, 8
# Whole parts of the budget: a quarter are the last tokens.
BUDGET_UNIT = 4 * _CHUNK
# Of a text's keys, and of its tokens, as TriForce counts them.
MASS_SHARE, _MASS_QUERIES = 0.03, 16


@dataclass(frozen=True)
class Point:
    """A way to decode texts of ``length`` tokens in which a query reads ``budget`` of them, or a few more.

    ``found`` of ``texts`` answers are right, those of ``by_depth`` by where the fact stands; ``seconds`` are of a
    decoded token of one text, the best of several texts.
    """

    way: str
    cache: str
    length: int
    budget: int
    texts: int
    found: int
    by_depth: tuple[tuple[float, int], ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.found / self.texts


@dataclass(frozen=True)
class NeedleReport:
    """``mass`` is the share of attention that the ``mass_share`` best keys of a text hold, by layer.

    Texts have ``others`` facts besides the one that they ask for.
    """

    model: str
    dtype: str
    device: str
    cores: int
    points: tuple[Point, ...]
    mass_length: int
    mass_share: float
    mass: tuple[float, ...]
    others: int = OTHERS


def layouts(budgets: Sequence[int]) -> list[tuple[str, str, CacheLayout, int | None]]:
    """Return each way, its cache as an option and as a layout, and how many tokens a query reads (None: all)."""
    found: list[tuple[str, str, CacheLayout, int | None]] = [(WAYS[0], "dense", DENSE, None)]
    for budget in budgets:
        recent, window = budget // 4, budget - _SINKS
        retrieval = RetrievalLayout(budget - recent, _CHUNK, recent)
        spec = f"retrieval:budget={retrieval.budget},chunk={_CHUNK},recent={recent}"
        found.append((WAYS[1], spec, retrieval, budget))
        streaming = StreamingLayout(_SINKS, window)
        found.append((WAYS[2], f"streaming:sinks={_SINKS},window={window}", streaming, budget))
    return found


def check_needles(model: LanguageModel, lengths: Sequence[int], budgets: Sequence[int]) -> None:
    """Refuse a model that one of the caches does not go with, and texts longer than its context, with their answers."""
    check_counted(model)
    for _, _, layout, _ in layouts(budgets):
        check_layout(model.config, layout)
    longest = max(lengths)
    if longest + _NEW > model.max_len:
        raise InvalidOption(
            f"--lengths: texts of {longest} tokens and {_NEW} more do not fit the context of {model.max_len}"
        )


def measure_needles(
    name: str,
    model: LanguageModel,
    lengths: Sequence[int],
    budgets: Sequence[int],
    depths: Sequence[float],
    texts: int,
    advance: Callable[[str], None] = lambda way: None,
    others: int = OTHERS,
) -> NeedleReport:
    """Ask ``texts`` texts for each depth and length; budgets are multiples of `BUDGET_UNIT`, lengths longer.

    A text has ``others`` facts that nothing asks for.
    """
    points = []
    stacks = {length: _haystacks(model, length, depths, texts, others) for length in lengths}
    for way, spec, layout, budget in layouts(budgets):
        lm = model.changed(model.params, cache=layout)
        for length in lengths:
            points.append(_measure(lm, way, spec, length, budget or length, stacks[length]))
            advance(f"{spec}, {length}")
    longest = max(lengths)
    mass = attention_mass(model, model.tokenizer.encode(stacks[longest][0].prompt), MASS_SHARE, _MASS_QUERIES)
    device, dtype, cores = jax.devices()[0].device_kind, str(model.backend.param_dtype), os.cpu_count() or 1
    return NeedleReport(name, dtype, device, cores, tuple(points), longest, MASS_SHARE, mass, others)


def num_runs(lengths: Sequence[int], budgets: Sequence[int]) -> int:
    """Return how often `measure_needles` advances."""
    return len(lengths) * len(layouts(budgets))


def _haystacks(model: LanguageModel, length: int, depths: Sequence[float], texts: int, others: int) -> list[Haystack]:
    def count(sentence: str) -> int:
        return len(model.tokenizer.encode(f" {sentence}"))

    return [
        haystack(length, count, depth, 1000 * index + text, others)
        for index, depth in enumerate(depths)
        for text in range(texts)
    ]


def _measure(lm: LanguageModel, way: str, spec: str, length: int, budget: int, stacks: Sequence[Haystack]) -> Point:
    found: dict[float, int] = {}
    seconds = math.inf
    for one in stacks:
        # Past what would end the text: the answer is its beginning, and the rest is timed.
        (result,) = lm.generate(one.prompt, max_new_tokens=_NEW, sampling=SamplingParams(ignore_eos=True))
        found[one.depth] = found.get(one.depth, 0) + result.text.strip().startswith(one.answer)
        seconds = min(seconds, result.stats.decode_seconds / result.stats.steps)
    return Point(way, spec, length, budget, len(stacks), sum(found.values()), tuple(found.items()), seconds)
