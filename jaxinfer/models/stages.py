"""How a pipeline's stages split a decoder's layers, and how long a pass of its microbatches takes.

Microbatch m is at stage s in tick m + s. So M microbatches take M + S - 1 ticks of S stages, and each stage is idle in
S - 1 of them: the bubble (Huang et al., 1811.06965). More microbatches make the bubble smaller, but every tick reads a
stage's weights again. A step of few rows takes as long as reading the weights, which is shortest with one microbatch.
Many microbatches help long prompts and large batches, whose products take longer than that, and caches larger than the
weights.
"""

from dataclasses import dataclass

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import Cycle, cycles

# A product with about this many rows takes a TPU as long as reading the matrix from HBM: the chip's bf16 peak over its
# bandwidth, in `pallas_kernels.chips`.
_FREE_ROWS = 256


@dataclass(frozen=True)
class Schedule:
    """One pass through a pipeline: ``stages`` stages take part, ``microbatches`` microbatches follow one another."""

    stages: int
    microbatches: int

    @property
    def ticks(self) -> int:
        """The number of ticks; in each, a stage runs its layers on one microbatch."""
        return self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of ticks in which a stage is idle."""
        return (self.stages - 1) / self.ticks


def num_stages(config: DecoderConfig, pipeline: int) -> int:
    """Return how many of the ``pipeline`` devices split the layers: all, or one if the layers do not divide."""
    cycle = only_cycle(config)
    return pipeline if cycle is not None and cycle.repeats % pipeline == 0 else 1


def check_stages(config: DecoderConfig, pipeline: int) -> None:
    """Raise InvalidOption if the layers do not split evenly over ``pipeline`` devices."""
    if num_stages(config, pipeline) == pipeline:
        return
    cycle = only_cycle(config)
    if cycle is None:
        reason = f"{config.num_layers} layers, which are not one cycle of kinds that repeats, do not split"
    elif cycle.period > 1:
        reason = f"{config.num_layers} layers, {cycle.repeats} cycles of {cycle.period} kinds, do not split evenly"
    else:
        reason = f"{config.num_layers} layers do not split evenly"
    mend = "leave the axis out" if cycle is None else f"choose a divisor of {cycle.repeats}"
    raise InvalidOption(f"mesh: {reason} over pipeline={pipeline} devices: {mend}")


def plan_schedule(
    stages: int, rows: int, tokens: int, weight_bytes: int, cache_bytes: int, most: int | None = None
) -> Schedule:
    """Choose the microbatches for ``tokens`` new tokens in each of ``rows`` rows, on the devices of one stage.

    Weights and cache are in bytes, both for the same number of devices. With ``most``, choose the largest number of
    microbatches up to it instead of the fastest.
    """
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    if most is not None:
        return Schedule(stages, max(count for count in divisors if count <= max(most, 1)))

    def time(count: int) -> float:
        reading = weight_bytes + cache_bytes / count
        multiplying = weight_bytes * rows * tokens / count / _FREE_ROWS
        return Schedule(stages, count).ticks * max(reading, multiplying)

    return Schedule(stages, min(divisors, key=time))


def only_cycle(config: DecoderConfig) -> Cycle | None:
    """Return the cycle that covers all layers, if there is one."""
    first, *rest = cycles(config)
    return None if rest else first
