"""Search every kernel's block sizes by the schedules that the compiler makes for them: no TPU is needed.

    python -m pallas_kernels.autotune --tpu v5e [--kernel NAME ...] [--log FILE]

The best sizes go to the kernels' tuned.json. Measurements are also appended to a log, by default autotune-CHIP.jsonl in
the current folder. A stopped search continues from there, unless the kernels or their compiler have changed.
"""

import argparse
import hashlib
import importlib.metadata
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from pallas_kernels.case import Blocks, Case
from pallas_kernels.chips import CHIPS
from pallas_kernels.measure import format_blocks, kernel_names, rank_seconds, select_cases
from pallas_kernels.scalar_unit import ScheduleError
from pallas_kernels.schedule import Compiler
from pallas_kernels.tuning import format_shape, write_blocks

_NOT_OF_KERNELS = ("autotune.py", "bench.py", "tuning.py")


class Log:
    """The measurements of this run, and those of earlier runs that are still valid."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float | None] = {}
        if path.exists():
            # A run that was stopped while writing leaves half a line.
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                    self._seconds[entry["key"]] = entry["seconds"]
                except (json.JSONDecodeError, KeyError):
                    continue

    def find(self, key: str) -> tuple[bool, float | None]:
        """Return whether a candidate was measured, and its time: None if it did not compile."""
        return key in self._seconds, self._seconds.get(key)

    def add(self, key: str, seconds: float | None) -> None:
        """Store a measurement here and in the file."""
        self._seconds[key] = seconds
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "seconds": seconds}) + "\n")


def tune(cases: Sequence[Case], compiler: Compiler, log: Log) -> dict[str, Blocks]:
    """Measure all block sizes, write the best ones of each shape, and return them by shape.

    If several cases share a shape, its best blocks have the smallest product of times, each relative to its case's
    best. Raise ScheduleError if no block sizes compile for all cases of a shape.
    """
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.kernel, format_shape(case.shape)), []).append(case)
    best: dict[str, Blocks] = {}
    for number, ((kernel, shape), members) in enumerate(groups.items(), 1):
        print(f"[{number}/{len(groups)}] {kernel} {shape}", file=sys.stderr)
        scores = []
        for blocks in members[0].blocks:
            times = [_measure(case, blocks, compiler, log) for case in members]
            score = sum(math.log(time) if time else math.inf for time in times)
            scores.append(score)
            shown = " ".join(f"{time * 1e6:.1f}" if time else "-" for time in times)
            print(f"    {format_blocks(blocks)}: {shown} us", file=sys.stderr)
        if min(scores, default=math.inf) == math.inf:
            raise ScheduleError(f"{kernel} compiles for {compiler.chip.name} with none of its blocks at {shape}")
        best[shape] = members[0].blocks[scores.index(min(scores))]
        write_blocks(kernel, compiler.chip.name, members[0].shape, best[shape])
        print(f"  best: {format_blocks(best[shape])}", file=sys.stderr)
    return best


def _measure(case: Case, blocks: Blocks, compiler: Compiler, log: Log) -> float | None:
    key = " ".join((compiler.chip.name, case.kernel, case.name, format_blocks(blocks), _version(case.kernel)))
    known, seconds = log.find(key)
    if not known:
        try:
            schedule = compiler.schedule(case.function, case.arguments, donated=case.donated, **blocks)
            seconds = rank_seconds(schedule, compiler.chip)
        except ScheduleError as error:
            print(f"    {format_blocks(blocks)}: {error}", file=sys.stderr)
        log.add(key, seconds)
    return seconds


def _version(kernel: str) -> str:
    """Return the version of a measurement: the compiler's, and a digest of the kernel's and the shared source."""
    root = Path(__file__).parent
    shared = (path for path in root.glob("*.py") if path.name not in _NOT_OF_KERNELS)
    digest = hashlib.sha256()
    for path in sorted([*shared, *(root / kernel).glob("*.py")]):
        digest.update(path.read_bytes())
    versions = (importlib.metadata.version(name) for name in ("jax", "libtpu"))
    return "-".join((*versions, digest.hexdigest()[:12]))


def run(arguments: Sequence[str]) -> int:
    """Run the command line: 0 if all is tuned, 1 if a kernel does not compile, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.autotune", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tpu", default="v5e", help=f"the chip to tune for: {', '.join(CHIPS)}")
    parser.add_argument("--kernel", action="append", default=[], help=f"one of {', '.join(kernel_names())}; repeatable")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--log", help="where measurements are kept; autotune-CHIP.jsonl by default")
    options = parser.parse_args(arguments)
    try:
        cases = select_cases(options.kernel, options.case)
        compiler = Compiler(options.tpu)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with compiler:
        try:
            tune(cases, compiler, Log(Path(options.log or f"autotune-{options.tpu}.jsonl")))
        except ScheduleError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
