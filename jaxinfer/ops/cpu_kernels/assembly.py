"""Writes LLVM assembly, one function at a time."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

# The type of a value that a loop carries, and its first value.
_COUNT = "i64", "0"


def float_constant(number: float) -> str:
    """Return a float32 in LLVM's notation: the bits of a float64."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", np.float32(number)))
    return f"0x{bits:016X}"


def repeated_constant(kind: str, number: int, count: int) -> str:
    """Return a vector with one integer of LLVM's type ``kind`` in every lane."""
    return f"<{', '.join([f'{kind} {number}'] * count)}>"


@dataclass
class Loop:
    """The names in a loop: its integer, the values held from the previous iteration, and those left to the next."""

    index: str
    all_held: list[str]
    all_left: list[str]

    @property
    def held(self) -> str:
        """The first value from the previous iteration."""
        return self.all_held[0]

    @property
    def left(self) -> str:
        """The first value for the next iteration."""
        return self.all_left[0]

    @left.setter
    def left(self, value: str) -> None:
        self.all_left[0] = value


class Code:
    """The assembly of a function, appended instruction by instruction.

    ``head`` is the text between ``define`` and the body; the first block is called ``entry``.
    """

    def __init__(self, head: str) -> None:
        self._lines = [f"define {head} {{", "entry:"]
        self._values = 0

    def value(self, instruction: str, name: str | None = None) -> str:
        """Append an instruction that returns a value; return the value's name."""
        if name is None:
            name = f"%v{self._values}"
            self._values += 1
        self._lines.append(f"  {name} = {instruction}")
        return name

    def effect(self, instruction: str) -> None:
        """Append an instruction that returns no value."""
        self._lines.append(f"  {instruction}")

    def start(self, block: str) -> None:
        """Begin a block."""
        self._lines.append(f"{block}:")

    def at(self, element: str, pointer: str, index: str | int) -> str:
        """Return the address of an element counted from ``pointer``."""
        return self.value(f"getelementptr {element}, ptr {pointer}, i64 {index}")

    def load(self, kind: str, pointer: str, align: int | None = None) -> str:
        """Return the value at an address."""
        return self.value(f"load {kind}, ptr {pointer}" + (f", align {align}" if align else ""))

    def load_at(self, kind: str, pointer: str, index: str | int) -> str:
        """Return an element counted from ``pointer``."""
        return self.load(kind, self.at(kind, pointer, index))

    def store_at(self, kind: str, value: str | int, pointer: str, index: str | int) -> None:
        """Write an element counted from ``pointer``."""
        self.effect(f"store {kind} {value}, ptr {self.at(kind, pointer, index)}")

    def arithmetic(self, operation: str, one: str | int, other: str | int) -> str:
        """Return a 64-bit integer computed from two."""
        return self.value(f"{operation} i64 {one}, {other}")

    def smaller(self, one: str | int, other: str | int) -> str:
        """Return the smaller of two 64-bit integers."""
        return self._chosen("slt", one, other)

    def larger(self, one: str | int, other: str | int) -> str:
        """Return the larger of two 64-bit integers."""
        return self._chosen("sgt", one, other)

    def ceiling(self, dividend: str | int, divisor: str | int) -> str:
        """Return a quotient of positive 64-bit integers, rounded up."""
        return self.arithmetic("sdiv", self.arithmetic("sub", self.arithmetic("add", dividend, divisor), 1), divisor)

    def total(self, numbers: list[str]) -> str:
        """Return the sum of 64-bit integers."""
        total = "0"
        for number in numbers:
            total = self.arithmetic("add", total, number)
        return total

    def branch(self, condition: str, then: str, otherwise: str) -> None:
        """End a block with a conditional branch."""
        self.effect(f"br i1 {condition}, label %{then}, label %{otherwise}")

    @contextmanager
    def repeated(
        self, block: str, first: str | int, past: str | int, step: str | int = 1, *carried: tuple[str, str]
    ) -> Iterator["Loop"]:
        """Append the instructions written inside the context as a loop over integers from ``first`` to below ``past``.

        ``block`` is a unique block name. ``carried`` are the types of values that each iteration passes to the next,
        and their initial values.
        """
        carried = carried or (_COUNT,)
        held = [f"%{block}_held{at or ''}" for at in range(len(carried))]
        loop = Loop(f"%{block}_i", held, list(held))
        self.effect(f"br label %{block}_before")
        self.start(f"{block}_before")
        self.effect(f"br label %{block}")
        self.start(block)
        self.value(f"phi i64 [ {first}, %{block}_before ], [ %{block}_next, %{block}_end ]", loop.index)
        # The names of the values passed on are known only after the iteration is written.
        place = len(self._lines)
        self.branch(self.value(f"icmp slt i64 {loop.index}, {past}"), f"{block}_body", f"{block}_after")
        self.start(f"{block}_body")
        yield loop
        self.effect(f"br label %{block}_end")
        self.start(f"{block}_end")
        self.value(f"add i64 {loop.index}, {step}", f"%{block}_next")
        self.effect(f"br label %{block}")
        self._lines[place:place] = [
            f"  {name} = phi {kind} [ {initial}, %{block}_before ], [ {left}, %{block}_end ]"
            for name, left, (kind, initial) in zip(held, loop.all_left, carried, strict=True)
        ]
        self.start(f"{block}_after")

    def text(self) -> str:
        """Return the whole function."""
        return "\n".join([*self._lines, "}", ""])

    def _chosen(self, comparison: str, one: str | int, other: str | int) -> str:
        holds = self.value(f"icmp {comparison} i64 {one}, {other}")
        return self.value(f"select i1 {holds}, i64 {one}, i64 {other}")
