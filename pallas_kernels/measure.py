"""Measures cases by their compiled schedules, beside their floors and their rivals."""

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass

import pallas_kernels
from pallas_kernels.case import Blocks, Case
from pallas_kernels.chips import Chip
from pallas_kernels.scalar_unit import ScheduleError
from pallas_kernels.schedule import Compiler, Schedule

# Used if a chip's clock is not published, only to rank cycles against bytes.
_NOMINAL_CLOCK_HZ = 1.5e9


@dataclass(frozen=True)
class Floor:
    """The least possible time of a case: its operations at the peak, and its bytes at the bandwidth."""

    mxu_seconds: float
    hbm_seconds: float

    @property
    def seconds(self) -> float:
        """The longer of the two."""
        return max(self.mxu_seconds, self.hbm_seconds)

    @property
    def bound(self) -> str:
        """The name of the longer one."""
        return "MXU" if self.mxu_seconds > self.hbm_seconds else "HBM"


@dataclass(frozen=True)
class Beaten:
    """A rival's best result: its name, its block sizes and their schedule."""

    name: str
    blocks: Blocks
    schedule: Schedule


def kernel_names() -> list[str]:
    """Return the kernels that have cases: the folders of this package with a cases.py."""
    found = []
    for module in pkgutil.iter_modules(pallas_kernels.__path__):
        if module.ispkg and importlib.util.find_spec(f"pallas_kernels.{module.name}.cases"):
            found.append(module.name)
    return sorted(found)


def kernel_cases(kernel: str) -> tuple[Case, ...]:
    """Return the cases of one kernel."""
    known = kernel_names()
    if kernel not in known:
        raise ValueError(f"unknown kernel {kernel!r}: choose one of {', '.join(known)}")
    return importlib.import_module(f"pallas_kernels.{kernel}.cases").CASES


def toy_cases(kernel: str) -> tuple[Case, ...]:
    """Return the small cases of one kernel, for interpretation."""
    return importlib.import_module(f"pallas_kernels.{kernel}.cases").TOY_CASES


def case_floor(case: Case, chip: Chip) -> Floor:
    """Return the floor of a case on one device of a chip; without an int8 unit, its operations run in bf16."""
    peak = (chip.int8_peak if case.int8 else None) or chip.bf16_peak
    return Floor(case.mxu_flops / (peak / chip.devices), case.floor_bytes / chip.device_hbm_bytes_per_second)


def best_rival(case: Case, compiler: Compiler) -> tuple[Beaten | None, list[str]]:
    """Return the rival with the fewest cycles at its best block sizes, and why others could not be measured."""
    best: Beaten | None = None
    failed: list[str] = []
    for rival in case.rivals:
        for blocks in rival.blocks:
            arguments = case.arguments if rival.arguments is None else rival.arguments
            try:
                schedule = compiler.schedule(rival.function, arguments, donated=(), **blocks)
            except ScheduleError as error:
                failed.append(f"{rival.name} {format_blocks(blocks)}: {error}")
                continue
            if best is None or schedule.cycles < best.schedule.cycles:
                best = Beaten(rival.name, blocks, schedule)
    return best, failed


def rank_seconds(schedule: Schedule, chip: Chip) -> float:
    """Return the time that ranks block sizes.

    It is the longer of the times for cycles and for bytes, plus one step's share of the other, which the first or last
    step cannot hide, plus 2% of the other, because it leaves room for costs that the estimate omits.
    """
    compute = schedule.cycles / (chip.clock_hz or _NOMINAL_CLOCK_HZ)
    hidden = min(compute, schedule.memory_seconds)
    steps = max((operation.grid_steps for operation in schedule.operations), default=1)
    return max(compute, schedule.memory_seconds) + hidden / steps + 0.02 * hidden


def format_blocks(blocks: Blocks) -> str:
    """Format block sizes on one line."""
    return " ".join(f"{name}={size}" for name, size in blocks.items())


def select_cases(kernels: Sequence[str], part_of_name: str = "") -> list[Case]:
    """Return the cases of the named kernels, or of all, whose name contains ``part_of_name``."""
    names = list(kernels) or kernel_names()
    return [case for kernel in names for case in kernel_cases(kernel) if part_of_name in case.name]
