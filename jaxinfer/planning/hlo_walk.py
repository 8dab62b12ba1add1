"""Read a compiled program's text: its instructions, and in which loop and branch each of them runs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
          "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?[)}\]]) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    ``loops`` counts the loops around it, ``branches`` the conditionals; ``fused`` tells that it is part of a fusion,
    whose inner results are never stored. ``elements`` and ``bytes`` measure the largest array of its result.
    """

    name: str
    opcode: str
    elements: int
    bytes: int
    loops: int
    branches: int
    fused: bool

    @property
    def collective(self) -> str | None:
        """The kind of communication between devices that this starts, if any."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None


def walk(hlo: str) -> Iterator[Instruction]:
    """Yield every instruction that the entry computation reaches, once for each place that it is reached from."""
    bodies, entry = _computations(hlo)
    stack = [(entry, 0, 0, False)]
    while stack:
        computation, loops, branches, fused = stack.pop()
        for line in bodies.get(computation, ()):
            found = _INSTRUCTION.match(line)
            if not found:
                continue
            name, result, opcode, rest = found.groups()
            elements, size = _largest_array(result)
            yield Instruction(name, opcode, elements, size, loops, branches, fused)
            for role, called in _CALLED.findall(rest):
                inside_branch = branches + (role in ("true_computation", "false_computation"))
                stack.append(
                    (called, loops + (role in ("body", "condition")), inside_branch, fused or opcode == "fusion")
                )
            for names in _BRANCHES.findall(rest):
                stack.extend((called.strip().lstrip("%"), loops, branches + 1, fused) for called in names.split(","))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return bodies, entry


def _largest_array(result: str) -> tuple[int, int]:
    largest = (0, 0)
    for dtype, shape in _ARRAY.findall(result):
        elements = 1
        for size in filter(None, shape.split(",")):
            elements *= int(size)
        largest = max(largest, (elements, elements * _BYTES.get(dtype, 0)))
    return largest
