"""The compiled programs that live in this process: no more than its memory maps allow, those used last.

On a CPU each of a program's kernels is an object of its own, with a map for its code, its constants and its data: 250
to 900 maps a program. Linux gives a process 65,530 of them, and the compiler dies where they end. No option of XLA
joins the objects, so that programs have to go: a program that nothing refers to is unmapped at once.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Program = Callable[..., Any]

_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
# Of the system's maps, in this process: others are of threads, libraries and of what the compiler is making.
_PART = 3


@dataclass(frozen=True)
class Bound:
    """How many programs may live: ``most`` in all, and fewer where they and all else take more than ``most_maps`` maps.

    The ``least`` programs that were used last stay whatever else takes maps, or ordinary use would compile its few
    programs over and over. ``most_maps`` is None where the system does not tell.
    """

    most: int = 256
    least: int = 16
    most_maps: int | None = None

    def is_exceeded(self, num_programs: int) -> bool:
        """Tell whether the program that was used longest ago has to go."""
        if num_programs <= self.least:
            return False
        return num_programs > self.most or (self.most_maps is not None and _num_maps() > self.most_maps)


def system_bound() -> Bound:
    """Return the bound that this system asks for."""
    try:
        return Bound(most_maps=int(_MOST_MAPS.read_text()) // _PART)
    except (OSError, ValueError):
        return Bound()


class LivePrograms:
    """Programs of any number of owners, in the order of their last use. Any thread may call it.

    An owner's programs go with it. A program that is dropped while it runs lives until it ends.
    """

    def __init__(self, bound: Bound | None = None) -> None:
        self._bound = bound
        self._programs: OrderedDict[tuple[int, Hashable], Program] = OrderedDict()
        # Reentrant, since an owner may be collected in the middle of a call.
        self._lock = threading.RLock()
        self._owners = 0

    @property
    def bound(self) -> Bound:
        """How many may live."""
        if self._bound is None:
            self._bound = system_bound()
        return self._bound

    def enter(self, owner: object) -> int:
        """Return the number of a new owner."""
        with self._lock:
            self._owners += 1
            number = self._owners
        weakref.finalize(owner, self._leave, number).atexit = False
        return number

    def use(self, owner: int, key: Hashable) -> Program | None:
        """Return an owner's program, if it lives."""
        with self._lock:
            program = self._programs.get((owner, key))
            if program is not None:
                self._programs.move_to_end((owner, key))
            return program

    def add(self, owner: int, key: Hashable, program: Program) -> None:
        """Add a program, and drop those that were used longest ago until the bound is kept."""
        with self._lock:
            self._programs[owner, key] = program
            self._programs.move_to_end((owner, key))
            while self.bound.is_exceeded(len(self._programs)):
                self._programs.popitem(last=False)

    def clear(self) -> None:
        """Drop all programs of all owners; each is read or compiled again where it is needed again."""
        with self._lock:
            self._programs.clear()

    def of(self, owner: int) -> dict[Any, Program]:
        """Return an owner's programs by their keys."""
        with self._lock:
            return {key: program for (number, key), program in self._programs.items() if number == owner}

    def _leave(self, owner: int) -> None:
        with self._lock:
            for key in self.of(owner):
                del self._programs[owner, key]


def _num_maps() -> int:
    """Return how many memory maps this process has."""
    try:
        return _MAPS.read_bytes().count(b"\n")
    except OSError:
        return 0


# Maps belong to the process, and so does the order in which programs of all its models go.
LIVE = LivePrograms()
