"""The collectives of a compiled program: among how many devices, and how many bytes each device sends."""

import math
import re
from dataclasses import replace

from jaxinfer.planning.hlo.text import Computation, Line, Program

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)

_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_AXIS = re.compile(r"'(\w+)'=(\d+)")


def collective_kind(opcode: str) -> str | None:
    """Return the kind of collective that an instruction starts, None if it starts none."""
    kind = opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def as_run(computation: Computation, line: Line) -> Line:
    """Return an instruction as the device runs it: a fused all-reduce and slice is a reduce-scatter.

    The TPU compiler writes a reduce-scatter as such a fusion.
    """
    if line.opcode != "all-reduce" or not computation.name.startswith("all-reduce-scatter"):
        return line
    return replace(line, opcode="reduce-scatter", results=computation.root.results)


def with_rows_sent(computation: Computation, line: Line) -> Line:
    """Return a ragged all-to-all with as many rows as there are; other instructions are unchanged.

    Of what it takes and what it fills, the larger has room for more rows than there are.
    """
    if collective_kind(line.opcode) != "ragged-all-to-all":
        return line
    taken, filled = computation.lines[line.operands[0]].results[:1], line.results[:1]
    return replace(line, results=min(taken, filled, key=lambda arrays: arrays[0].bytes))


def begun_channels(program: Program) -> set[str]:
    """Return the channels of collectives that fusions begin; others, that go on with one or end it, name it again."""
    return {
        channel
        for computation in program.computations.values()
        for line in computation.lines.values()
        if collective_kind(line.opcode) and (channel := _channel_of(line)) and _begins(computation)
    }


def is_repeated(begun: set[str], computation: Computation, line: Line) -> bool:
    """Whether a collective is one of those channels, and another fusion begins it."""
    return bool(collective_kind(line.opcode)) and _channel_of(line) in begun and not _begins(computation)


def _channel_of(line: Line) -> str:
    found = _CHANNEL.search(line.attributes)
    return found[1] if found else ""


def _begins(computation: Computation) -> bool:
    return 'custom_call_target="AsyncCollectiveStart"' in computation.root.attributes


def num_partitions(hlo: str) -> int:
    """Return the number of devices that a program runs on."""
    found = _PARTITIONS.search(hlo.partition("\n")[0])
    return int(found[1]) if found else 1


def group_size(line: Line, num_devices: int) -> int:
    """Return the number of devices in a collective's group. HLO lists them, counts them or names mesh axes."""
    if found := _LISTED.search(line.attributes):
        return len(found[1].split(","))
    if found := _COUNTED.search(line.attributes):
        return int(found[1])
    if found := _NAMED.search(line.attributes):
        sizes = {axis: int(size) for axis, size in _AXIS.findall(found[1])}
        return math.prod(sizes[name.strip("' ")] for name in found[2].split(","))
    return num_devices


def buffer_bytes(line: Line) -> int:
    """Return the total bytes of the buffers that a collective reduces, gathers or sends; 0 for other instructions."""
    kind, sizes = collective_kind(line.opcode), [array.bytes for array in line.results]
    if kind is None or not sizes:
        return 0
    if not line.opcode.endswith("-start"):
        return sum(sizes)
    if kind == "reduce-scatter":
        return max(sizes)  # the operand; the result is a part of it
    # An instruction that starts a collective may list its operands before its results, and flags after them.
    count, buffers = len(line.operands), [array.bytes for array in line.results if array.elements > 1]
    return sum(buffers[count : 2 * count] if len(buffers) >= 2 * count else buffers)


def sent_bytes(line: Line, num_devices: int) -> int:
    """Return the fewest bytes that one device can send for a collective; ring and tree algorithms reach this.

    To reduce or gather a buffer among n devices, each sends n - 1 of its n parts: once, or twice for an all-reduce.
    """
    kind, whole = collective_kind(line.opcode), buffer_bytes(line)
    if kind is None or not whole:
        return 0
    is_start, devices = line.opcode.endswith("-start"), group_size(line, num_devices)
    if kind in ("collective-permute", "collective-broadcast"):
        return whole
    if kind == "reduce-scatter" and not is_start:
        return whole * (devices - 1)
    return (2 if kind == "all-reduce" else 1) * whole * (devices - 1) // devices
