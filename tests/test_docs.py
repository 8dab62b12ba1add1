"""The README stays short, links lead somewhere, and the commands of all pages have the options that pages give them."""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxinfer.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jaxinfer", "pallas_kernels", "train", "tests", "colab")
PAGES = [ROOT / "README.md", *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"```.*?```", re.DOTALL)
_COMMANDS = re.compile(r"```bash\n(.*?)```|`((?:jaxinfer|python -m train\.)[^`]*)`", re.DOTALL)


def test_the_readme_has_at_most_200_lines() -> None:
    assert 100 < len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in _LINK.findall(_FENCED.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{target} leads nowhere"
        assert not heading or heading in headings(file), f"{target}: {file.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_have_the_options_that_they_are_given(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        known = options(words)
        for word in words:
            option = word.partition("=")[0]
            assert not option.startswith("--") or option in known, f"{shlex.join(words)}: no option {option}"


def test_pages_have_links_and_commands() -> None:
    """The tests above would pass on pages that they cannot read."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(_LINK.findall(text)) > 10
    assert {words[1] for words in commands(text) if words[0] == "jaxinfer"} == set(COMMANDS)
    assert "--strategies" in options(["jaxinfer", "bench", "acceptance"])


def headings(page: Path) -> set[str]:
    """Return the headings of a page as links spell them."""
    lines = _FENCED.sub("", page.read_text(encoding="utf-8")).splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of ours, without what comes before and after it on its line."""
    for block, inline in _COMMANDS.findall(text):
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines() or [" ".join(inline.split())]:
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            for command in shlex.join(words).split("'&&'"):
                found = shlex.split(command)
                is_trainer = found[:2] == ["python", "-m"] and found[2:] and found[2].startswith("train.")
                if is_trainer or (found[:1] == ["jaxinfer"] and set(found[1:2]) & set(COMMANDS)):
                    yield found


def options(words: list[str]) -> set[str]:
    """Return the options of the command that words begin with."""
    if words[0] == "jaxinfer":
        home, rest = COMMANDS[words[1]][0], words[2:]
    else:
        home, rest = words[2], words[3:]
        home += ".__main__" if (ROOT / home.replace(".", "/")).is_dir() else ""
    importlib.import_module(home).add_arguments(parser := argparse.ArgumentParser())
    while True:
        found = {option for action in parser._actions for option in action.option_strings}
        branches = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not branches or not rest or rest[0] not in branches[0].choices:
            return found
        parser, rest = branches[0].choices[rest[0]], rest[1:]
