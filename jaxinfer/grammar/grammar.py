"""What a request's text must be: a regular expression, or JSON of a schema."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.errors import InvalidOption, one_line

# Of a schema or an expression, in characters: what is longer takes minutes to compile.
MOST_CHARACTERS = 100_000
_MEND = "install it with: pip install 'jaxinfer[grammar]'"


@dataclass(frozen=True)
class Grammar:
    """The texts that match a regular expression as a whole; ``pattern`` is in the syntax of Rust's ``regex``.

    Build one with `Grammar.regex` or `Grammar.json_schema`.
    """

    pattern: str

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return the texts that match a pattern from their first character to their last."""
        if not isinstance(pattern, str) or not pattern:
            raise InvalidOption("a grammar's pattern must be a string of at least one character")
        if len(pattern) > MOST_CHARACTERS:
            raise InvalidOption(f"a grammar's pattern has {len(pattern)} characters: at most {MOST_CHARACTERS} work")
        return cls(pattern)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """Return the JSON texts of a schema, given as a mapping or as JSON.

        Properties come in the schema's order. Parts of a schema that no regular expression can say are refused by
        name; recursive ones end at three levels.
        """
        text = schema if isinstance(schema, str) else _as_json(schema)
        if len(text) > MOST_CHARACTERS:
            raise InvalidOption(f"a JSON schema has {len(text)} characters: at most {MOST_CHARACTERS} work")
        try:
            return cls.regex(library().json_schema.build_regex_from_schema(text))
        except InvalidOption:
            raise
        except Exception as error:  # the library's own errors are of several kinds
            raise InvalidOption(f"the JSON schema cannot be followed: {one_line(str(error))}") from error

    @classmethod
    def json_object(cls) -> "Grammar":
        """Return all JSON objects, nested up to three levels."""
        return cls.json_schema({"type": "object"})


def library() -> Any:
    """Return the library that compiles schemas and expressions, or raise InvalidOption with how to get it."""
    try:
        import outlines_core
        import outlines_core.json_schema
    except ImportError as error:
        raise InvalidOption(f"grammars need outlines-core: {_MEND}") from error
    return outlines_core


def _as_json(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise InvalidOption(f"a JSON schema is a mapping or JSON text, not {type(schema).__name__}")
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"the JSON schema is not JSON: {one_line(str(error))}") from error
