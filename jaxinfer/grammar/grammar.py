"""What a request's text must be: a regular expression, or JSON of a schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

from jaxinfer.errors import InvalidOption, one_line, shown
from jaxinfer.grammar.schema.pieces import escaped

# What is longer takes minutes to compile.
MOST_CHARACTERS = 100_000
# The kinds that have no parts.
PLAIN = ("json_schema", "regex")


@dataclass(frozen=True)
class Grammar:
    """The texts that are JSON of a schema, or that match a regular expression as a whole (syntax of Rust's ``regex``).

    Build one with `Grammar.json_schema`, `Grammar.json_object`, `Grammar.regex` or `Grammar.choice`, and larger ones of
    these with `Grammar.sequence`, `Grammar.any_of` and `Grammar.repeated`. It is compiled by the model that it is given
    to, which then raises InvalidOption for one that says nothing. ``text`` is the schema, the pattern, or JSON of the
    parts, each its kind and its text.
    """

    kind: Literal["json_schema", "regex", "sequence", "any_of", "repeated"]
    text: str

    # The check below must see any value, not a run-time type checker.
    @no_type_check
    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return the texts that match a pattern from their first character to their last."""
        if not isinstance(pattern, str) or not pattern:
            raise InvalidOption("a grammar's pattern must be a string of at least one character")
        return cls("regex", _checked(pattern, "a grammar's pattern"))

    # The check below must see any value, not a run-time type checker.
    @no_type_check
    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Return the given texts."""
        is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
        if not is_list or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidOption(f"a choice is a list of texts of at least one character, not {shown(texts)}")
        return cls.regex("|".join(f"({escaped(text)})" for text in texts))

    # The check below must see any value, not a run-time type checker.
    @no_type_check
    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """Return the JSON texts of a schema, given as a mapping or as JSON.

        Properties come in the schema's order. What is not implemented is refused by name when the grammar is compiled;
        what refers to itself ends at three levels.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(parsed, Mapping):
                raise InvalidOption(f"a JSON schema is an object, not {shown(parsed)}")
            text = json.dumps(parsed, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(f"the JSON schema is not JSON: {one_line(str(error))}") from error
        return cls("json_schema", _checked(text, "a JSON schema"))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Return all JSON objects, nested up to three levels."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def sequence(cls, parts: Sequence["Grammar"]) -> "Grammar":
        """Return the texts of one grammar after the other."""
        return _composed("sequence", parts)

    @classmethod
    def any_of(cls, parts: Sequence["Grammar"]) -> "Grammar":
        """Return the texts of all of the grammars."""
        return _composed("any_of", parts)

    @classmethod
    def repeated(cls, part: "Grammar", between: "Grammar") -> "Grammar":
        """Return the texts of a grammar one or more times, with one of ``between`` after each but the last."""
        return _composed("repeated", [part, between])

    # What a file has can be anything, which is for the checks below to refuse, not for a run-time type checker.
    @no_type_check
    @classmethod
    def read(cls, kind: str, text: str) -> "Grammar":
        """Return the grammar that has this kind and this text; raise ValueError, TypeError or KeyError if none has."""
        if kind in PLAIN:
            return cls.regex(text) if kind == "regex" else cls.json_schema(text)
        parts = [cls.read(one, inner if one in PLAIN else json.dumps(inner)) for one, inner in json.loads(text)]
        made = {"sequence": cls.sequence, "any_of": cls.any_of, "repeated": lambda both: cls.repeated(*both)}
        return made[kind](parts)


def _composed(kind: Literal["sequence", "any_of", "repeated"], parts: Sequence[Grammar]) -> Grammar:
    if not parts:
        raise InvalidOption(f"a grammar of the kind {kind} needs one part at least")
    # Parts of parts are nested as lists: as texts in texts, each level would double the quotes' escapes.
    nested = [[part.kind, part.text if part.kind in PLAIN else json.loads(part.text)] for part in parts]
    return Grammar(kind, _checked(json.dumps(nested), "a grammar"))


def _checked(text: str, what: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise InvalidOption(f"{what} has {len(text)} characters: at most {MOST_CHARACTERS} are compiled")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidOption(f"{what} is not valid Unicode at character {error.start}") from None
    return text
