"""``python -m tests.mutants``: applies deliberate faults one at a time, and checks that a test fails that CI runs.

Each fault runs in a copy of the checkout, against the test that must catch it; that these tests pass without faults is
checked first. Each area's section of ``tests/MUTANTS.md`` is written once all of its faults ran, so that an interrupted
run goes on with ``--missing``: the faults that the table does not have. Exit code 1 if a fault survives.
"""

import argparse
import importlib
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import mutants
from tests.mutants.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "MUTANTS.md"
FAILED = 1  # pytest's exit code
_OF_CI = ("-m", "not exhaustive")
# Of processor time, and of wall time: on a busy machine a test that waits has not gone wrong.
_MOST_SECONDS, _LONGEST_WAIT = 180, 1800
# Tests that get several devices in a process of their own.
_ON_DEVICES = "tests/parallel/on_devices/"
# What every test imports, and no fault changes: imported once, before a process is forked for each fault.
_PRELOADED = ("jax", "flax.linen", "safetensors.numpy")


class Outcome(NamedTuple):
    """What became of a fault: whether tests failed by it, which one first, and how long that took."""

    fault: Fault
    caught: bool
    by: str
    seconds: float


class Run(NamedTuple):
    """A fault whose tests are running: its copy of the checkout, and the file that its process writes to."""

    area: str
    fault: Fault
    copy: Path
    said: Path
    began: float


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
        file, _, test = fault.caught_by.partition("::")
        function = f"def {test.partition('[')[0]}(" if test else ""
        if not (ROOT / file).is_file() or function not in (ROOT / file).read_text(encoding="utf-8"):
            lines.append(f"{fault.name}: there is no {fault.caught_by}")
    return lines


def copy_checkout(copy: Path) -> Path:
    """Copy what git knows of the checkout, and link the data that some tests read beside it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    for beside in (ROOT / "shared", ROOT.parent / "shared"):
        if beside.is_dir() and not (copy / "shared").exists():
            (copy / "shared").symlink_to(beside)
    return copy


def failing_without_faults(tests: Sequence[str], copy: Path, jobs: int) -> list[str]:
    """Run tests as they are; return the names of those that fail, or pytest's last line."""
    on_devices = [test for test in tests if test.startswith(_ON_DEVICES)]
    others = [test for test in tests if test not in on_devices]
    return _failing(others, copy, jobs) + _failing(on_devices, copy, 0)


def _failing(tests: Sequence[str], copy: Path, jobs: int) -> list[str]:
    if not tests:
        return []
    command = [sys.executable, "-m", "pytest", *tests, f"-n{jobs}", "-q", *_OF_CI, "-rfE", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True
    )
    failing = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failing or ([] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()[-1:])


