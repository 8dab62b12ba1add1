"""Parses the instruction bundles that the TPU compiler scheduled, as a program for its scalar unit."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_HEAD = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:LH|LB|LE|PB|PF|CT)?\s*:\s*(?:> |>)*\s*\{(.*)", re.DOTALL)
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:LH|LB|LE|PB|PF|CT)?\s*:", re.MULTILINE)
_COMMENT = re.compile(r"/\*(?!\w+=\*/).*?\*/", re.DOTALL)
_OPERATION = re.compile(r"^(?:(%[\w.]+) = )?([a-z][\w.]*)\s*(.*)$", re.DOTALL)
_GUARD = re.compile(r"\((!?)(%p\w+)(?:, *[^()]*)?\)")
_TARGET = re.compile(r"target bundleno = (\d+)")
_LABELLED = re.compile(r"/\*(\w+)=\*/\s*([^,\s]+)")
# "core id" or "megacore core id :: core id", depending on the compiler's version.
_CORE_ID = re.compile(r"sld \[smem:\[#\w+\]\] /\* (?:[\w ]+ :: )*core id \*/")
_OPERAND = re.compile(r"inlined_call_operand\.(<no memory space>)?[^\[]*\[shape: .*?, index: (\d+), kind: \w+")


@dataclass(frozen=True)
class Operation:
    """One operation of a bundle, with its operands as written; it runs only if the predicate ``guard`` is true.

    ``inputs`` have the compiler's labels if there are any (``hbm``, ``on_true``), else numbers from 0.
    """

    opcode: str
    result: str
    inputs: Mapping[str, str]
    guard: str
    guard_negated: bool
    target: int | None


@dataclass(frozen=True)
class Bundle:
    """The operations of one cycle; empty while the compiler waits for a result or fills the slots after a branch."""

    operations: tuple[Operation, ...]
    empty: bool


def read_bundles(text: str) -> list[Bundle]:
    """Return the bundles of one operation of a program, by address, from ``packed-bundles-post-ra``."""
    starts = [found.start() for found in _BUNDLE.finditer(text)]
    bundles: list[Bundle] = []
    for start, end in zip(starts, [*starts[1:], len(text)]):
        found = _HEAD.match(text[start:end])
        if found is None or int(found[1], 0) != len(bundles):
            raise ValueError(f"cannot read the bundle after {len(bundles)}: {text[start:end][:100]!r}")
        # Vector operations do not affect control flow: keep only whether there are any.
        body = found[2]
        if "shape:" in body:
            body = _OPERAND.sub(_operand_of_kernel, body)
        body = _COMMENT.sub("", _CORE_ID.sub("core.id", body))
        body = body[: body.rindex("}")].strip()
        parts = [part.strip() for part in body.split(";;")] if body else []
        operations = (_read_operation(part) for part in parts)
        bundles.append(Bundle(tuple(found for found in operations if found), empty=not parts))
    return bundles


def _operand_of_kernel(found: re.Match[str]) -> str:
    """Write an operand of the kernel as an operation: its value if it is in a register, else its address."""
    return f"operand.{'value' if found[1] else 'address'} {found[2]}"


def _read_operation(text: str) -> Operation | None:
    found = _OPERATION.match(text)
    if found is None:
        raise ValueError(f"cannot read the operation {text[:100]!r}")
    result, opcode, rest = found[1] or "", found[2], found[3]
    scalar = result.startswith(("%s", "%p"))
    if not scalar and not opcode.startswith(("sst", "sbr", "dma.", "scall", "shalt")):
        return None
    guard = _GUARD.search(rest)
    target = _TARGET.search(rest)
    rest = _GUARD.sub("", rest, count=1)
    inputs = dict(_LABELLED.findall(rest))
    if not inputs:
        operands = _split_operands(rest.replace("[thread:$0]", ""))
        inputs = {str(index): operand for index, operand in enumerate(operands)}
    return Operation(
        opcode,
        result,
        inputs,
        guard[2] if guard else "",
        bool(guard and guard[1]),
        int(target[1]) if target else None,
    )


def _split_operands(text: str) -> list[str]:
    """Split at commas and at the space after an address: ``[smem:[#a + %s1]] %s2``."""
    return [part.strip() for part in re.split(r",|(?<=\])\s(?=%|\d)", text) if part.strip()]
