"""How many requests, and how many tokens, a client may have in a minute."""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Where the gate tells an endpoint, in the request's scope, what names the client.
CLIENT = "jaxinfer.client"
_MINUTE = 60.0


class Allowance:
    """What is left of a minute's worth, which is there at the beginning and comes back evenly, never more than it.

    More may be taken than is left: then nothing is until that has come back.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._left, self._since = per_minute, float(per_minute), now

    def seconds_until(self, amount: float, now: float) -> float:
        """Return how long it takes until so much is left, 0 if it is."""
        self._left = min(self._per_minute, self._left + (now - self._since) * self._per_minute / _MINUTE)
        self._since = now
        return max(0.0, amount - self._left) * _MINUTE / self._per_minute

    def take(self, amount: int) -> None:
        """Take so much, whether or not it is there."""
        self._left -= amount


@dataclass(frozen=True)
class Refusal:
    """Why a client has to wait, and how many seconds."""

    reason: str
    seconds: float


class Rates:
    """Limits of each client, by what names it; None is no limit. ``clock`` tells seconds."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._clock = clock
        self._left: dict[tuple[str, str], Allowance] = {}

    def admit(self, client: str) -> Refusal | None:
        """Count a request, unless the client has to wait: return why."""
        now = self._clock()
        # Any token that is left lets in a request: how many it will take is not known.
        for what, least in (("requests", 1.0), ("tokens", 0.0)):
            allowance = self._allowance(what, client, now)
            seconds = 0.0 if allowance is None else allowance.seconds_until(least, now)
            if seconds:
                return Refusal(f"more than {self._limits[what]} {what} in a minute", seconds)
        self._take("requests", client, 1)
        return None

    def spend(self, client: str, tokens: int) -> None:
        """Count tokens of a request that was let in."""
        self._take("tokens", client, tokens)

    def _take(self, what: str, client: str, amount: int) -> None:
        now = self._clock()
        allowance = self._allowance(what, client, now)
        if allowance is not None:
            allowance.seconds_until(0.0, now)  # what has come back until now cannot come back twice
            allowance.take(amount)

    def _allowance(self, what: str, client: str, now: float) -> Allowance | None:
        limit = self._limits[what]
        if limit is None:
            return None
        return self._left.setdefault((what, client), Allowance(limit, now))
