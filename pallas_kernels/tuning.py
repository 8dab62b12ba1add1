"""Looks up the best block sizes for a shape on a chip, in the tuned.json of a kernel's folder.

The file maps a chip to shapes, written ``H=128,T=2048,dtype=bfloat16``, and those to block sizes::

    {"v5e": {"H=128,T=2048,dtype=bfloat16": {"block_q": 512, "block_k": 1024}}}

`python -m pallas_kernels.autotune` measures and writes them.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax

from pallas_kernels.chips import CHIPS

Shape = Mapping[str, int | str]
Table = dict[str, dict[str, dict[str, int]]]

_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
_DEFAULT_CHIP = "v5e"


def tuned_blocks(kernel: str, shape: Shape, chip: str | None = None) -> dict[str, int]:
    """Return the block sizes of the nearest tuned shape, on this chip or else on v5e.

    The nearest shape agrees in most non-numbers (a dtype, a mask); then it has the smallest sum of logarithms of size
    ratios. The chip is `current_chip` by default. Raise ValueError if the kernel's tuned.json is missing or empty.
    """
    table = read_table(kernel)
    chip = chip or current_chip()
    entries = table.get(chip) or table.get(_DEFAULT_CHIP)
    if not entries:
        raise ValueError(f"{kernel} has no tuned blocks for {chip}: run python -m pallas_kernels.autotune --tpu {chip}")
    nearest = min(entries, key=lambda text: (*_distance(shape, parse_shape(text)), text))
    return dict(entries[nearest])


def current_chip() -> str:
    """Return the chip that a program is traced for: that of the mesh in use, else of the default device, else v5e."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return _KINDS.get(described.device_kind, _DEFAULT_CHIP)
    return present_chip() or _DEFAULT_CHIP


def present_chip() -> str | None:
    """Return the chip that this process uses, None if it is no TPU or an unknown one."""
    return _KINDS.get(jax.devices()[0].device_kind) if jax.default_backend() == "tpu" else None


def format_shape(shape: Shape) -> str:
    """Format a shape as a key of tuned.json."""
    return ",".join(f"{name}={shape[name]}" for name in sorted(shape))


def parse_shape(text: str) -> dict[str, int | str]:
    """Parse a key of tuned.json."""
    pairs = (part.split("=", 1) for part in text.split(","))
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def table_path(kernel: str) -> Path:
    """Return the path of the kernel's tuned blocks."""
    return Path(__file__).parent / kernel / "tuned.json"


def read_table(kernel: str) -> Table:
    """Return all tuned blocks of a kernel; empty if it has not been tuned."""
    path = table_path(kernel)
    return json.loads(path.read_text()) if path.exists() else {}


def write_blocks(kernel: str, chip: str, shape: Shape, blocks: Mapping[str, int]) -> None:
    """Write a shape's best blocks to the kernel's table, and replace the file as a whole."""
    if chip not in CHIPS:
        raise ValueError(f"unknown TPU {chip!r}: choose one of {', '.join(CHIPS)}")
    table = {name: dict(entries) for name, entries in read_table(kernel).items()}
    table.setdefault(chip, {})[format_shape(shape)] = dict(blocks)
    ordered = {name: dict(sorted(table[name].items())) for name in CHIPS if name in table}
    path = table_path(kernel)
    partial = path.with_suffix(".json.partial")
    partial.write_text(_format_table(ordered))
    partial.replace(path)


def _format_table(table: Table) -> str:
    """Format a table with one shape per line."""
    chips = []
    for chip, entries in table.items():
        lines = [f"    {json.dumps(shape)}: {json.dumps(blocks)}" for shape, blocks in entries.items()]
        chips.append(f"  {json.dumps(chip)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(chips) + "\n}\n"


def _distance(shape: Shape, other: Shape) -> tuple[int, float]:
    different, far = 0, 0.0
    for name in {*shape, *other}:
        ours, theirs = shape.get(name), other.get(name)
        if isinstance(ours, int) and isinstance(theirs, int):
            far += abs(math.log2((ours + 1) / (theirs + 1)))
        else:
            different += ours != theirs
    return different, far
