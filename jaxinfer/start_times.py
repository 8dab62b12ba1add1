"""Where the time goes before a first token comes."""

import time
from dataclasses import dataclass, field


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
