"""Groups that have been measured, kept in a file, so that a measurement that was cut short goes on."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.acceptance.stored import parse
from jaxinfer.bench.acceptance.tally import Group
from jaxinfer.errors import InvalidOption


class KeptGroups:
    """A file with a line for each group of prompts, under a name that stands for all that its results depend on.

    ``conditions`` is what all groups of a measurement have in common. A line that was not written whole is left out.
    """

    def __init__(self, path: Path, conditions: str) -> None:
        self._path, self._conditions = path, conditions
        self._groups: dict[str, Group] = {}
        if not path.parent.is_dir():
            raise InvalidOption(f"--resume {path}: there is no folder {path.parent}")
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as problem:
            raise InvalidOption(f"--resume {path}: cannot be read ({type(problem).__name__})") from None
        *lines, self._rest = text.split("\n")
        for number, line in enumerate(lines, 1):
            try:
                name, group = json.loads(line)
                self._groups[name] = parse(Group, group)
            except (ValueError, TypeError, RecursionError):
                # The line that was being written when the process was killed.
                if not line.startswith('["'):
                    raise InvalidOption(f"--resume {path}: line {number} is no group: name another file") from None
        if self._rest and not self._rest.startswith('["'):
            raise InvalidOption(f"--resume {path}: its last line is no group: name another file")

    def find(self, prompts: Sequence[Sequence[int]], num_new: int) -> Group | None:
        """Return what was measured with these prompts, the first ``num_new`` of which count."""
        return self._groups.get(self._name(prompts, num_new))

    def add(self, prompts: Sequence[Sequence[int]], num_new: int, group: Group) -> None:
        """Keep a group."""
        line = json.dumps([self._name(prompts, num_new), dataclasses.asdict(group)])
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("\n" if self._rest else "") + line + "\n")
        self._rest = ""

    def _name(self, prompts: Any, num_new: int) -> str:
        text = json.dumps([self._conditions, [list(prompt) for prompt in prompts], num_new])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
