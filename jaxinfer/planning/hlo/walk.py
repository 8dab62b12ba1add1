"""Walks a compiled program: where each instruction runs, how often, and what it moves and computes."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxinfer.planning.hlo.collectives import (
    as_run,
    begun_channels,
    buffer_bytes,
    collective_kind,
    group_size,
    is_repeated,
    num_partitions,
    sent_bytes,
    with_rows_sent,
)
from jaxinfer.planning.hlo.text import Array, Computation, Line, Program, read_program
from jaxinfer.planning.hlo.traffic import hbm_traffic, multiplied_flops

_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    ``loops`` and ``branches`` count the loops and conditionals around it. ``fused`` marks an instruction inside a
    fusion: its result is never stored. ``elements`` and ``bytes`` measure the largest array of its result. ``runs`` is
    how often it runs: the product of the loops' trip counts, where a data-dependent loop counts as 1. ``read_bytes``
    and ``written_bytes`` are HBM traffic per run (0 inside a fusion: the fusion counts it), ``flops`` the operations of
    products per run, and ``sent_bytes`` the bytes sent to other devices per run. ``buffer_bytes`` are all bytes that a
    collective works on, and ``group`` is the number of devices that take part in it, 0 of other instructions.
    """

    name: str
    opcode: str
    elements: int
    bytes: int
    loops: int
    branches: int
    fused: bool
    runs: int
    read_bytes: int
    written_bytes: int
    flops: int
    sent_bytes: int
    buffer_bytes: int = 0
    group: int = 0

    @property
    def collective(self) -> str | None:
        """The kind of collective that this starts, if any."""
        return collective_kind(self.opcode)


@dataclass(frozen=True)
class Totals:
    """What a program moves and computes on one device.

    ``collectives`` gives the count and the bytes of each kind, ``groups`` the count of each kind among so many devices.
    """

    read_bytes: int
    written_bytes: int
    flops: int
    sent_bytes: int
    collectives: Mapping[str, tuple[int, int]]
    groups: Mapping[tuple[str, int], int]

    @property
    def hbm_bytes(self) -> int:
        """All bytes read from or written to HBM."""
        return self.read_bytes + self.written_bytes


def total(instructions: Iterable[Instruction], branches: bool = False) -> Totals:
    """Add up the instructions that always run and, with ``branches``, all branches of conditionals too.

    A data-dependent loop, such as the loop over decoding steps, counts as one run.
    """
    read = written = flops = sent = 0
    collectives: dict[str, tuple[int, int]] = {}
    groups: Counter[tuple[str, int]] = Counter()
    for found in instructions:
        if found.branches and not branches:
            continue
        read += found.read_bytes * found.runs
        written += found.written_bytes * found.runs
        flops += found.flops * found.runs
        sent += found.sent_bytes * found.runs
        if found.collective:
            count, size = collectives.get(found.collective, (0, 0))
            collectives[found.collective] = (count + found.runs, size + found.buffer_bytes * found.runs)
            groups[found.collective, found.group] += found.runs
    return Totals(read, written, flops, sent, collectives, groups)