def start(area: str, fault: Fault, copy: Path, said: Path) -> tuple[int, Run]:
    """Apply a fault to a copy, and fork a process that runs its test there; return the process."""
    place = copy / fault.file
    place.write_text(place.read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")
    run = Run(area, fault, copy, said, time.perf_counter())
    process = os.fork()
    if process == 0:
        code = 70
        try:
            code = _run_test(run)
        except BaseException:
            traceback.print_exc()
        finally:  # whatever happens, this process cleans nothing up that belongs to its parent
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return process, run


def _run_test(run: Run) -> int:
    """Run a fault's test in this process; return pytest's exit code."""
    signal.setitimer(signal.ITIMER_PROF, _MOST_SECONDS)
    signal.alarm(_LONGEST_WAIT)
    with run.said.open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.chdir(run.copy)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(run.copy), "PYTHONDONTWRITEBYTECODE": "1"}
    # The copy's own modules, not those that this program is made of.
    sys.path[:] = [str(run.copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    import pytest

    return int(pytest.main([run.fault.caught_by, "-n0", "-x", "-q", *_OF_CI, "-rf", "-p", "no:cacheprovider"]))


def end(run: Run, status: int) -> Outcome:
    """Take a fault back, and say what became of it; a process that crashed was noticed too."""
    place, intact = run.copy / run.fault.file, ROOT / run.fault.file
    place.write_text(intact.read_text(encoding="utf-8"), encoding="utf-8")
    code = os.waitstatus_to_exitcode(status)
    failed = re.search(r"^FAILED (.+?)(?: - .*)?$", run.said.read_text(errors="replace"), re.MULTILINE)
    by = failed[1] if failed else f"{run.fault.caught_by} (crash or no end)"
    return Outcome(run.fault, code < 0 or (code == FAILED and failed is not None), by, time.perf_counter() - run.began)


def row(outcome: Outcome) -> str:
    """Return a fault's line of its area's table."""
    by = f"`{outcome.by.removeprefix('tests/')}`" if outcome.caught else "**survives**"
    cells = outcome.fault.name, f"`{outcome.fault.file}`", by, f"{outcome.seconds:.0f}"
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def recorded() -> dict[str, dict[str, str]]:
    """Return the table's lines by area and by the fault's cell; a survivor is to run again."""
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    found = re.findall(r"^## (\w+)\n\n(.*?)\n*(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return {
        area: {
            line.split(" | ")[0].removeprefix("| "): line
            for line in table.splitlines()[2:]
            if "**survives**" not in line
        }
        for area, table in found
    }


def write_sections(new: Mapping[str, Sequence[Outcome]]) -> None:
    """Write lines for these outcomes; other lines stay, unless their fault is gone."""
    known = recorded()
    for area, outcomes in new.items():
        known.setdefault(area, {}).update((_cell(outcome.fault.name), row(outcome)) for outcome in outcomes)
    lines = {
        area: [known[area][_cell(fault.name)] for fault in faults if _cell(fault.name) in known.get(area, {})]
        for area, faults in all_faults().items()
    }
    head_of_table = "| fault | in | caught by | seconds |\n|---|---|---|---|"
    sections = {area: "\n".join([head_of_table, *found]) for area, found in lines.items() if found}
    rows = [line for found in lines.values() for line in found]
    survive = sum("**survives**" in line for line in rows)
    head = [
        "# Deliberate faults, and the tests of CI that catch them",
        "",
        f"Written by `python -m tests.mutants`: {len(rows) - survive} of {len(rows)} faults are caught.",
        "Seconds are of one test run with the fault, two at a time on two cores.",
    ]
    body = [f"\n## {area}\n\n{table}" for area, table in sections.items()]
    TABLE.write_text("\n".join([*head, *body]) + "\n", encoding="utf-8")


def apply_all(chosen: Mapping[str, Sequence[Fault]], folder: Path, copies: list[Path], is_recorded: bool) -> bool:
    """Run all faults, as many at a time as there are copies; tell whether each was caught."""
    waiting = [(area, fault) for area, faults in chosen.items() for fault in faults]
    outcomes: dict[str, list[Outcome]] = {area: [] for area in chosen}
    running: dict[int, Run] = {}
    while waiting or running:
        while waiting and copies:
            area, fault = waiting.pop(0)
            process, run = start(area, fault, copies.pop(), folder / f"said_{len(waiting)}")
            running[process] = run
        process, status = os.wait()
        run = running.pop(process)
        copies.append(run.copy)
        outcome = end(run, status)
        done = outcomes[run.area]
        done.append(outcome)
        mark = "caught  " if outcome.caught else "SURVIVES"
        print(f"{mark} {outcome.seconds:4.0f} s  {run.area}: {outcome.fault.name}", flush=True)
        if not outcome.caught:
            print(run.said.read_text(errors="replace")[-1500:], file=sys.stderr)
        if is_recorded and len(done) == len(chosen[run.area]):
            write_sections({run.area: done})
    return all(outcome.caught for done in outcomes.values() for outcome in done)


def main() -> int:
    """Run the faults that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--area", action="append", help="faults of this area alone; may be repeated")
    parser.add_argument("--missing", action="store_true", help="only faults that the table does not have yet")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has this text; writes no table")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--known-to-pass", action="store_true", help="do not first run the tests without faults")
    options = parser.parse_args()
    known = recorded() if options.missing else {}
    chosen = {
        area: [fault for fault in faults if options.only in fault.name and _cell(fault.name) not in known.get(area, {})]
        for area, faults in all_faults().items()
        if not options.area or area in options.area
    }
    faults = [fault for found in chosen.values() for fault in found]
    wrong = misplaced(faults)
    if wrong or not faults:
        print("\n".join(wrong) or "error: no fault has this name", file=sys.stderr)
        return 2
    for module in _PRELOADED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="jaxinfer-mutants-") as name:
        folder = Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
        copies = [copy_checkout(folder / f"copy_{number}") for number in range(options.jobs)]
        tests = [] if options.known_to_pass else sorted({fault.caught_by for fault in faults})
        failing = failing_without_faults(tests, copies[0], options.jobs)
        if failing:
            print("error: fails without any fault: " + ", ".join(failing), file=sys.stderr)
            return 2
        return int(not apply_all(chosen, folder, copies, not options.only))


if __name__ == "__main__":
    sys.exit(main())
