"""``python -m tests.mutants``: applies deliberate faults one at a time, and checks that the ordinary tests fail.

Each fault runs in a copy of the checkout, against the test that must catch it; that this test passes without the fault
is checked first. The table is written to ``tests/MUTANTS.md``; exit code 1 where a fault survives.
"""

import argparse
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests import mutants
from tests.mutants.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "MUTANTS.md"
PASSED, FAILED = 0, 1  # pytest's exit codes
_MOST_SECONDS = 900


class Outcome(NamedTuple):
    """What became of a fault: whether tests failed by it, which one first, and how long that took."""

    fault: Fault
    caught: bool
    by: str
    seconds: float


def all_faults() -> dict[str, tuple[Fault, ...]]:
    """Return the faults of every area, by the name of its module."""
    areas = sorted(
        module.name for module in pkgutil.iter_modules(mutants.__path__) if module.name not in ("__main__", "fault")
    )
    return {area: importlib.import_module(f"tests.mutants.{area}").FAULTS for area in areas}


def misplaced(faults: Iterable[Fault]) -> list[str]:
    """Return a line for each fault whose place is not there exactly once, or whose test is not there."""
    lines = []
    for fault in faults:
        count = (ROOT / fault.file).read_text(encoding="utf-8").count(fault.old)
        if count != 1:
            lines.append(f"{fault.name}: {fault.file} has its place {count} times")
        if fault.old == fault.new:
            lines.append(f"{fault.name}: changes nothing")
        if not (ROOT / fault.caught_by.partition("::")[0]).is_file():
            lines.append(f"{fault.name}: there is no {fault.caught_by}")
    return lines


class Copies:
    """Copies of the checkout, one for each run at the same time, over one cache of compiled programs."""

    def __init__(self, folder: Path, count: int) -> None:
        self.cache = folder / "programs"
        self.free = [self._make(folder / f"copy_{number}") for number in range(count)]

    def _make(self, copy: Path) -> Path:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        # Data that some tests read stand beside a checkout.
        for beside in (ROOT / "shared", ROOT.parent / "shared"):
            if beside.is_dir() and not (copy / "shared").exists():
                (copy / "shared").symlink_to(beside)
        return copy

    def run(self, test: str, fault: Fault | None = None) -> Outcome | bool:
        """Run a test, with a fault where one is given: return its outcome, or whether the test passes."""
        copy = self.free.pop()
        began = time.perf_counter()
        try:
            if fault is not None:
                place = copy / fault.file
                intact = place.read_text(encoding="utf-8")
                place.write_text(intact.replace(fault.old, fault.new), encoding="utf-8")
            ended, said = self._pytest(copy, test)
            if fault is None:
                return ended == PASSED
            place.write_text(intact, encoding="utf-8")
        finally:
            self.free.append(copy)
        failed = re.search(r"^FAILED (.+?)(?: - .*)?$", said, re.MULTILINE)
        return Outcome(
            fault, ended == FAILED and bool(failed), failed[1] if failed else "", time.perf_counter() - began
        )

    def _pytest(self, copy: Path, test: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", test, "-n0", "-x", "-q", "-rf", "-p", "no:cacheprovider"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
        }
        try:
            child = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_MOST_SECONDS
            )
        except subprocess.TimeoutExpired:
            return FAILED, f"FAILED {test} - no end after {_MOST_SECONDS} s"
        return child.returncode, child.stdout


def write_table(outcomes: Mapping[str, list[Outcome]]) -> str:
    """Return the table as Markdown."""
    caught = sum(outcome.caught for found in outcomes.values() for outcome in found)
    lines = [
        "# Deliberate faults, and the ordinary tests that catch them",
        "",
        f"Written by `python -m tests.mutants`: {caught} of {sum(map(len, outcomes.values()))} faults are caught.",
        "Seconds are of one test run with the fault, on two cores, the start of Python included.",
    ]
    for area, found in outcomes.items():
        lines += ["", f"## {area}", "", "| fault | in | caught by | seconds |", "|---|---|---|---|"]
        for outcome in found:
            by = f"`{outcome.by.removeprefix('tests/')}`" if outcome.caught else "**survives**"
            name = outcome.fault.name.replace("|", "\\|")
            lines.append(
                f"| {name} | `{outcome.fault.file}` | {by.replace('|', chr(92) + '|')} | {outcome.seconds:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the faults that are asked for; the table is written when all of them ran."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--area", action="append", help="faults of this area alone; may be repeated")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    chosen = {
        area: [fault for fault in faults if options.only in fault.name]
        for area, faults in all_faults().items()
        if not options.area or area in options.area
    }
    faults = [fault for found in chosen.values() for fault in found]
    wrong = misplaced(faults)
    if wrong or not faults:
        print("\n".join(wrong) or "error: no fault has this name", file=sys.stderr)
        return 2
    outcomes: dict[str, list[Outcome]] = {area: [] for area in chosen}
    with tempfile.TemporaryDirectory(prefix="jaxinfer-mutants-") as folder:
        copies = Copies(Path(folder), options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            tests = sorted({fault.caught_by for fault in faults})
            intact = list(pool.map(copies.run, tests))
            failing = [test for test, passes in zip(tests, intact) if not passes]
            if failing:
                print("error: fails without any fault: " + ", ".join(failing), file=sys.stderr)
                return 2
            runs = [
                (area, pool.submit(copies.run, fault.caught_by, fault)) for area in chosen for fault in chosen[area]
            ]
            for area, run in runs:
                outcome = run.result()
                assert isinstance(outcome, Outcome)
                outcomes[area].append(outcome)
                mark = "caught  " if outcome.caught else "SURVIVES"
                print(f"{mark} {outcome.seconds:4.0f} s  {area}: {outcome.fault.name}", flush=True)
    if not options.area and not options.only:
        TABLE.write_text(write_table(outcomes), encoding="utf-8")
    return int(any(not outcome.caught for found in outcomes.values() for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