def walk(hlo: str, inner_trips: int = 1) -> Iterator[Instruction]:
    """Yield every instruction that the entry computation reaches, once for each place that calls it.

    A data-dependent loop counts as one run, or as ``inner_trips`` runs if it is directly inside another one.
    """
    program, num_devices = read_program(hlo), num_partitions(hlo)
    begun = begun_channels(program)
    stack = [(program.entry, 0, 0, False, 1, 0)]
    while stack:
        name, loops, branches, fused, runs, decided = stack.pop()
        computation = program.computations.get(name)
        if computation is None:
            continue
        for line in (as_run(computation, line) for line in computation.lines.values()):
            if is_repeated(begun, computation, line):
                continue
            sent = with_rows_sent(computation, line)
            largest = max(line.results, key=lambda array: array.elements, default=Array("", (0,), ""))
            read, written = (0, 0) if fused else hbm_traffic(program, computation, line)
            flops = multiplied_flops(computation, line)
            yield Instruction(
                line.name,
                line.opcode,
                largest.elements,
                largest.bytes,
                loops,
                branches,
                fused,
                runs,
                read,
                written,
                flops,
                sent_bytes(sent, num_devices),
                buffer_bytes(sent),
                group_size(line, num_devices) if collective_kind(line.opcode) else 0,
            )
            trips = trip_count(program, computation, line) if line.opcode == "while" else 1
            inside_decided = decided + (trips is None)
            trips = max(1, (inner_trips if inside_decided == 2 else 1) if trips is None else trips)
            for role, called in _CALLED.findall(line.attributes):
                inside_branch = branches + (role in ("true_computation", "false_computation"))
                inside_loop = loops + (role in ("body", "condition"))
                # The computation that a reduction applies to each pair of elements is not a separate instruction.
                inside_fusion = fused or line.opcode == "fusion" or (role == "to_apply" and line.opcode != "call")
                stack.append((called, inside_loop, inside_branch, inside_fusion, runs * trips, inside_decided))
            for names in _BRANCHES.findall(line.attributes):
                stack.extend(
                    (called.strip().lstrip("%"), loops, branches + 1, fused, runs, decided)
                    for called in names.split(",")
                )


def trip_count(program: Program, computation: Computation, loop: Line) -> int | None:
    """Return how often a loop's body runs, from its constant start, end and step; None if data decides it."""
    known = _KNOWN_TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    roles = dict(_CALLED.findall(loop.attributes))
    condition, body = (program.computations.get(roles.get(role, "")) for role in ("condition", "body"))
    if condition is None or body is None:
        return None
    test = condition.root
    if test.opcode == "fusion":
        inner = program.computations[test.called or ""]
        sources = {inner.parameters[index]: operand for index, operand in enumerate(test.operands)}
        test, scope = inner.root, inner
    else:
        sources, scope = {}, condition
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    ends = [_resolve(condition, sources.get(name, name), scope) for name in test.operands]
    if not isinstance(ends[0], tuple) or not isinstance(ends[1], int):
        return None
    (index,) = ends[0]
    start = _element(computation, loop.operands[0], index)
    step = _step(body, index)
    if start is None or not step:
        return None
    return max(0, -(-(ends[1] - start) // step))


def _resolve(computation: Computation, name: str, scope: Computation) -> int | tuple[int] | None:
    """Return a constant as a number, or an element of the loop's state as its index in the tuple."""
    line = computation.lines.get(name) or scope.lines.get(name)
    while line is not None and line.opcode in ("copy", "bitcast", "convert") and line.operands:
        line = computation.lines.get(line.operands[0])
    if line is None:
        return None
    if line.opcode == "constant":
        return int(line.arguments) if line.arguments.lstrip("-").isdigit() else None
    if line.opcode == "get-tuple-element":
        found = re.search(r"index=(\d+)", line.attributes)
        return (int(found[1]),) if found else None
    return None


def _element(computation: Computation, name: str, index: int) -> int | None:
    """Return an element of a tuple if it is constant."""
    line = computation.lines.get(name)
    if line is None or line.opcode != "tuple" or index >= len(line.operands):
        return None
    value = _resolve(computation, line.operands[index], computation)
    return value if isinstance(value, int) else None


def _step(body: Computation, index: int) -> int | None:
    """Return the constant that a loop's body adds to an element of its state."""
    if body.root.opcode != "tuple" or index >= len(body.root.operands):
        return None
    line = body.lines.get(body.root.operands[index])
    while line is not None and line.opcode in ("copy", "bitcast") and line.operands:
        line = body.lines.get(line.operands[0])
    if line is None or line.opcode != "add":
        return None
    parts = [_resolve(body, name, body) for name in line.operands]
    steps = [part for part in parts if isinstance(part, int)]
    return steps[0] if (index,) in parts and len(steps) == 1 else None
