"""Compare every kernel with its reference on this machine's TPU, and its time with the floor.

    python -m pallas_kernels.validate [--kernel NAME ...] [--case TEXT] [--json FILE]

Without a TPU, small cases are interpreted, which does not measure speed.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.chips import CHIPS, Chip
from pallas_kernels.measure import case_floor, kernel_names, select_cases, toy_cases
from pallas_kernels.random_inputs import random_arguments
from pallas_kernels.timing import seconds_a_call
from pallas_kernels.tuning import present_chip

# Relative to the largest expected number.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
# The device memory that a case and its reference may need, as a multiple of the arguments.
_ARGUMENTS_HELD = 3


@dataclass(frozen=True)
class Outcome:
    """The result of one case: its error relative to the largest expected number, and its time beside the floor.

    ``failure`` says why it does not pass, ``skipped`` why it did not run. Times are None if the kernel is interpreted
    or has failed.
    """

    kernel: str
    case: str
    tolerance: float | None = None
    error: float | None = None
    seconds: float | None = None
    floor_seconds: float | None = None
    floor_bound: str | None = None
    failure: str | None = None
    skipped: str | None = None

    @property
    def passes(self) -> bool:
        """Tell whether the case passes."""
        return self.failure is None

    def line(self) -> str:
        """Return the outcome as one line of text."""
        name = f"{self.kernel} {self.case}"
        if self.skipped:
            return f"skipped {name}: {self.skipped}"
        if self.failure:
            return f"FAILED  {name}: {self.failure}"
        said = f"ok      {name}: error {self.error:.1e} of {self.tolerance:.0e}"
        if self.seconds is not None and self.floor_seconds is not None:
            said += (
                f", {self.seconds * 1e6:.1f} us, {self.seconds / self.floor_seconds:.2f} x the {self.floor_bound} floor"
            )
        return said


def check_case(case: Case, chip: Chip | None) -> Outcome:
    """Run one case on the chip, or interpreted if there is none; an exception counts as a failure."""
    outcome = functools.partial(Outcome, case.kernel, case.name)
    if case.reference is None:
        return outcome(skipped="it has no reference")
    if chip is not None:
        needed = _ARGUMENTS_HELD * sum(math.prod(array.shape) * array.dtype.itemsize for array in case.arguments)
        if needed > chip.device_hbm_bytes:
            return outcome(skipped=f"it takes about {needed / 2**30:.0f} GiB")
    function = functools.partial(case.function, **({} if chip else {"interpret": True}))
    floor = case_floor(case, chip) if chip else None
    limits = (floor.seconds, floor.bound) if floor else (None, None)
    try:
        arguments = random_arguments(case)
        found = jax.tree.leaves(jax.jit(function)(*arguments))
        expected = jax.tree.leaves(jax.jit(case.reference)(*arguments))
        tolerance = max(TOLERANCE[jnp.dtype(array.dtype).name] for array in found)
        error = max(relative_error(*pair) for pair in zip(found, expected, strict=True))
        # Written so that NaN fails too.
        if not error <= tolerance:
            return outcome(tolerance, error, failure=f"error {error:.1e} exceeds {tolerance:.0e}")
        seconds = seconds_a_call(function, arguments, floor.seconds) if floor else None
    except Exception as problem:  # The compiler's and the device's errors have many classes.
        return outcome(failure=f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}")
    return outcome(tolerance, error, seconds, *limits)


def relative_error(found: jax.Array, expected: jax.Array) -> float:
    """Return the largest difference, relative to the largest expected number."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected)))


def validate_kernels(
    kernels: Sequence[str] = (), part_of_name: str = "", say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Check the cases of the named kernels, or of all; return a report with the key ``passes`` and all outcomes.

    Raise ValueError if a kernel is unknown or no case name matches.
    """
    name = present_chip()
    chip = CHIPS[name] if name else None
    cases = select_cases(kernels, part_of_name if chip else "")
    if chip is None:
        cases = [case for kernel in dict.fromkeys(case.kernel for case in cases) for case in toy_cases(kernel)]
        cases = [case for case in cases if part_of_name in case.name]
    if not cases:
        raise ValueError(f"no case has {part_of_name!r} in its name")
    say(f"{len(cases)} cases on {name}" if name else f"no TPU here: {len(cases)} small cases, interpreted")
    outcomes = []
    for case in cases:
        outcomes.append(check_case(case, chip))
        say(outcomes[-1].line())
    failed = sum(not outcome.passes for outcome in outcomes)
    skipped = sum(outcome.skipped is not None for outcome in outcomes)
    say(f"{len(outcomes) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return {
        "device": jax.devices()[0].device_kind,
        "chip": name,
        "jax": jax.__version__,
        "passes": failed == 0 and skipped < len(outcomes),
        "cases": [{**asdict(outcome), "passes": outcome.passes} for outcome in outcomes],
    }


def run(arguments: Sequence[str]) -> int:
    """Run the command line: 0 if all cases pass, 1 if one fails, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.validate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kernel", action="append", default=[], help=f"one of {', '.join(kernel_names())}; repeatable")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="where to write a report")
    options = parser.parse_args(arguments)
    try:
        report = validate_kernels(options.kernel, options.case)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if report["passes"] else 1


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
