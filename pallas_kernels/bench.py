"""Print the time of every kernel on a TPU, from the schedule that its compiler makes: no TPU is needed.

    python -m pallas_kernels.bench --tpu v5e [--kernel NAME ...] [--case TEXT] [--json]

`pallas_kernels/README.md` explains the table.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pallas_kernels.case import Case
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.measure import Beaten, Floor, best_rival, case_floor, format_blocks, kernel_names, select_cases
from pallas_kernels.scalar_unit import ScheduleError
from pallas_kernels.schedule import Compiler, Operation, Schedule
from pallas_kernels.tuning import tuned_blocks

_COLUMNS = (
    ("case", "{}"),
    ("blocks", "{}"),
    ("bundles/step", "{:,}"),
    ("steps ran/grid", "{}"),
    ("cycles", "{:,}"),
    ("us", "{:.1f}"),
    ("MXU", "{:.0%}"),
    ("VPU", "{:.0%}"),
    ("load", "{:.0%}"),
    ("store", "{:.0%}"),
    ("HBM MB", "{:.2f}"),
    ("/floor", "{:.2f}"),
    ("floor us", "{}"),
    ("cycles/floor", "{:.2f}"),
    ("cycles/JAX", "{:.2f}"),
    ("us/JAX", "{:.2f}"),
    ("JAX's best", "{}"),
)


@dataclass(frozen=True)
class Measured:
    """One case with its schedule, its floor and its best rival."""

    case: Case
    chip: Chip
    schedule: Schedule
    floor: Floor
    rival: Beaten | None

    @property
    def kernel(self) -> Operation:
        """The operation that takes longest; the others pad, slice and reshape for it."""
        return max(self.schedule.operations, key=lambda operation: operation.cycles)

    @property
    def floor_cycles(self) -> int | None:
        """The floor in cycles, or None if the chip's clock is not published."""
        return round(self.floor.seconds * self.chip.clock_hz) if self.chip.clock_hz else None

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON values."""
        kernel, rival = self.kernel, self.rival
        return {
            "kernel": self.case.kernel,
            "case": self.case.name,
            "cycles": self.schedule.cycles,
            "floor_cycles": self.floor_cycles,
            "jax_cycles": rival.schedule.cycles if rival else None,
            "hbm_bytes": self.schedule.hbm_bytes,
            "floor_bytes": self.case.floor_bytes,
            "mxu_flops": self.case.mxu_flops,
            "seconds": self.schedule.seconds,
            "compute_seconds": self.schedule.compute_seconds,
            "memory_seconds": self.schedule.memory_seconds,
            "floor_seconds": self.floor.seconds,
            "floor_bound": self.floor.bound,
            "blocks": tuned_blocks(self.case.kernel, self.case.shape, self.chip.name),
            "step_bundles": kernel.step_bundles,
            "grid_steps": kernel.grid_steps,
            "steps_executed": kernel.busiest.runs,
            "slots": dict(kernel.slots),
            "temporary_bytes": self.schedule.temporary_bytes,
            "jax_kernel": rival.name if rival else None,
            "jax_blocks": dict(rival.blocks) if rival else None,
            "jax_seconds": rival.schedule.seconds if rival else None,
            "jax_hbm_bytes": rival.schedule.hbm_bytes if rival else None,
        }

    def to_row(self) -> list[str]:
        """Return the cells of the table, a dash for unknown values."""
        schedule, kernel, rival = self.schedule, self.kernel, self.rival
        seconds, floor_cycles = schedule.seconds, self.floor_cycles
        faster = rival.schedule.seconds if rival else None
        values = (
            self.case.name,
            format_blocks(tuned_blocks(self.case.kernel, self.case.shape, self.chip.name)),
            kernel.step_bundles,
            f"{kernel.busiest.runs:,}/{kernel.grid_steps:,}",
            schedule.cycles,
            seconds * 1e6 if seconds else None,
            *(kernel.slots[unit] for unit in ("MXU", "VALU", "VLOAD", "VSTORE")),
            schedule.hbm_bytes / 1e6,
            schedule.hbm_bytes / self.case.floor_bytes,
            f"{self.floor.seconds * 1e6:.1f} {self.floor.bound}",
            schedule.cycles / floor_cycles if floor_cycles else None,
            schedule.cycles / rival.schedule.cycles if rival else None,
            seconds / faster if seconds and faster else None,
            f"{rival.name} {format_blocks(rival.blocks)}" if rival else None,
        )
        return ["-" if value is None else form.format(value) for value, (_, form) in zip(values, _COLUMNS)]


def measure_case(case: Case, compiler: Compiler, rivals: bool = True) -> tuple[Measured, list[str]]:
    """Compile a case at its tuned blocks, and its rivals at theirs; also return why any of them failed."""
    schedule = compiler.schedule(case.function, case.arguments, donated=case.donated)
    rival, failed = best_rival(case, compiler) if rivals else (None, [])
    return Measured(case, compiler.chip, schedule, case_floor(case, compiler.chip), rival), failed


def format_table(measured: Sequence[Measured]) -> str:
    """Return one table per kernel, with aligned columns."""
    parts = []
    for kernel in dict.fromkeys(found.case.kernel for found in measured):
        rows = [[name for name, _ in _COLUMNS]]
        rows += [found.to_row() for found in measured if found.case.kernel == kernel]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        parts.append("\n".join([f"{kernel}, {measured[0].chip.name}", *lines]))
    return "\n\n".join(parts)


def run(arguments: Sequence[str]) -> int:
    """Run the command line: 0 if every case compiled, 1 if one did not, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tpu", default="v5e", help=f"the chip to compile for: {', '.join(CHIPS)}")
    parser.add_argument("--kernel", action="append", default=[], help=f"one of {', '.join(kernel_names())}; repeatable")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--no-rivals", action="store_true", help="do not compile JAX's own kernels")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    measured: list[Measured] = []
    errors = 0
    try:
        cases = select_cases(options.kernel, options.case)
        compiler = Compiler(options.tpu)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with compiler:
        for number, case in enumerate(cases, 1):
            print(f"[{number}/{len(cases)}] {case.kernel} {case.name}", file=sys.stderr)
            try:
                found, failed = measure_case(case, compiler, not options.no_rivals)
            except ScheduleError as error:
                print(f"error: {case.kernel} {case.name}: {error}", file=sys.stderr)
                errors += 1
                continue
            measured.append(found)
            if case.rivals and found.rival is None and not options.no_rivals:
                print(f"  no rival could be measured: {failed[0]}", file=sys.stderr)
    if options.json:
        print(json.dumps({"chip": options.tpu, "cases": [found.to_json() for found in measured]}))
    elif measured:
        print(format_table(measured))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
