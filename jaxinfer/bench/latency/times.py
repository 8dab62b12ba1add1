"""What one run took."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of one warm run; ``decode`` is of all new tokens but the first, which prefill draws."""

    prefill: float
    decode: float
    first_token: float
