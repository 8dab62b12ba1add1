"""Runs the scalar part of a scheduled kernel: how often each bundle runs, and how many bytes its copies move.

Only a TPU's scalar unit decides a kernel's control flow. So it is enough to follow its registers, predicates and scalar
memory. Results of the vector units stay unknown, and a branch that depends on them raises an error.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from pallas_kernels.bundles import Bundle, Operation

_OPERAND_STRIDE = 1 << 20
_MAX_BLOCK_RUNS = 20_000_000
_REGISTER = re.compile(r"^%[sp]\w*_([sp]\d+)$")
_SYMBOL = re.compile(r"#allocation\w+")


class ScheduleError(ValueError):
    """A schedule that cannot be parsed or followed."""


class _Unknown:
    """A value that depends on data: results computed from it are unknown too, and branches on it raise an error."""

    def _same(self, *_: Any) -> "_Unknown":
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _same
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise ScheduleError("the kernel's control flow depends on data that is not given: pass it as a NumPy array")


UNKNOWN = _Unknown()


@dataclass
class Machine:
    """The state of the scalar unit: registers and predicates by name, scalar memory by word, and bytes copied."""

    registers: dict[str, Any] = field(default_factory=dict)
    memory: dict[int, Any] = field(default_factory=dict)
    operands: Sequence[np.ndarray | None] = ()
    granule_bytes: int = 32
    core: int = 0
    hbm_bytes: int = 0

    def read(self, address: Any) -> Any:
        return UNKNOWN if address is UNKNOWN else self.memory.get(address, UNKNOWN)

    def write(self, predicate: Any, address: Any, value: Any) -> None:
        if predicate is not UNKNOWN and not predicate:
            return
        if address is UNKNOWN:
            raise ScheduleError("the kernel writes scalar memory at an address that depends on data")
        self.memory[address] = UNKNOWN if predicate is UNKNOWN else value

    def copy(self, kind: str, source: Any, target: Any, granules: Any) -> None:
        """Count a copy such as ``hbm_to_vmem``, and execute it if it goes to scalar memory."""
        if granules is UNKNOWN:
            raise ScheduleError("the kernel copies a number of bytes that depends on data")
        self.hbm_bytes += kind.count("hbm") * granules * self.granule_bytes
        if not kind.endswith("_to_smem") or target is UNKNOWN:
            return
        words = granules * self.granule_bytes // 4
        operand = None if source is UNKNOWN else self._operand_at(source)
        if operand is not None:
            values, start = operand
            for offset in range(words):
                at = start + offset
                self.memory[target + offset] = int(values[at]) if at < len(values) else 0

    def operand_value(self, index: int) -> Any:
        values = self.operands[index] if index < len(self.operands) else None
        return UNKNOWN if values is None else int(values[0])

    def _operand_at(self, pointer: int) -> tuple[np.ndarray, int] | None:
        # Pointers count granules. Addresses do too, or are shifted and count sixteen granules, depending on the chip.
        index, offset = divmod(pointer, _OPERAND_STRIDE << 4 if pointer >= _OPERAND_STRIDE << 4 else _OPERAND_STRIDE)
        if not 1 <= index <= len(self.operands):
            return None
        values = self.operands[index - 1]
        return None if values is None else (values, offset * self.granule_bytes // 4)


def wrap(value: Any) -> Any:
    """Return the value as a signed number of 32 bits."""
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def choose(predicate: Any, true: Any, false: Any) -> Any:
    """Return the value that the predicate selects; unknown if the predicate is."""
    return UNKNOWN if predicate is UNKNOWN else true if predicate else false


@dataclass(frozen=True)
class Run:
    """How often each block of bundles ran: ``counts`` and ``ends`` by the address of its first bundle."""

    counts: Mapping[int, int]
    ends: Mapping[int, int]
    hbm_bytes: int


def run_scalar_unit(
    bundles: Sequence[Bundle],
    operands: Sequence[np.ndarray | None],
    branch_slots: int,
    granule_bytes: int = 32,
    core: int = 0,
) -> Run:
    """Run a kernel; ``operands`` are the words of its operands, None if unknown.

    ``branch_slots`` bundles run after each branch, taken or not. Copies count ``granule_bytes`` at a time.
    """
    starts = {0, len(bundles)}
    for address, bundle in enumerate(bundles):
        for operation in bundle.operations:
            if operation.opcode.startswith("sbr"):
                if operation.target is None:
                    raise ScheduleError(f"cannot follow the branch {operation.opcode} at bundle {address:#x}")
                starts |= {operation.target, address + 1 + branch_slots}
    ordered = sorted(starts)
    ends = dict(pairwise(ordered))
    symbols: dict[str, int] = {}
    blocks = {start: _compile_block(bundles, start, end, branch_slots, symbols) for start, end in ends.items()}
    machine = Machine(operands=operands, granule_bytes=granule_bytes, core=core)
    counts: Counter[int] = Counter()
    at = 0
    while at < len(bundles):
        counts[at] += 1
        if counts[at] > _MAX_BLOCK_RUNS:
            raise ScheduleError(f"the loop at bundle {at:#x} does not end")
        at = blocks[at](machine, machine.registers)
    return Run(counts, ends, machine.hbm_bytes)


def _compile_block(
    bundles: Sequence[Bundle], start: int, end: int, branch_slots: int, symbols: dict[str, int]
) -> Callable[[Machine, dict[str, Any]], int]:
    """Translate a block of bundles, with branches only into its start and at its end, to one Python function."""
    lines: list[str] = []
    after = str(end)
    for address in range(start, end):
        reads: list[str] = []
        writes: list[str] = []
        for operation in bundles[address].operations:
            if operation.opcode.startswith("sbr"):
                if address + 1 + branch_slots != end:
                    raise ScheduleError(f"a branch ends in the slots after the one at bundle {address:#x}")
                reads.append(f"taken = {_guard(operation) or 'True'}")
                after = f"{operation.target} if taken else {end}"
                continue
            _translate(operation, len(reads), reads, writes, symbols)
        lines += reads + writes
    source = "def block(m, r):\n" + "".join(f"    {line}\n" for line in lines) + f"    return {after}\n"
    scope: dict[str, Any] = {"UNKNOWN": UNKNOWN, "wrap": wrap, "choose": choose}
    exec(source, scope)
    return scope["block"]


_BINARY = {
    "sadd.s32": "wrap({} + {})",
    "ssub.s32": "wrap({} - {})",
    "smul.u32": "wrap({} * {})",
    "smul.s32": "wrap({} * {})",
    "smulhi.u32": "wrap((({} & 0xFFFFFFFF) * ({} & 0xFFFFFFFF)) >> 32)",
    "sand.u32": "{} & {}",
    "sor.u32": "{} | {}",
    "sxor.u32": "{} ^ {}",
    "sshll.u32": "wrap({} << {})",
    "sshra.s32": "{} >> {}",
    "sshrl.u32": "wrap(({} & 0xFFFFFFFF) >> {})",
    "por": "{} | {}",
    "pand": "{} & {}",
    "pxor": "{} ^ {}",
    "pnand": "1 ^ ({} & {})",
    "pnor": "1 ^ ({} | {})",
}
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_MOVES = ("smov", "pmov", "int_to_ptr", "sphi", "pphi")


def _translate(operation: Operation, number: int, reads: list[str], writes: list[str], symbols: dict[str, int]) -> None:
    """Append the Python lines of one operation: a bundle reads everything before it writes anything."""
    opcode, guard = operation.opcode, _guard(operation)
    result = _REGISTER.match(operation.result)
    inputs = [_operand(text, symbols) for text in operation.inputs.values()]
    if opcode.startswith(("int_to_ptr", "sphi", "pphi")):
        # Written after the bundle's own values; the source is mostly the same register.
        source = next((found for found in map(_REGISTER.match, operation.inputs.values()) if found), None)
        if result and source and result[1] != source[1] and opcode.startswith("int_to_ptr"):
            writes.append(f"r[{result[1]!r}] = r.get({source[1]!r}, UNKNOWN)")
        return
    if opcode.startswith("dma.") and not opcode.startswith("dma.done"):
        # A general copy names no memories; XLA's own operations use it between HBM and vector memory.
        kind = opcode.removeprefix("dma.").replace("general", "hbm_to_vmem")
        ends = [name for name in operation.inputs if name.endswith(("mem", "hbm", "src", "dst"))]
        if "_to_" not in kind or len(ends) < 2:
            raise ScheduleError(f"cannot follow the copy {opcode}")
        source, target = (_operand(operation.inputs[name], symbols) for name in ends[:2])
        granules = _operand(operation.inputs["size_in_granules"], symbols)
        reads.append(f"t{number} = ({source}, {target}, {granules}) if {guard or True} else None")
        writes.append(f"if t{number}: m.copy({kind!r}, *t{number})")
        return
    if opcode == "sst":
        reads.append(f"t{number} = ({guard or True}, {inputs[0]}, {inputs[1]})")
        writes.append(f"m.write(*t{number})")
        return
    if opcode.startswith("scall"):
        raise ScheduleError(f"cannot follow the call {opcode}")
    if result is None:
        return
    value = _value(opcode, operation, inputs)
    if guard:
        value = f"choose({guard}, {value}, r.get({result[1]!r}, UNKNOWN))"
    reads.append(f"t{number} = {value}")
    writes.append(f"r[{result[1]!r}] = t{number}")


def _value(opcode: str, operation: Operation, inputs: list[str]) -> str:
    if opcode in _MOVES:
        return inputs[0]
    if opcode == "sld":
        return f"m.read({inputs[0]})"
    if opcode == "pneg":
        return f"1 ^ {inputs[0]}"
    if opcode.startswith("scalar_lea"):
        return f"wrap({inputs[0]} + {inputs[1]})"
    if opcode == "scalar_select":
        return f"choose({inputs[0]}, {inputs[1]}, {inputs[2]})"
    if opcode == "core.id":
        return "m.core"
    if opcode == "operand.value":
        return f"m.operand_value({int(operation.inputs['0'])})"
    if opcode == "operand.address":
        return str((int(operation.inputs["0"]) + 1) * _OPERAND_STRIDE)
    if opcode.startswith("scmp."):
        _, compared, kind, *_ = opcode.split(".")
        left, right = (f"({text} & 0xFFFFFFFF)" if kind == "u32" else text for text in inputs)
        return f"{left} {_COMPARED[compared]} {right}" if kind in ("s32", "u32") else "UNKNOWN"
    if opcode in ("smin.u32", "smax.u32"):
        compared = "<" if opcode == "smin.u32" else ">"
        left, right = inputs
        return f"choose(({left} & 0xFFFFFFFF) {compared} ({right} & 0xFFFFFFFF), {left}, {right})"
    if opcode in _BINARY and len(inputs) == 2:
        return _BINARY[opcode].format(*inputs)
    return "UNKNOWN"


def _guard(operation: Operation) -> str:
    if not operation.guard:
        return ""
    register = _operand(operation.guard, {})
    return f"1 ^ {register}" if operation.guard_negated else register


def _operand(text: str, symbols: dict[str, int]) -> str:
    """Return the Python expression of an operand: a register, a number, or an address that is a sum of these."""
    text = text.strip()
    if text.startswith("["):
        inner = text.strip("[]").removeprefix("smem:").strip("[]")
        return "(" + " + ".join(_operand(part, symbols) for part in inner.split("+")) + ")"
    register = _REGISTER.match(text)
    if register:
        return f"r.get({register[1]!r}, UNKNOWN)"
    if _SYMBOL.fullmatch(text):
        # Far apart, with room for the shift that turns an address into a pointer.
        return str(symbols.setdefault(text, (len(symbols) + 1) << 16))
    try:
        number = int(text.removeprefix("$"), 0)
    except ValueError:
        return "UNKNOWN"
    return str(number - (1 << 32) if number >= 1 << 31 else number)
