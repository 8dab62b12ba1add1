"""What a request's text must be: a regular expression, or JSON of a schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, no_type_check

from jaxinfer.errors import InvalidOption, one_line, shown
from jaxinfer.grammar.schema.pieces import escaped

# What is longer takes minutes to compile.
MOST_CHARACTERS = 100_000


@dataclass(frozen=True)
class Grammar:
    """The texts that are JSON of a schema, or that match a regular expression as a whole (syntax of Rust's ``regex``).

    Build one with `Grammar.json_schema`, `Grammar.json_object`, `Grammar.regex` or `Grammar.choice`. It is compiled by
    the model that it is given to, which then raises InvalidOption for one that says nothing.
    """

    kind: Literal["json_schema", "regex"]
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


def _checked(text: str, what: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise InvalidOption(f"{what} has {len(text)} characters: at most {MOST_CHARACTERS} are compiled")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidOption(f"{what} is not valid Unicode at character {error.start}") from None
    return text
