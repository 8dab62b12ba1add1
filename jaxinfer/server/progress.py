"""Tells an engine that has nothing to do from one that does nothing."""

from jaxinfer.engine.metrics import EngineMetrics

STUCK_SECONDS = 5.0


class Progress:
    """Looks at an engine from time to time."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()
        self._since = 0.0

    def is_stuck(self, metrics: EngineMetrics, now: float) -> bool:
        """Look again: have requests waited for some seconds while none ran and none ended?"""
        waits_alone = bool(metrics.waiting) and not metrics.running and not metrics.prefilling
        ended = metrics.finished + metrics.cancelled + metrics.timed_out + metrics.failed
        done = (metrics.prompt_tokens, metrics.output_tokens, ended)
        if not waits_alone or done != self._last:
            self._last, self._since = done, now
        return now - self._since > STUCK_SECONDS
