"""What a user's function says candidates of a tree search are worth: texts are made for it, its answers checked."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxinfer.decoding.registry import parse_strategy
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.errors import InvalidOption, shown
from jaxinfer.text_generation import TextRequest, start_row
from jaxinfer.tokenizers import Tokenizer

if TYPE_CHECKING:  # few search
    from jaxinfer.decoding.search.batch import Value


@dataclass(frozen=True)
class Candidate:
    """A continuation that a tree search asks a value for.

    ``prompt`` is the prompt's text (None if it came as token ids) and ``prompt_tokens`` its ids; ``text`` and
    ``tokens`` are what has been written so far and how the candidate goes on. ``is_whole`` says that it ends there, by
    a stop token, a stop string or for lack of room.
    """

    prompt: str | None
    prompt_tokens: tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    is_whole: bool


Scorer = Callable[[list[Candidate]], Sequence[float]]


def with_value(spec: str | Strategy, value: Scorer | None) -> Strategy:
    """Return a strategy that asks a function for values; raise InvalidOption for one that does not search."""
    strategy = parse_strategy(spec)
    if value is None:
        return strategy
    if strategy.exactness != "search":
        raise InvalidOption(f"value: strategy {strategy.name} asks for no values: use mcts")
    options: dict[str, Any] = {"scorer": value}
    return replace(strategy, **options)


def values_of_rows(
    strategy: Strategy, requests: Sequence[TextRequest], stop_token_ids: Sequence[int], tokenizer: Tokenizer | None
) -> "Value | None":
    """Return what asks a strategy's function about rows of a batch; None for strategies without one."""
    value: Scorer | None = getattr(strategy, "scorer", None)
    if value is None:
        return None

    def of_rows(rows: list[int], texts: list[list[int]], whole: list[bool]) -> list[float]:
        asked = [_candidate(requests[row], tokens, ends) for row, tokens, ends in zip(rows, texts, whole, strict=True)]
        return checked_values(value(asked), len(asked))

    def _candidate(request: TextRequest, tokens: list[int], is_whole: bool) -> Candidate:
        row = start_row(request, stop_token_ids, tokenizer)
        # As a result has it: to a stop string, and without the token that ends it.
        text = row.take(list(tokens), is_whole).text
        prompt = request.text, tuple(request.request.prompt)
        return Candidate(*prompt, text, tuple(row.tokens), is_whole or row.is_cut)

    return of_rows


def checked_values(answer: Any, count: int) -> list[float]:
    """Return a function's answer as numbers, one for each candidate; raise InvalidOption for anything else."""
    try:
        values = [float(each) for each in answer]
    except (TypeError, ValueError):
        raise InvalidOption(f"value: the function returned {shown(answer)}, not a number for each candidate") from None
    if len(values) != count:
        raise InvalidOption(f"value: the function returned {len(values)} numbers for {count} candidates")
    if not all(map(math.isfinite, values)):
        raise InvalidOption("value: the function returned a number that is not finite")
    return values
