"""A pytest plugin: a skipped test is listed, and one that nobody expects fails the run where CI is set."""

import os
import re
from collections import Counter

import pytest

# What may be absent, and why that is no fault of the checkout.
EXPECTED = (
    r"could not import 'torch'",  # its CPU build exists for Python 3.11 only
    r"shared data absent",
    r"default model absent",
    r"chromium absent",  # Debian has it; the page is tested where it is installed
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons of all skips."""
    for reason, count in sorted(_reasons(terminalreporter).items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run for a skip that is not expected."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get("CI"):
        return
    unexpected = [
        reason for reason in _reasons(reporter) if not any(re.search(pattern, reason) for pattern in EXPECTED)
    ]
    if unexpected:
        reporter.write_line(f"unexpected skips: {'; '.join(sorted(unexpected))}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _reasons(reporter: pytest.TerminalReporter) -> Counter[str]:
    reasons: Counter[str] = Counter()
    for report in reporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    return reasons
