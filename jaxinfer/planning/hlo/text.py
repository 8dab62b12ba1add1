"""Reads the text of a compiled program: its computations, their instructions, and the memory space of each array."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32,
         "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64}  # fmt: skip
_FLOAT8 = re.compile(r"f8\w+")
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?[)}\]]) ([a-z][\w\-]*)\((.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class Array:
    """An array of a program: its element type, its shape and its layout as text."""

    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def item_bits(self) -> int:
        """Bits per element; 0 for a type without data."""
        return 8 if _FLOAT8.fullmatch(self.dtype) else _BITS.get(self.dtype, 0)

    @property
    def bytes(self) -> int:
        """The bytes of its elements."""
        return self.elements * self.item_bits // 8

    @cached_property
    def hbm_bytes(self) -> int:
        """The bytes that it takes in HBM, with the padding of its tiles; 0 if it is in vector memory or on the host."""
        space = _SPACE.search(self.layout)
        if space is not None and space[1] != "0":
            return 0
        order = [int(axis) for axis in self.layout.partition(":")[0].split(",") if axis]
        tile = _TILE.search(self.layout)
        sizes = [self.shape[axis] for axis in order] if len(order) == len(self.shape) else list(self.shape[::-1])
        if tile is not None:
            for axis, size in enumerate(reversed([int(size) for size in tile[1].split(",")])):
                if axis < len(sizes):
                    sizes[axis] = -(-sizes[axis] // size) * size
        return math.prod(sizes) * self.item_bits // 8


@dataclass(frozen=True)
class Line:
    """One instruction as written: the arrays of its result, the names of its operands and its attributes as text."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    arguments: str
    root: bool

    @property
    def called(self) -> str | None:
        """The computation that a fusion or a call runs."""
        found = re.search(r"\b(?:calls|to_apply|called_computations)=\{?%([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def hbm_bytes(self) -> int:
        """The bytes that its result takes in HBM."""
        return sum(array.hbm_bytes for array in self.results)


@dataclass(frozen=True)
class Computation:
    """A computation's instructions by name, in order."""

    name: str
    lines: Mapping[str, Line]

    @cached_property
    def root(self) -> Line:
        """The instruction whose result the computation returns."""
        return next(line for line in self.lines.values() if line.root)

    @cached_property
    def parameters(self) -> dict[int, str]:
        """The names of the parameters, by index."""
        return {int(line.arguments): line.name for line in self.lines.values() if line.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Line]]:
        """The instructions that use each instruction's result."""
        found: dict[str, list[Line]] = {}
        for line in self.lines.values():
            for operand in dict.fromkeys(line.operands):
                found.setdefault(operand, []).append(line)
        return found


@dataclass(frozen=True)
class Program:
    """All computations of a program, and the name of its entry computation."""

    computations: Mapping[str, Computation]
    entry: str


def read_program(hlo: str) -> Program:
    """Read the text that `jax.stages.Compiled.as_text` returns."""
    computations: dict[str, Computation] = {}
    entry, lines = "", None
    for text in hlo.splitlines():
        head = _COMPUTATION.match(text)
        if head:
            lines = {}
            computations[head[2]] = Computation(head[2], lines)
            entry = head[2] if head[1] else entry
        elif text.startswith("}"):
            lines = None
        elif lines is not None and (line := read_line(text)) is not None:
            lines[line.name] = line
    return Program(computations, entry)


def read_line(text: str) -> Line | None:
    """Read one instruction; None if the line is not an instruction."""
    found = _INSTRUCTION.match(text)
    if found is None:
        return None
    root, name, result, opcode, rest = found.groups()
    arguments, attributes = _split_call(rest)
    arrays = tuple(
        Array(dtype, tuple(int(size) for size in shape.split(",") if size), layout)
        for dtype, shape, layout in _ARRAY.findall(result)
    )
    return Line(name, opcode, arrays, tuple(_OPERAND.findall(arguments)), attributes, arguments, bool(root))


def _split_call(rest: str) -> tuple[str, str]:
    """Split at the bracket that closes the operands."""
    depth = 1
    for index, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:index], rest[index + 1 :]
    return rest, ""
