"""What an answer is made of: its choices as they grow, what names it, and how many tokens it took."""

import itertools
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxinfer.engine.request import RequestStats
from jaxinfer.results import GenerationResult, StreamPiece
from jaxinfer.server.api.alternatives import Scored
from jaxinfer.server.api.errors import ApiError


@dataclass
class Choice:
    """One output so far. ``texts`` are the text by token, without ``echo``, the text of the prompt that comes first.

    ``from_draft`` tells which tokens were accepted from drafts. ``scored`` is what scoring the whole text has added.
    """

    index: int
    prompt: Sequence[int]
    echo: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    result: GenerationResult | None = None
    scored: Scored = field(default_factory=Scored)

    def take(self, piece: StreamPiece) -> int:
        """Add a piece; return the number of tokens before it."""
        start = len(self.tokens)
        self.text += piece.text
        self.tokens += piece.tokens
        # A model without a tokenizer gives no texts, and text that was held back to the end may have no token.
        self.texts += [*piece.texts, *[""] * len(piece.tokens)][: len(piece.tokens)]
        self.logprobs += piece.logprobs
        self.from_draft += piece.from_draft
        self.result = piece.result or self.result
        return start

    @property
    def finish_reason(self) -> str | None:
        """Why the output has ended: ``stop`` or ``length``."""
        return None if self.result is None else self.result.finish_reason

    def offsets(self, start: int) -> list[int]:
        """Return where the text of each token from ``start`` on begins, counted in characters."""
        ends = itertools.accumulate(map(len, self.texts), initial=len(self.echo))
        return list(ends)[start : len(self.texts)]


@dataclass(frozen=True)
class Head:
    """What all parts of one answer have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int

    def stamp(self, kind: str, choices: Sequence[Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """Return an object of the answer."""
        named = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**named, "system_fingerprint": self.system_fingerprint, "seed": self.seed, "choices": choices, **more}


class Form(Protocol):
    """The JSON of an endpoint's answers; it may remember what it has given. The parts of a stream are its methods' but
    ``whole``, in their order. ``is_typed``: each part is an event of the type that it names, and none ends the stream.
    """

    is_typed: bool

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return an answer that comes at once."""
        ...

    def first(self, choices: Sequence[Choice]) -> Iterable[dict[str, Any]]:
        """Yield what comes before all tokens."""
        ...

    def delta(self, choice: Choice, start: int, piece: StreamPiece) -> Iterable[dict[str, Any]]:
        """Yield what a piece adds to a choice, whose tokens before it are ``start``."""
        ...

    def last(self, choice: Choice) -> Iterable[dict[str, Any]]:
        """Yield what ends a choice."""
        ...

    def end(self, choices: Sequence[Choice], usage: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
        """Yield what comes after all choices."""
        ...

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Return what ends a stream that fails."""
        ...


def told_of_tokens(choice: Choice, start: int, *, ids: bool, drafts: bool) -> dict[str, Any]:
    """Return what is asked for of a choice's tokens from ``start`` on: their ids, their texts and who gave them."""
    made: dict[str, Any] = {"token_ids": choice.tokens[start:]} if ids else {}
    if drafts:
        made |= {"token_texts": choice.texts[start:], "from_draft": choice.from_draft[start:]}
    return made


def new_head(prefix: str, model: str, system_fingerprint: str, seed: int) -> Head:
    """Return the head of a new answer."""
    return Head(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model, system_fingerprint, seed)


def count_usage(choices: Sequence[Choice], stats: Sequence[RequestStats]) -> dict[str, Any]:
    """Return the usage of an answer that has ended; ``stats`` are of its prompts, of which each counts once."""
    prompt_tokens, new_tokens = sum(one.prompt_tokens for one in stats), sum(len(choice.tokens) for choice in choices)
    accepted = sum(sum(choice.result.from_draft) for choice in choices if choice.result is not None)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in stats)},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted},
    }
