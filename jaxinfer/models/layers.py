"""How layers of several kinds are grouped for a scan, and where each layer's parameters stand.

A scan runs one body over stacked parameters. Layers whose kinds repeat with a period are scanned a period at a time;
layers that come in long stretches of one kind are scanned a stretch at a time. The names say which layers a stack
holds: ``layers_0_24_6/offset_2`` is layers 2, 8, 14 and 20, ``layer_25`` is layer 25. Where one scan holds all layers
and all are of one kind, the stack stands under ``blocks`` itself.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxinfer.models.config import DecoderConfig

BLOCKS = "blocks"
KERNEL, TRANSPOSED_KERNEL = "kernel", "transposed_kernel"
_LONGEST_PERIOD = 8
_SINGLE = re.compile(r"layer_(\d+)")
_CYCLE = re.compile(r"layers_(\d+)_(\d+)_(\d+)")
_OFFSET = re.compile(r"offset_(\d+)")


class Cycle(NamedTuple):
    """Layers ``start .. stop - 1``, scanned ``period`` at a time."""

    start: int
    stop: int
    period: int

    @property
    def repeats(self) -> int:
        """How many steps the scan has."""
        return (self.stop - self.start) // self.period

    @property
    def name(self) -> str:
        """The name of its parameters."""
        return f"layers_{self.start}_{self.stop}_{self.period}"


class Location(NamedTuple):
    """Which layers a parameter belongs to, and its name within a block (or in the decoder, where ``layers`` is None).

    ``stacked`` tells that its first axis runs over the layers, ``transposed`` that it is a kernel ``[in, out]``; the
    name is the same for both orders of a kernel.
    """

    layers: range | None
    stacked: bool
    name: str
    transposed: bool = False


def cycles(config: DecoderConfig) -> tuple[Cycle, ...]:
    """Split the layers into scans, in order; single layers are cycles that run once."""
    period, count = len(config.layer_pattern), config.num_layers
    if period <= _LONGEST_PERIOD and count >= 2 * period:
        whole = count // period * period
        rest = [Cycle(layer, layer + 1, 1) for layer in range(whole, count)]
        return (Cycle(0, whole, period), *rest)
    found, start = [], 0
    for _, stretch in itertools.groupby(config.layers):
        stop = start + len(list(stretch))
        found.append(Cycle(start, stop, 1))
        start = stop
    return tuple(found)


def index_in_kind(config: DecoderConfig, layer: int) -> tuple[int, int]:
    """Return which of the configuration's kinds a layer is of, and how many of that kind come before it."""
    layers = config.layers
    return config.kinds.index(layers[layer]), layers[:layer].count(layers[layer])


def locate(path: tuple[str, ...], shape: tuple[int, ...]) -> Location:
    """Tell what the path of a parameter of this shape means."""
    if path[-1] == TRANSPOSED_KERNEL:
        return locate((*path[:-1], KERNEL), shape)._replace(transposed=True)
    if path[0] != BLOCKS:
        return Location(None, False, ".".join(path))
    if single := _SINGLE.fullmatch(path[1]):
        layer = int(single[1])
        return Location(range(layer, layer + 1), False, ".".join(path[2:]))
    if (cycle := _CYCLE.fullmatch(path[1])) and (offset := _OFFSET.fullmatch(path[2])):
        start, stop, period = (int(number) for number in cycle.groups())
        return Location(range(start + int(offset[1]), stop, period), True, ".".join(path[3:]))
    return Location(range(shape[0]), True, ".".join(path[1:]))


def stored_kernel(linear: Mapping[str, Any]) -> Any:
    """Return the kernel of a `Linear`'s parameters as ``[out, in]``."""
    return linear[KERNEL] if KERNEL in linear else linear[TRANSPOSED_KERNEL].swapaxes(-1, -2)
