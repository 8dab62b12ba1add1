"""Every way to decode, by name; and how a user writes one down: ``name`` or ``name:key=value,key=value``."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from jaxinfer.decoding.options import spelling
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.errors import InvalidOption

# Each is a module of `jaxinfer.decoding.strategies`, with the strategy of that name.
_NAMES = (
    "autoregressive",
    "auto",
    "draft_model",
    "cascade",
    "prompt_lookup",
    "suffix",
    "token_recycling",
    "jacobi",
    "lookahead",
    "medusa",
    "eagle",
    "streams",
    "layerskip",
    "mtp",
    "triforce",
    "dflash",
    "beam",
    "mcts",
)


class _Strategies(Mapping[str, type[Strategy]]):
    """The kinds of strategies by name. Each is imported on first use, so a command loads only its own."""

    def __getitem__(self, name: str) -> type[Strategy]:
        if name not in _NAMES:
            raise KeyError(name)
        module = import_module(f"jaxinfer.decoding.strategies.{name}")
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Strategy)]
        return next(kind for kind in kinds if kind.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


STRATEGIES: Mapping[str, type[Strategy]] = _Strategies()


def parse_strategy(spec: str | Strategy) -> Strategy:
    """Return the strategy that a specification names; a strategy object is returned as it is."""
    if isinstance(spec, Strategy):
        return spec
    if not isinstance(spec, str):
        raise InvalidOption(f"strategy {spec!r} is neither a text, such as 'prompt_lookup', nor a Strategy")
    terms = _terms(spec)
    if len(terms) > 1:
        return _parse_sum(terms)
    name, _, options = spec.partition(":")
    if name.startswith("nodes="):
        raise InvalidOption(f"strategy: {name} bounds all drafters of a sum: name it last, as in suffix+medusa+{name}")
    if name not in STRATEGIES:
        raise InvalidOption(f"unknown strategy {name!r}; the strategies are {', '.join(STRATEGIES)}")
    kind = STRATEGIES[name]
    fields = {field.name: field.type for field in _options(kind)}
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, text = option.partition("=")
        if key not in fields:
            valid = ", ".join(fields) if fields else "none"
            raise InvalidOption(f"unknown option {key!r} of strategy {name}; its options are: {valid}")
        if key in values:
            raise InvalidOption(f"strategy {name}: {key}= is given twice")
        values[key] = _parse_value(name, key, text if equals else "", fields[key])
    return kind(**values)


def _terms(spec: str) -> list[str]:
    """Split a sum at each plus sign that a strategy's name or ``nodes=`` follows: others belong to paths."""
    names = "|".join(STRATEGIES)
    return re.split(rf"\+(?=(?:{names})(?:[:+]|$)|nodes=)", spec)


def _parse_sum(terms: list[str]) -> Strategy:
    """Return the sum of drafters that terms name; a term ``nodes=N`` bounds the tree."""
    nodes = 0
    if terms[-1].startswith("nodes="):
        nodes = _parse_value("sum", "nodes", terms.pop().removeprefix("nodes="), int)
    # Imported here, as each strategy is.
    from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters

    return SumOfDrafters(tuple(parse_strategy(term) for term in terms), nodes)


def describe_strategies() -> dict[str, dict[str, Any]]:
    """Return, for every strategy by name, its description, its options with their defaults, and its exactness."""
    return {
        name: {
            "description": kind.description,
            "options": {field.name: field.default for field in _options(kind)},
            "exactness": kind().exactness,
        }
        for name, kind in STRATEGIES.items()
    }


def _options(kind: type[Strategy]) -> list[dataclasses.Field]:
    """Return the fields that a user may set in a specification; the others hold what loading gives."""
    return [field for field in dataclasses.fields(kind) if field.repr]


def _parse_value(strategy: str, key: str, text: str, kind: Any) -> Any:
    choices = {spelling(choice): choice for choice in get_args(kind)} if get_origin(kind) is Literal else {}
    if text in choices:
        return choices[text]
    if kind is bool and text in ("true", "false"):
        return text == "true"
    if kind in (int, float, str) and text:
        try:
            return kind(text)
        except ValueError:
            pass
    if choices:
        raise InvalidOption(f"option {key} of strategy {strategy} is one of {', '.join(choices)}, not {text!r}")
    expected = "true or false" if kind is bool else getattr(kind, "__name__", str(kind))
    raise InvalidOption(f"option {key} of strategy {strategy} needs a value of type {expected}, got {text!r}")
