"""The least time of a program on a chip: what it moves and computes, against what the chip can."""

from collections.abc import Mapping
from dataclasses import dataclass

from pallas_kernels.chips import Chip

# A TPU multiplies float32 as six products of bfloat16 parts.
_FLOAT32_PASSES = 6


@dataclass(frozen=True)
class Work:
    """What one device moves and computes in one run of a program.

    ``collectives`` are by kind, how many and of how many bytes; ``sent_bytes`` is what the device sends for them.
    """

    hbm_bytes: int
    flops: int
    sent_bytes: int
    collectives: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Roofline:
    """Seconds of a run were it bound by memory, by matrix products or by sending to other devices alone."""

    hbm_seconds: float
    mxu_seconds: float
    ici_seconds: float

    @property
    def seconds(self) -> float:
        """The least time, with all else hidden behind what takes longest."""
        return max(self.hbm_seconds, self.mxu_seconds, self.ici_seconds)

    @property
    def bound(self) -> str:
        """What takes longest: ``HBM``, ``MXU`` or ``ICI``."""
        times = {"HBM": self.hbm_seconds, "MXU": self.mxu_seconds, "ICI": self.ici_seconds}
        return max(times, key=lambda name: times[name])


def roofline(work: Work, chip: Chip, dtype: str) -> Roofline:
    """Return the times of a run on one device of a chip; those of collectives by bandwidth, without latency."""
    return Roofline(
        work.hbm_bytes / chip.device_hbm_bytes_per_second,
        work.flops / peak_flops(chip, dtype),
        work.sent_bytes / chip.device_ici_bytes_per_second,
    )


def peak_flops(chip: Chip, dtype: str) -> float:
    """Return the operations a second of one device's matrix units on weights of a dtype."""
    return chip.device_bf16_peak / (_FLOAT32_PASSES if dtype == "float32" else 1)
