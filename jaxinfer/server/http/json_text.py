"""JSON as it comes from strangers and goes back to them."""

import json
from collections.abc import Mapping
from typing import Any

from jaxinfer.server.api.errors import ApiError


def write_json(value: Any) -> bytes:
    """Return a value as JSON; half a pair of surrogates, which UTF-8 lacks, is written as its escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def read_json(text: bytes) -> Mapping[str, Any]:
    """Return the object that a body holds; raise ApiError for anything else."""
    try:
        value = json.loads(text, parse_int=_whole, parse_constant=_refuse_constant, object_pairs_hook=_pairs)
    except RecursionError:
        raise _wrong("its values are nested too deeply") from None
    except UnicodeDecodeError:
        raise _wrong("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _wrong(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError as error:
        raise _wrong(str(error)) from None
    if not isinstance(value, dict):
        raise _wrong("it is not an object")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return made


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python reads some thousand digits: more would take long
        raise ValueError(f"a number of {len(digits):,} digits is too long") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _wrong(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
