"""A pytest plugin: where a run's time goes, by file. Print it with `--timing`, write it with `--timing FILE.json`.

For each file: wall time, processor time (all threads, child processes included), seconds in tracing, lowering and
compiling, programs compiled and read from the run's cache, and child processes. For each worker: the most memory held,
and the test that took it there.
Processor time is what to compare: it hardly changes when other work runs beside the tests.
"""

import json
import os
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

# JAX's names of what it measures, and ours.
SECONDS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
HITS = "/jax/compilation_cache/cache_hits"
COLUMNS = ("wall", "cpu", "trace", "lower", "compile", "programs", "hits", "children")
PROPERTY = "timing"

_counts: defaultdict[str, float] = defaultdict(float)


def _count_seconds(event: str, seconds: float, **_: object) -> None:
    if event in SECONDS:
        _counts[SECONDS[event]] += seconds
    if event.endswith("backend_compile_duration"):
        _counts["programs"] += 1


def _count_events(event: str, **_: object) -> None:
    if event == HITS:
        _counts["hits"] += 1


def _count_children(event: str, _: tuple[object, ...]) -> None:
    if event == "subprocess.Popen":
        _counts["children"] += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--timing`."""
    parser.addoption(
        "--timing", nargs="?", const="-", metavar="FILE.json", help="print, or write, where the time went by file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to listen, in every worker."""
    target = config.getoption("timing")
    if target is None:
        return
    if not target.endswith((".json", "-")):
        # The name of a test, say, which would not be run alone but written over.
        raise pytest.UsageError(f"--timing {target}: name a .json file, or write --timing=- before names of tests")
    jax.monitoring.register_event_duration_secs_listener(_count_seconds)
    jax.monitoring.register_event_listener(_count_events)
    sys.addaudithook(_count_children)
    config.pluginmanager.register(_Recorder(), "timing-recorder")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table(config), "timing-table")


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class _Recorder:
    def __init__(self) -> None:
        self.seen = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _counts.clear()
        self.seen = _processor_seconds()
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        now = _processor_seconds()
        values = {**_counts, "wall": report.duration, "cpu": now - self.seen, "worker": worker, "memory": memory}
        report.user_properties = [(PROPERTY, values)]
        self.seen = now
        _counts.clear()
        return report


class _Table:
    def __init__(self, config: pytest.Config) -> None:
        self.files: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.tests: Counter[str] = Counter()
        self.memory: Counter[str] = Counter()
        self.heaviest: dict[str, str] = {}
        self.target = config.getoption("timing")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, values in report.user_properties:
            if name != PROPERTY:
                continue
            file = report.nodeid.partition("::")[0]
            for column in COLUMNS:
                self.files[file][column] += values.get(column, 0)
            self.tests[report.nodeid] += values["cpu"]
            if values["memory"] > self.memory[values["worker"]]:
                self.memory[values["worker"]] = values["memory"]
                self.heaviest[values["worker"]] = report.nodeid

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files = dict(sorted(self.files.items(), key=lambda row: -row[1]["cpu"]))
        terminalreporter.write_line("".join(f"{column:>10}" for column in COLUMNS) + "  file")
        for file, row in files.items():
            terminalreporter.write_line("".join(f"{row[column]:>10.0f}" for column in COLUMNS) + f"  {file}")
        total = {column: sum(row[column] for row in files.values()) for column in COLUMNS}
        terminalreporter.write_line("".join(f"{total[column]:>10.0f}" for column in COLUMNS) + "  all")
        for worker, size in sorted(self.memory.items()):
            held = f"most memory held: {worker} {size / 2**30:.1f} GiB, since {self.heaviest[worker]}"
            terminalreporter.write_line(held)
        if self.target != "-":
            record = {"files": {name: dict(row) for name, row in files.items()}, "tests": dict(self.tests)}
            Path(self.target).write_text(json.dumps({**record, "memory": dict(self.memory)}, indent=1))
