"""How layers of several kinds are grouped into scans, and the place of each layer's parameters.

A scan runs one body over stacked parameters. If the kinds repeat with a period, a scan step runs one period. Long runs
of layers of one kind get one scan each. Names say which layers a stack holds: ``layers_0_24_6/offset_2`` is layers 2,
8, 14 and 20; ``layer_25`` is layer 25. If one scan holds all layers and all are of one kind, the stack is ``blocks``.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxinfer.models.config import DecoderConfig, shortest_pattern
from jaxinfer.notation import Params

BLOCKS = "blocks"
KERNEL, TRANSPOSED_KERNEL = "kernel", "transposed_kernel"
# What a layer with experts has of parameters that a dense one has not.
EXPERTS = "experts"
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
        """The number of the scan's steps."""
        return (self.stop - self.start) // self.period

    @property
    def name(self) -> str:
        """The name of its parameters."""
        return f"layers_{self.start}_{self.stop}_{self.period}"


class Location(NamedTuple):
    """The layers that a parameter belongs to, and its name in a block (or in the decoder, if ``layers`` is None).

    ``stacked`` means that its first axis runs over the layers, ``transposed`` that it is a kernel ``[in, out]``. A
    kernel has the same name in both orders.
    """

    layers: range | None
    stacked: bool
    name: str
    transposed: bool = False


def cycles(config: DecoderConfig) -> tuple[Cycle, ...]:
    """Split the layers into scans, in order; a single layer is a cycle that runs once."""
    period, count = len(shortest_pattern(config.bodies)), config.num_layers
    if period <= _LONGEST_PERIOD and count >= 2 * period:
        whole = count // period * period
        rest = [Cycle(layer, layer + 1, 1) for layer in range(whole, count)]
        return (Cycle(0, whole, period), *rest)
    found, start = [], 0
    for _, stretch in itertools.groupby(config.bodies):
        stop = start + len(list(stretch))
        found.append(Cycle(start, stop, 1))
        start = stop
    return tuple(found)


def index_in_kind(config: DecoderConfig, layer: int) -> tuple[int, int]:
    """Return the index of a layer's kind in the config, and the number of earlier layers of that kind."""
    layers = config.layers
    return config.kinds.index(layers[layer]), layers[:layer].count(layers[layer])


def locate(path: tuple[str, ...], shape: tuple[int, ...]) -> Location:
    """Return the location of a parameter from its path and shape."""
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


def put(params: Params, path: str, array: Any) -> None:
    """Store a parameter of a tree of dictionaries at its path, parted by dots."""
    *parents, last = path.split(".")
    for parent in parents:
        params = params.setdefault(parent, {})
    params[last] = array


def expert_stacks(params: Mapping[str, Any]) -> list[Any]:
    """Return the kernels of experts among parameters, or what describes them."""
    found = []
    for name, value in params.items():
        if isinstance(value, Mapping):
            found += value.values() if name == EXPERTS else expert_stacks(value)
    return found


def stored_kernel(linear: Mapping[str, Any]) -> Any:
    """Return the kernel of a `Linear`'s parameters as ``[out, in]``."""
    return linear[KERNEL] if KERNEL in linear else linear[TRANSPOSED_KERNEL].swapaxes(-1, -2)
