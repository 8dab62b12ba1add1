"""The least time of a program on a chip, from its traffic and operations and the chip's rates."""

from collections.abc import Mapping
from dataclasses import dataclass

from pallas_kernels.chips import Chip

# A TPU computes a float32 product as six products of bfloat16 parts.
_FLOAT32_PASSES = 6


@dataclass(frozen=True)
class Work:
    """What one device moves and computes in one run of a program.

    ``collectives`` gives the count and the bytes of each kind; ``sent_bytes`` is what the device sends for them, and
    ``hops`` how many links their parts cross one after the other (`jaxinfer.planning.latency`).
    """

    hbm_bytes: int
    flops: int
    sent_bytes: int
    collectives: Mapping[str, tuple[int, int]]
    hops: int = 0


@dataclass(frozen=True)
class Roofline:
    """Seconds of a run if only memory, only matrix products or only the bytes that are sent limited it.

    ``latency_seconds`` is what collectives take besides, however few their bytes are.
    """

    hbm_seconds: float
    mxu_seconds: float
    ici_seconds: float
    latency_seconds: float

    @property
    def seconds(self) -> float:
        """The least time: the longest of the three hides the other two.

        Nothing hides the latency. The next product needs the sum that is on its way, and the TPU compiler lets the core
        wait for it.
        """
        return max(self.hbm_seconds, self.mxu_seconds, self.ici_seconds) + self.latency_seconds

    @property
    def bound(self) -> str:
        """The limit that takes longest: ``HBM``, ``MXU``, ``ICI`` or ``latency``."""
        times = {"HBM": self.hbm_seconds, "MXU": self.mxu_seconds, "ICI": self.ici_seconds}
        times["latency"] = self.latency_seconds
        return max(times, key=lambda name: times[name])


def roofline(work: Work, chip: Chip, dtype: str) -> Roofline:
    """Return the times of a run on one device of a chip."""
    return Roofline(
        work.hbm_bytes / chip.device_hbm_bytes_per_second,
        work.flops / peak_flops(chip, dtype),
        work.sent_bytes / chip.device_ici_bytes_per_second,
        work.hops * chip.ici_hop_seconds,
    )


def peak_flops(chip: Chip, dtype: str) -> float:
    """Return the operations per second of one device's matrix units on weights of a dtype."""
    return chip.device_bf16_peak / (_FLOAT32_PASSES if dtype == "float32" else 1)
