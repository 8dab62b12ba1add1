"""A line of the log: a request and its answer, as JSON that loses no bit."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxinfer.errors import InvalidOption, shown
from jaxinfer.grammar.grammar import Grammar
from jaxinfer.sampling.params import SamplingParams

FORMAT = 1
# How every line begins, so that a file of another kind is known at once.
BEGINNING = f'{{"jaxinfer_log": {FORMAT}, '
# What drew the tokens; log-probabilities are always written, and a grammar in its own way.
_SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name not in ("logprobs", "grammar"))
_ENDS = ("stop", "length")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class LoggedPrompt:
    """A prompt, and the most new tokens that each of its answers could have."""

    ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class LoggedAnswer:
    """One answer's tokens and their log-probabilities; ``finish_reason`` is None if it was ended early."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class Entry:
    """A request, and its answers in order: ``sampling.n`` for each prompt.

    ``fingerprint`` is the server's, with the ``adapter`` that the request named, if any. ``created`` is in seconds
    since 1970. ``ended`` is ``finished``, or the code of the error that ended the request, or ``client_gone``.
    """

    id: str
    created: int
    fingerprint: str
    strategy: str
    ended: str
    sampling: SamplingParams
    prompts: tuple[LoggedPrompt, ...]
    answers: tuple[LoggedAnswer, ...]
    adapter: str | None = None

    def answers_to(self, index: int) -> tuple[LoggedAnswer, ...]:
        """Return the answers to a prompt."""
        return self.answers[index * self.sampling.n : (index + 1) * self.sampling.n]


def write_entry(entry: Entry, decode: Decode | None = None) -> bytes:
    """Return an entry as a line; with ``decode``, prompts and answers have their texts beside their ids."""

    def with_text(values: dict[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        return values if decode is None else {**values, "text": decode(ids)}

    def of_prompt(one: LoggedPrompt) -> dict[str, Any]:
        return with_text({"ids": one.ids, "max_new_tokens": one.max_new_tokens}, one.ids)

    def of_answer(one: LoggedAnswer) -> dict[str, Any]:
        logprobs = list(map(_number, one.logprobs))
        return with_text({"tokens": one.tokens, "logprobs": logprobs, "finish_reason": one.finish_reason}, one.tokens)

    grammar = entry.sampling.grammar
    values = {
        "jaxinfer_log": FORMAT,
        "id": entry.id,
        "created": entry.created,
        "fingerprint": entry.fingerprint,
        "strategy": entry.strategy,
        "adapter": entry.adapter,
        "ended": entry.ended,
        "sampling": {name: getattr(entry.sampling, name) for name in _SAMPLING},
        "grammar": {"kind": grammar.kind, "text": grammar.text} if isinstance(grammar, Grammar) else None,
        "prompts": list(map(of_prompt, entry.prompts)),
        "answers": list(map(of_answer, entry.answers)),
    }
    return json.dumps(values).encode("ascii") + b"\n"


def read_entry(line: bytes) -> Entry:
    """Return the entry of a line; raise InvalidOption that says why it is none."""
    try:
        values = json.loads(line)
        if not isinstance(values, dict) or values.get("jaxinfer_log") != FORMAT:
            raise InvalidOption(f"it is no entry of a log of format {FORMAT}")
        return _entry_of(values)
    except KeyError as error:
        raise InvalidOption(f"it has no {error}") from None
    except UnicodeDecodeError:
        raise InvalidOption("it is not UTF-8 text") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidOption(str(error)) from None


def _entry_of(values: Mapping[str, Any]) -> Entry:
    entry = Entry(
        **{name: _typed(values[name], str) for name in ("id", "fingerprint", "strategy", "ended")},
        created=_typed(values["created"], int),
        sampling=_sampling_of(values["sampling"], values["grammar"]),
        prompts=tuple(
            LoggedPrompt(_whole_numbers(one["ids"]), _typed(one["max_new_tokens"], int)) for one in values["prompts"]
        ),
        answers=tuple(map(_answer_of, values["answers"])),
        # Earlier versions wrote none: they had no log beside adapters.
        adapter=None if values.get("adapter") is None else _typed(values["adapter"], str),
    )
    if not entry.prompts or len(entry.answers) != len(entry.prompts) * entry.sampling.n:
        raise InvalidOption(f"{len(entry.answers)} answers do not belong to {len(entry.prompts)} prompts")
    return entry


def _sampling_of(values: Any, grammar: Any) -> SamplingParams:
    known = {name: values[name] for name in _SAMPLING}
    made = None if grammar is None else Grammar.read(grammar["kind"], grammar["text"])
    return SamplingParams(**known, logprobs=True, grammar=made)


def _answer_of(values: Any) -> LoggedAnswer:
    tokens, finish_reason = _whole_numbers(values["tokens"]), values["finish_reason"]
    logprobs = tuple(float(one) if isinstance(one, str) else _typed(one, int, float) for one in values["logprobs"])
    if len(tokens) != len(logprobs):
        raise InvalidOption(f"{len(tokens)} tokens have {len(logprobs)} log-probabilities")
    if finish_reason is not None and finish_reason not in _ENDS:
        raise InvalidOption(f"the finish_reason {shown(finish_reason)} is none of {', '.join(_ENDS)}")
    return LoggedAnswer(tokens, logprobs, finish_reason)


def _whole_numbers(values: Any) -> tuple[int, ...]:
    return tuple(_typed(one, int) for one in _typed(values, list))


def _typed(value: Any, *kinds: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise InvalidOption(f"{shown(value)} is not of type {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _number(value: float) -> float | str:
    """Return a number as JSON can write it: Python writes as many digits as tell it from every other one."""
    return value if math.isfinite(value) else str(value)
