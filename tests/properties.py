"""``python -m tests.properties``: writes the table of `tests/README.md`: each file's property, and its tests by tier.

A file's property is the first sentence of its docstring. Tests are counted as pytest collects them.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
README = TESTS / "README.md"
TIERS = ("ordinary", "slow", "exhaustive")
_TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of table -->)", re.DOTALL)


class _Counter:
    """Counts the tests of each file by tier, as they are collected, before any is deselected."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            tier = next((tier for tier in ("exhaustive", "slow") if item.get_closest_marker(tier)), "ordinary")
            self.counts[str(item.path.relative_to(TESTS))][tier] += 1


def count() -> Mapping[str, Counter[str]]:
    """Collect all tests, and return how many each file has in each tier."""
    counter = _Counter()
    ended = pytest.main(["--collect-only", "-q", "-q", "-n0", str(TESTS)], plugins=[counter])
    if ended != pytest.ExitCode.OK:
        raise SystemExit(int(ended))
    return counter.counts


def property_of(path: Path) -> str:
    """Return the first sentence of a test file's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return text.replace("|", "\\|")


def table(counts: Mapping[str, Counter[str]]) -> str:
    """Return the table as Markdown, a section for each folder."""
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(counts):
        folders[str(Path(file).parent)].append(file)
    lines = []
    for folder, files in folders.items():
        lines += [
            f"### {'tests' if folder == '.' else folder}",
            "",
            "| file | property | ordinary | slow | exhaustive |",
        ]
        lines.append("|---|---|---|---|---|")
        for file in files:
            numbers = " | ".join(str(counts[file][tier] or "") for tier in TIERS)
            lines.append(f"| `{Path(file).name}` | {property_of(TESTS / file)} | {numbers} |")
        lines.append("")
    return "\n" + "\n".join(lines)


def main() -> None:
    """Write the table between its marks."""
    text = README.read_text(encoding="utf-8")
    README.write_text(_TABLE.sub(lambda _: table(count()), text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
