"""The largest buffers of a compiled program, for what a test says when a program takes more memory than it may."""

import re

from jaxinfer.planning.compile import CompiledProgram
from jaxinfer.planning.hlo.walk import walk

# These hold what others made, or what the caller gave.
_NO_BUFFERS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")


def largest_buffers(hlo: str, count: int = 5) -> str:
    """Return a line for each of the instructions with the largest results: bytes, what it is and where it comes from.

    Each stands there once, however often it runs; those inside a fusion are never stored.
    """
    stored = {found.name: found for found in walk(hlo) if not found.fused and found.opcode not in _NO_BUFFERS}
    largest = sorted(stored.values(), key=lambda found: -found.bytes)[:count]
    return "\n".join(f"{found.bytes:>14,} bytes  {_written(hlo, found.name)}" for found in largest)


def copies_of_the_cache(program: CompiledProgram) -> list[str]:
    """Return what stores as much as all keys, other than the writes of new rows in place."""
    copying = ("copy", "copy-start", "transpose", "convert", "all-gather", "all-gather-start")
    return [
        instruction.name
        for instruction in program.instructions()
        if instruction.opcode in copying and not instruction.fused and instruction.bytes >= program.cache_bytes // 2
    ]


def _written(hlo: str, name: str) -> str:
    """Return an instruction's name, result and opcode as the program writes them, and the operation that it is of."""
    line = re.search(rf"^\s+(?:ROOT )?(%{re.escape(name)} = .*)$", hlo, re.MULTILINE)
    text = line[1] if line else name
    source = re.search(r'op_name="([^"]*)"', text)
    return f"{text.partition('(%')[0]:.100}" + (f"  of {source[1]}" if source else "")
