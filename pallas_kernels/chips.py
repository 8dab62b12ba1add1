"""Facts of each TPU that programs are compiled for and measured against.

Sources: bandwidths, peaks, number of cores and size of the matrix unit are Google's published figures per chip (Cloud
TPU documentation, pages "TPU v4", "v5e", "v5p", "v6e" and "TPU7x"). On-chip memory and the fp8 rate of older chips are
from JAX's `jax.experimental.pallas.tpu.get_tpu_info`. A clock is the rate at which the matrix units of v4, v5e and v5p
reach the published bf16 peak, and None if their number and rate are not both published. The usable memory is what the
TPU compiler (libtpu 0.0.42) reports as available when a program asks for too much.

What a link takes to pass on the first byte is an estimate, beside each chip with its source. Google publishes none.
"How to Scale Your Model" (Austin et al., 2025, jax-ml.github.io/scaling-book) gives about 1 us a link in general, and
works with it for v4 and v5e; ASTRA-sim's validation on a v3 takes 1 us too, by word of the TPU researchers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Chip:
    """One kind of TPU. Peaks are dense operations per second; a dtype's peak is None if the chip has no unit for it.

    ``name`` is libtpu's name in a topology (``v5e:2x4``), ``single`` the shape of a topology of one chip. JAX sees
    ``devices`` devices per chip: one for all its cores, but on TPU7x one per core, with half of everything.
    ``device_hbm_bytes`` is the device memory that programs may use, ``vmem_bytes`` the vector memory of one core.
    ``ici_bytes_per_second`` is what a chip can send over all its links at once, half of the published bidirectional
    rate; small slices do not use all links. ``ici_hop_seconds`` is what passing on the first byte over one link takes.
    The chips along a side of a slice are a ring if the side is a multiple of ``ring_side`` chips long; in deep slices
    all sides must be.
    """

    name: str
    single: str
    devices: int
    device_hbm_bytes: int
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    ici_hop_seconds: float
    ring_side: int
    bf16_peak: float
    int8_peak: float | None
    fp8_peak: float | None
    cores: int
    vmem_bytes: int
    mxu_size: int
    clock_hz: float | None

    @property
    def device_hbm_bytes_per_second(self) -> float:
        """The memory bandwidth of one device."""
        return self.hbm_bytes_per_second / self.devices

    @property
    def device_ici_bytes_per_second(self) -> float:
        """The bytes per second that one device can send to others."""
        return self.ici_bytes_per_second / self.devices

    @property
    def device_bf16_peak(self) -> float:
        """The bf16 operations per second of one device."""
        return self.bf16_peak / self.devices


_ALL = (
    Chip(
        name="v4",
        single="1x1x1",
        devices=1,
        device_hbm_bytes=int(30.75 * _GIB),
        hbm_bytes_per_second=1228e9,
        ici_bytes_per_second=300e9,
        ici_hop_seconds=1e-6,  # estimate: "How to Scale Your Model", sharding, question 3
        ring_side=4,
        bf16_peak=275e12,
        int8_peak=275e12,
        fp8_peak=None,
        cores=2,
        vmem_bytes=16 * _MIB,
        mxu_size=128,
        clock_hz=1.05e9,
    ),
    Chip(
        name="v5e",
        single="1x1",
        devices=1,
        device_hbm_bytes=int(15.75 * _GIB),
        hbm_bytes_per_second=819e9,
        ici_bytes_per_second=200e9,
        ici_hop_seconds=1e-6,  # estimate: "How to Scale Your Model", TPUs, question 5
        ring_side=16,
        bf16_peak=197e12,
        int8_peak=394e12,
        fp8_peak=None,
        cores=1,
        vmem_bytes=128 * _MIB,
        mxu_size=128,
        clock_hz=1.5e9,
    ),
    Chip(
        name="v5p",
        single="1x1x1",
        devices=1,
        device_hbm_bytes=int(95.74 * _GIB),
        hbm_bytes_per_second=2765e9,
        ici_bytes_per_second=600e9,
        ici_hop_seconds=1e-6,  # estimate: "How to Scale Your Model", sharding, of any link; not of this chip
        ring_side=4,
        bf16_peak=459e12,
        int8_peak=918e12,
        fp8_peak=459e12,
        cores=2,
        vmem_bytes=64 * _MIB,
        mxu_size=128,
        clock_hz=1.75e9,
    ),
    Chip(
        name="v6e",
        single="1x1",
        devices=1,
        device_hbm_bytes=int(31.25 * _GIB),
        hbm_bytes_per_second=1638e9,
        ici_bytes_per_second=400e9,
        ici_hop_seconds=1e-6,  # estimate: "How to Scale Your Model", sharding, of any link; not of this chip
        ring_side=16,
        bf16_peak=918e12,
        int8_peak=1836e12,
        fp8_peak=918e12,
        cores=1,
        vmem_bytes=128 * _MIB,
        mxu_size=256,
        clock_hz=None,
    ),
    Chip(
        name="tpu7x",
        single="1x1x1",
        devices=2,
        device_hbm_bytes=int(94.75 * _GIB),
        hbm_bytes_per_second=7380e9,
        ici_bytes_per_second=600e9,
        ici_hop_seconds=1e-6,  # estimate: that of older chips; nothing is published
        ring_side=4,
        bf16_peak=2307e12,
        int8_peak=None,
        fp8_peak=4614e12,
        cores=2,
        vmem_bytes=64 * _MIB,
        mxu_size=256,
        clock_hz=None,
    ),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _ALL})
