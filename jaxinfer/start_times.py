"""Where the time goes before a first token comes."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

_IMPORTED = time.perf_counter()


@dataclass
class LoadTimes:
    """Seconds that parts of loading took; ``notes`` say what became of weights that are kept."""

    open_seconds: float = 0.0
    tokenizer_seconds: float = 0.0
    weights_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class Clock:
    """Tells how long it is since it was last asked."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last call, or since the clock was made."""
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def seconds_since_start() -> float:
    """Return how long this process has run; where the system does not tell, how long since it imported this module."""
    try:
        # The name in parentheses may hold anything; what follows it begins with the third field.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED
