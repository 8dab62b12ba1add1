"""The sampling parameters of a request, validated once."""

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

from jaxinfer.errors import InvalidOption, shown
from jaxinfer.grammar.grammar import Grammar
from jaxinfer.grammar.table import TokenTable

MAX_SEED = 2**63 - 1
# Of one prompt: each has a row of its own.
MAX_SAMPLES = 2**16
# The least and the greatest temperature above zero. Beyond them, divided logits leave float32's range.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 1e6


# The validation below must see any value; a run-time type checker would raise its own message first.
@no_type_check
@dataclass(frozen=True)
class SamplingParams:
    """How to draw the tokens of one request; temperature 0 takes the most probable token.

    Applied in this order: logit_bias, min_new_tokens, penalties, temperature, top_k, top_p, min_p. The repetition
    penalty counts prompt and output, the presence and frequency penalties count only the output. ``seed`` has 63 bits.
    ``n`` is the number of samples of the prompt. ``logprobs`` are of the raw, untempered logits. A ``grammar``, which
    is applied after the penalties, says which texts may come (``jaxinfer/grammar/README.md``). It ends the text itself,
    so that it goes with neither min_new_tokens nor ignore_eos.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int = 0
    n: int = 1
    stop: Sequence[str] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    logprobs: bool = False
    grammar: Grammar | TokenTable | None = None

    def __post_init__(self) -> None:
        temperature = _real(
            "temperature", self.temperature, f"0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        )
        if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise _invalid("temperature", self.temperature, f"0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
        self._set("temperature", temperature)
        self._set("top_k", _integer("top_k", self.top_k, 0, "0 (off) or more"))
        top_p = _real("top_p", self.top_p, "greater than 0, at most 1")
        if not 0 < top_p <= 1:
            raise _invalid("top_p", self.top_p, "greater than 0, at most 1")
        self._set("top_p", top_p)
        self._set("min_p", _between("min_p", self.min_p, 0.0, 1.0))
        self._set("repetition_penalty", _between("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        self._set("presence_penalty", _between("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("seed", _integer("seed", self.seed, 0, "0 to 2**63 - 1", most=MAX_SEED))
        self._set("n", _integer("n", self.n, 1, f"1 to {MAX_SAMPLES}", most=MAX_SAMPLES))
        self._set("stop", _stop(self.stop))
        self._set("min_new_tokens", _integer("min_new_tokens", self.min_new_tokens, 0, "0 or more"))
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "True or False")
        if self.grammar is not None:
            if not isinstance(self.grammar, Grammar | TokenTable):
                raise _invalid("grammar", self.grammar, "a jaxinfer.Grammar")
            if self.min_new_tokens or self.ignore_eos:
                raise InvalidOption("a grammar ends the text: it goes with neither min_new_tokens nor ignore_eos")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _invalid(name: str, value: Any, valid: str) -> InvalidOption:
    return InvalidOption(f"{name}={shown(value)} is not valid: use {valid}")


def _real(name: str, value: Any, valid: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:  # NaN
        raise _invalid(name, value, valid)
    try:
        return float(value)
    except OverflowError:
        raise _invalid(name, value, valid) from None


def _between(name: str, value: Any, least: float, most: float) -> float:
    valid = f"a number from {least:g} to {most:g}"
    number = _real(name, value, valid)
    if not least <= number <= most:
        raise _invalid(name, value, valid)
    return number


def _integer(name: str, value: Any, least: int, valid: str, most: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if isinstance(value, bool) or number is None or number < least or (most is not None and number > most):
        raise _invalid(name, value, f"an integer, {valid}")
    return number


def _bias(bias: Any) -> tuple[tuple[int, float], ...]:
    valid = "token ids of 0 or more, each with a finite number (or -inf to ban it)"
    try:
        pairs = [(token, value) for token, value in (bias.items() if isinstance(bias, Mapping) else bias)]
    except (TypeError, ValueError):
        raise _invalid("logit_bias", bias, f"a mapping of {valid}") from None
    checked = {}
    for token, value in pairs:
        token = _integer("logit_bias token", token, 0, "0 or more")
        number = _real(f"logit_bias[{token}]", value, "a finite number, or -inf to ban the token")
        if number == math.inf:
            raise _invalid(f"logit_bias[{token}]", value, "a finite number, or -inf to ban the token")
        if token in checked:
            raise InvalidOption(f"logit_bias names token {token} twice: name it once")
        checked[token] = number
    return tuple(sorted(checked.items()))


def _stop(stop: Any) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Iterable):
        raise _invalid("stop", stop, "a string or a list of strings")
    strings = tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _invalid("stop", string, "strings of at least one character")
    return strings
