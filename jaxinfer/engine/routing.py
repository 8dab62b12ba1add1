"""Decides which group of an engine's devices a request goes to: policy only."""

from collections.abc import Sequence
from typing import NamedTuple


class Standing(NamedTuple):
    """A group as a request finds it: its rows, the sequences that it has, and how much of the prompt it has cached."""

    rows: int
    sequences: int
    cached_tokens: int


def choose_group(standings: Sequence[Standing]) -> int:
    """Return the place of the group that a request goes to.

    Among those with a free row it is the one that has most of the prompt; where none is free, the one with the fewest
    sequences, so that a prompt which many share does not crowd one group.
    """

    def worth(place: int) -> tuple[int, ...]:
        rows, sequences, cached = standings[place]
        is_free = sequences < rows
        return is_free, cached if is_free else 0, -sequences, cached, -place

    return max(range(len(standings)), key=worth)
