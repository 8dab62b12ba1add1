"""A deliberate fault: a few characters of the code that are changed, and a test that must then fail."""

from typing import NamedTuple


class Fault(NamedTuple):
    """``old``, which stands exactly once in ``file``, becomes ``new``; ``caught_by`` is a test file or a test's id.

    ``name`` says in a few words what goes wrong. The test is of the ordinary or the slow run.
    """

    name: str
    file: str
    old: str
    new: str
    caught_by: str
