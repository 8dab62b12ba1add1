"""What a collective of a compiled program sends: among how many devices, and how many bytes from each."""

import math
import re
from dataclasses import replace

from jaxinfer.planning.hlo.text import Computation, Line

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")

_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")


def collective_kind(opcode: str) -> str | None:
    """Return the kind of communication that an instruction starts, if any."""
    kind = opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def as_run(computation: Computation, line: Line) -> Line:
    """Return an instruction as the device runs it: a sum in a fusion of which each keeps a part is a reduce-scatter.

    A TPU's compiler writes such as a sum and a slice of it.
    """
    if line.opcode != "all-reduce" or not computation.name.startswith("all-reduce-scatter"):
        return line
    return replace(line, opcode="reduce-scatter", results=computation.root.results)


def num_partitions(hlo: str) -> int:
    """Return how many devices a program runs on."""
    found = _PARTITIONS.search(hlo.partition("\n")[0])
    return int(found[1]) if found else 1


def group_size(line: Line, num_devices: int) -> int:
    """Return how many devices a collective runs among; they may be listed, counted or named as axes of a mesh."""
    if found := _LISTED.search(line.attributes):
        return len(found[1].split(","))
    if found := _COUNTED.search(line.attributes):
        return int(found[1])
    if found := _NAMED.search(line.attributes):
        sizes = {axis: int(size) for axis, size in _AXIS.findall(found[1])}
        return math.prod(sizes[name.strip("' ")] for name in found[2].split(","))
    return num_devices


def buffer_bytes(line: Line) -> int:
    """Return how large the buffers are, all together, that a collective reduces, gathers or sends; 0 if it is none."""
    kind, sizes = collective_kind(line.opcode), [array.bytes for array in line.results]
    if kind is None or not sizes:
        return 0
    if not line.opcode.endswith("-start"):
        return sum(sizes)
    if kind == "reduce-scatter":
        return max(sizes)  # the operand, of which the result is a part
    # A start may give its operands before its results, and flags after them.
    count, buffers = len(line.operands), [array.bytes for array in line.results if array.elements > 1]
    return sum(buffers[count : 2 * count] if len(buffers) >= 2 * count else buffers)


def sent_bytes(line: Line, num_devices: int) -> int:
    """Return the fewest bytes that one device can send for a collective: rings and trees of them reach this.

    Of n devices that reduce or gather a buffer each sends n - 1 of its n parts, once or, in an all-reduce, twice.
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
