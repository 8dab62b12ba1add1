"""Estimates what collectives take however few their bytes are: the links that their parts cross one after the other.

A part of a device's numbers reaches the farthest device of its group over all links between the two. An all-reduce
crosses them twice: to the device that adds up a part, and from there to all. Neither can a collective be faster than
this, nor does the estimate say what it takes to begin one.
"""

import itertools
import math
from collections.abc import Mapping
from functools import lru_cache

from jaxinfer.planning.topology import chip_of, sides_of


def count_hops(groups: Mapping[tuple[str, int], int], topology: str) -> int:
    """Return how many links a program's collectives cross, one collective after the other.

    ``groups`` counts the collectives of each kind among so many devices, as `jaxinfer.planning.hlo.walk.Totals` does.
    """
    return sum(count * hops_of(kind, devices, topology) for (kind, devices), count in groups.items())


def hops_of(kind: str, devices: int, topology: str) -> int:
    """Return how many links one collective among so many devices of a slice crosses, one after the other."""
    if devices < 2:
        return 0
    # Between the stages of a pipeline, which are neighbours.
    if kind == "collective-permute":
        return 1
    return (2 if kind == "all-reduce" else 1) * farthest(devices, topology)


@lru_cache(maxsize=256)
def farthest(devices: int, topology: str) -> int:
    """Return how many links apart the farthest of so many devices are, where they stand as close as the slice allows.

    Devices of one chip count as neighbours.
    """
    sides = sides_of(topology)
    chips = -(-devices // chip_of(topology).devices)
    boxes = itertools.product(*(range(1, min(length, chips) + 1) for length, _ in sides))
    across = (sum(map(_across, box, sides)) for box in boxes if math.prod(box) >= chips)
    return max(1, min(across))


def _across(length: int, side: tuple[int, bool]) -> int:
    """Return the most links between two of ``length`` neighbours along a side of a slice."""
    whole, is_ring = side
    return whole // 2 if is_ring and length == whole else length - 1
