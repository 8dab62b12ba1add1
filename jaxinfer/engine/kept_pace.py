"""What steps have cost, from one process to the next: measured once, and then known."""

import json
from contextlib import suppress
from typing import Any

from jaxinfer.decoding.programs import Programs
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.engine.pace import Pace
from jaxinfer.kept.conditions import conditions
from jaxinfer.kept.folder import KeptFolder, NotKept
from jaxinfer.kept.spelling import digest, spell


class KeptPace:
    """Hands out the pace of each strategy, one for a model, and keeps what these learn beside its programs."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._known: dict[tuple[Any, tuple[int, ...]], tuple[Pace, str]] = {}

    def of(self, strategy: Strategy, widths: tuple[int, ...]) -> Pace:
        """Return the pace for a strategy whose windows have these numbers of nodes."""
        key = strategy, widths
        if key not in self._known:
            ahead = strategy.ahead
            pace = Pace(widths, None if ahead is None else (ahead.num_nodes, ahead.drafter.num_nodes))
            self._known[key] = pace, self._read(pace, strategy, widths)
        return self._known[key][0]

    def keep(self) -> None:
        """Write down what is new; where nothing can be written, nothing is."""
        folder = self._folder
        for (strategy, widths), (pace, before) in self._known.items():
            content = json.dumps(pace.costs())
            # What moves from window to window is not worth a file; what was not known is.
            if folder is None or len(content) <= len(before):
                continue
            self._known[strategy, widths] = pace, content
            with suppress(NotKept):
                folder.write(self._name(strategy, widths), [content.encode()], len(content))

    def _read(self, pace: Pace, strategy: Strategy, widths: tuple[int, ...]) -> str:
        content = None
        with suppress(NotKept):
            content = None if self._folder is None else self._folder.read(self._name(strategy, widths))
        if content is None or not pace.begin_with(_parsed(content)):
            return ""
        return content.decode()

    @property
    def _folder(self) -> KeptFolder | None:
        return None if self._programs.kept is None else self._programs.kept.folder

    def _name(self, strategy: Strategy, widths: tuple[int, ...]) -> str:
        texts = [f"{name}: {value}" for name, value in sorted(conditions().items())]
        return f"{digest(spell(self._programs.decoder), repr(strategy), repr(widths), *texts)}.pace"


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
