"""What one run of a template may use: steps, characters and processor time, and the size of any one value.

All of it grows with the input, which is the user's own, so that a long conversation never exceeds it.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

_STEPS, _STEPS_PER_NODE = 1_000_000, 256
_CHARACTERS, _CHARACTERS_PER_CHARACTER = 1 << 24, 64
_NODES_OF_ONE, _CHARACTERS_OF_ONE, _TIMES_INPUT = 100_000, 1 << 22, 4
# Of processor time, looked at every few steps: none takes long.
_SECONDS, _STEPS_PER_LOOK = 3.0, 16
# The library counts this many nodes of a value about as fast as a template makes a step.
_NODES_PER_STEP = 8
# Integers with more bits are slow to multiply and to print.
MOST_BITS = 1 << 14


class Budget:
    """Counts what a template uses, and raises SecurityError once that is too much."""

    def __init__(self, nodes: int, characters: int) -> None:
        """Give a budget for input of so many nodes and characters, as `weigh` counts them."""
        self._steps = _STEPS + _STEPS_PER_NODE * nodes
        self._characters = _CHARACTERS + _CHARACTERS_PER_CHARACTER * characters
        self._most_nodes = _NODES_OF_ONE + _TIMES_INPUT * nodes
        self._most_characters = _CHARACTERS_OF_ONE + _TIMES_INPUT * characters
        self._end, self._looks = time.thread_time() + _SECONDS, 0

    def step(self, count: int = 1) -> None:
        """Spend steps; each loop's turn, call, filter, test and operator is one."""
        self._steps -= count
        self._looks += 1
        if self._steps < 0 or (self._looks % _STEPS_PER_LOOK == 0 and time.thread_time() > self._end):
            raise SecurityError("it takes too long")

    def write(self, count: int) -> None:
        """Spend characters, before they are made where that is known."""
        self._characters -= count
        if self._characters < 0:
            raise SecurityError("it writes too much")

    def small(self, value: int, most: int) -> None:
        """Refuse a number above a bound."""
        if value > most:
            raise SecurityError("it asks for too much")

    def made(self, value: Any) -> Any:
        """Return a value that a template made, after a look at its size.

        Parts that occur several times count as often: they are compared, hashed and printed as often.
        """
        kind = type(value)
        if kind is str:
            self.write(len(value))
        elif kind in (list, tuple, dict):
            nodes, _ = weigh(value, self._most_nodes, self._most_characters)
            self.step(nodes // _NODES_PER_STEP)
        elif kind is int:
            self.small(value.bit_length(), MOST_BITS)
        elif isinstance(value, str | bytes):
            self.write(len(value))
        elif isinstance(value, Generator):
            return self._counted(value)
        return value

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield self.made(item)


def weigh(value: Any, most_nodes: int | None = None, most_characters: int | None = None) -> tuple[int, int]:
    """Count a value's nodes and characters; raise SecurityError above a bound."""
    nodes = characters = 0
    waiting = [value]
    while waiting:
        one = waiting.pop()
        nodes += 1
        if isinstance(one, str | bytes):
            characters += len(one)
        elif isinstance(one, dict):
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif isinstance(one, list | tuple | set | frozenset):
            waiting.extend(one)
        if most_nodes is not None and nodes + len(waiting) > most_nodes:
            raise SecurityError("it makes too large a value")
        if most_characters is not None and characters > most_characters:
            raise SecurityError("it makes too large a value")
    return nodes, characters


_CURRENT: ContextVar[Budget] = ContextVar("budget of the template that runs")


def current() -> Budget:
    """Return the budget of the template that this thread runs."""
    return _CURRENT.get()


@contextmanager
def budget_for(*given: Any) -> Iterator[None]:
    """Run a template within the budget for its input."""
    token = _CURRENT.set(Budget(*weigh(given)))
    try:
        yield
    finally:
        _CURRENT.reset(token)
