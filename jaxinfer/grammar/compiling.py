"""A program that compiles one grammar: JSON from standard input, arrays to standard output, or an error in one line.

It runs in a process of its own, with bounds: a pattern of twenty characters can ask for all memory there is.
"""

import io
import json
import sys
from typing import Any

import numpy as np

DEAD = -1
SECONDS = 20
MEMORY_BYTES = 2 * 2**30
# Characters that no text has: one that cannot be typed, and the last of all. Without a beginning of its own some
# patterns take hundreds of times as long (outlines-core 0.2.14, any JSON value: 37 s instead of 0.05 s).
_BEGIN, _END = "\0", "\U0010ffff"
# Before equal ones are joined.
MOST_STATES = 100_000


def _bound() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such bounds; the parent's clock still runs
        return
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _compiled(pattern: str) -> dict[str, np.ndarray]:
    import outlines_core

    # Each byte is a token of its own, so that the library's tokens do not matter. Where a shorter text matches too, the
    # library loses ways to a longer one (outlines-core 0.2.14: "1.5" of "1(\\.5)?"), so a last character marks the end.
    alphabet = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    index = outlines_core.Index(f"{_BEGIN}(?:{pattern}){_END}", alphabet)
    found, first, final = index.get_transitions(), index.get_initial_state(), index.get_final_states()
    for byte in _BEGIN.encode():
        first = found[first][byte]
    numbers = {first: 0}
    for name in (*found, *(after for row in found.values() for after in row.values())):
        numbers.setdefault(name, len(numbers))
    if len(numbers) > MOST_STATES:
        raise ValueError(f"it has {len(numbers)} states, of {MOST_STATES} at most")
    next_NB = np.full((len(numbers), 256), DEAD, np.int32)
    for name, row in found.items():
        for byte, after in row.items():
            if byte < 256:  # the library adds a token that ends a text
                next_NB[numbers[name], byte] = numbers[after]
    after_N, dead = np.arange(len(numbers)), np.full((1, 256), DEAD, np.int32)
    for byte in _END.encode():
        after_N = np.concatenate([next_NB, dead])[after_N, byte]
    is_final_N = np.array([*(name in final for name in numbers), False])
    return {"next_NB": next_NB, "ends_N": is_final_N[after_N]}


def _pattern(kind: str, given: Any) -> str:
    """Return a regular expression of a pattern, or of parts, a list of their kinds and what they are."""
    if isinstance(given, str):
        _check_groups(given)
        return given
    parts = [f"(?:{_pattern(*part)})" for part in given]
    if kind == "repeated":
        part, between = parts
        return f"{part}(?:{between}{part})*"
    return ("|" if kind == "any_of" else "").join(parts)


def _check_groups(pattern: str) -> None:
    """Refuse a pattern that closes a group that it has not opened: another group is put around it."""
    depth, in_class, characters = 0, 0, iter(pattern)
    for character in characters:
        if character == "\\":
            next(characters, None)
        elif character in "[]":
            in_class = max(in_class + (1 if character == "[" else -1), 0)
        elif not in_class and character in "()":
            depth += 1 if character == "(" else -1
            if depth < 0:
                raise ValueError("a group is closed that is not open")


def main() -> int:
    """Compile what stands in standard input; exit code 3 with the reason if it cannot be."""
    _bound()
    asked = json.load(sys.stdin.buffer)
    try:
        arrays = _compiled(_pattern(*asked["grammar"]))
    except ImportError:
        print("grammars need outlines-core; install it with: pip install 'jaxinfer[grammar]'")
        return 4
    except MemoryError:  # which has no text
        return 1
    except BaseException as error:  # the library's own are of several kinds, and panics are no `Exception`
        print(str(error) or type(error).__name__)
        return 3
    content = io.BytesIO()
    np.savez(content, next_NB=arrays["next_NB"], ends_N=arrays["ends_N"])
    sys.stdout.buffer.write(content.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
