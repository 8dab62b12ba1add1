"""What an engine counts, and what it is like at one moment."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jaxinfer.errors import RequestCancelled, RequestTimedOut


@dataclass
class Counters:
    """Sums since the engine started; each sample of a request ends, and is counted, by itself.

    ``prompt_tokens`` were computed, ``cached_tokens`` found in the prefix cache. ``steps`` counts decoding steps of the
    device, ``row_steps`` those of each sequence, which gave ``output_tokens`` with the first token of each.
    """

    finished: int = 0
    cancelled: int = 0
    timed_out: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    row_steps: int = 0

    def ended(self, error: Exception | None) -> None:
        """Count the end of a sequence."""
        if error is None:
            self.finished += 1
        elif isinstance(error, RequestCancelled):
            self.cancelled += 1
        elif isinstance(error, RequestTimedOut):
            self.timed_out += 1
        else:
            self.failed += 1


@dataclass(frozen=True)
class EngineMetrics:
    """An engine at one moment; the counters are `Counters`.

    ``pages_cached`` are those that no sequence uses and later prompts may find. ``compilations`` counts programs.
    """

    waiting: int
    prefilling: int
    running: int
    pages_in_use: int
    pages_cached: int
    pages_free: int
    preemptions: int
    compilations: int
    compile_seconds: float
    finished: int
    cancelled: int
    timed_out: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    accepted_tokens: int
    steps: int
    row_steps: int


def total(metrics: Sequence[EngineMetrics]) -> EngineMetrics:
    """Return the sums over groups of devices."""
    each = [asdict(one) for one in metrics]
    return EngineMetrics(**{name: sum(one[name] for one in each) for name in each[0]})
