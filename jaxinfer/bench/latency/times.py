"""The times of one run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of one warm run; ``decode`` covers all new tokens but the first, which prefill draws."""

    prefill: float
    decode: float
    first_token: float
