"""Experts' kernels in few bits: what their codes stand for, and what a step of `grouped_matmul` reads of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE = 128  # rows of weights that the matrix unit takes at once
GROUPS = (32, 64, 128)
INTEGER, FLOAT8, FLOAT4 = "integer", "e4m3", "e2m1"
# The bias of a group's exponent, a power of two with the bias of float32, and what it multiplies if it is zero.
_EXPONENT_BITS, _LEAST_POWER_BITS = 23, 1 << 22


class Codes(NamedTuple):
    """Weights ``scale * (code - offset) + minimum``, or ``scale * float``, of the experts of one or more layers.

    By rows: int8 codes ``[E, F, D]`` and float32 scales ``[E, F]``, one a channel. By columns: int8 or uint4 codes
    ``[E, D, F]``, and scales and minima ``[E, G, F]`` of groups of 32, 64 or 128 inputs: float32, the bits of float16
    as int16, or, of scales alone, exponents of powers of two with the bias of float32 as uint8. ``kind`` is what a code
    is: an ``integer``, or the bits of a float of 8 bits (``e4m3``) or 4 (``e2m1``); codes of 8 bits have no offset.
    """

    codes: Any
    scales: Any
    minima: Any = None
    kind: str = INTEGER
    offset: int = 0

    @property
    def lies_by_rows(self) -> bool:
        """Whether a row of codes is what a channel multiplies."""
        return self.scales.ndim < self.codes.ndim

    @property
    def form(self) -> "Form":
        """What a kernel needs to know of the codes."""
        bits = 4 if self.codes.dtype == jnp.uint4 else 8
        group = 0 if self.lies_by_rows else self.codes.shape[-2] // max(1, self.scales.shape[-2])
        return Form(self.kind, bits, group, self.offset, self.minima is not None, self.scales.dtype.itemsize)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, ``[E, F, D]``."""
        experts, first, second = self.codes.shape
        return (experts, first, second) if self.lies_by_rows else (experts, second, first)


class Form(NamedTuple):
    """What codes stand for; ``group`` is 0 for one scale a channel, ``scale_bytes`` those of a scale."""

    kind: str
    bits: int
    group: int
    offset: int
    has_minima: bool
    scale_bytes: int

    @property
    def name(self) -> str:
        """How tuned.json calls the form."""
        kind = f"int{self.bits}" if self.kind == INTEGER else self.kind
        return f"{kind}/{self.group}" if self.group else kind

    def weight_bytes(self, weights: int) -> int:
        """Return the bytes of so many weights, without the scales of channels."""
        groups = weights // self.group if self.group else 0
        return weights * self.bits // 8 + groups * self.scale_bytes * (1 + self.has_minima)


def check_codes(kernel: Codes) -> None:
    """Raise ValueError for codes that no kernel reads."""
    codes, scales, minima, kind, _ = kernel
    form, bits = kernel.form, 4 if kind == FLOAT4 else 8 if kind == FLOAT8 else None
    if codes.dtype not in (jnp.int8, jnp.uint4) or (bits or form.bits) != form.bits:
        raise ValueError(f"grouped_matmul: codes of {kind} are {codes.dtype}")
    if kernel.lies_by_rows:
        good = codes.dtype == jnp.int8 and scales.shape == codes.shape[:2] and scales.dtype == jnp.float32
        if not good or minima is not None:
            raise ValueError(f"grouped_matmul: codes {codes.shape} need float32 scales [E, F] and no minima")
        return
    experts, width, channels = codes.shape
    if form.group not in GROUPS or scales.shape != (experts, width // form.group, channels) or width % form.group:
        raise ValueError(f"grouped_matmul: scales {scales.shape} are not those of groups of {codes.shape}: [E, G, F]")
    if scales.dtype not in (jnp.float32, jnp.int16, jnp.uint8):
        raise ValueError(f"grouped_matmul: scales are {scales.dtype}")
    if minima is not None and (minima.shape != scales.shape or minima.dtype not in (jnp.float32, jnp.int16)):
        raise ValueError(f"grouped_matmul: minima are {minima.dtype}{minima.shape}, but scales {scales.shape}")


def widened(kernel: Codes) -> jax.Array:
    """Return the weights ``[E, F, D]`` in float32."""
    codes, scales, minima, kind, offset = kernel
    if kind == FLOAT8:
        levels = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    elif kind == FLOAT4:
        sizes = jnp.asarray((0, 0.5, 1, 1.5, 2, 3, 4, 6), jnp.float32)
        bits = codes.astype(jnp.int32)
        levels = jnp.where(bits & 8, -sizes[bits & 7], sizes[bits & 7])
    else:
        levels = codes.astype(jnp.float32) - offset
    if kernel.lies_by_rows:
        return levels * scales[..., None]

    def spread(part: Any) -> jax.Array:
        return jnp.repeat(as_float32(part), levels.shape[1] // part.shape[1], axis=1)

    weights = levels * spread(scales)
    return jnp.swapaxes(weights if minima is None else weights + spread(minima), 1, 2)


def as_float32(numbers: jax.Array) -> jax.Array:
    """Return scales or minima in float32: the chip knows neither float16 nor bytes of exponents."""
    if numbers.dtype == jnp.float32:
        return numbers
    bits = numbers.astype(jnp.int32)
    if numbers.dtype == jnp.uint8:
        powers = jnp.where(bits == 0, _LEAST_POWER_BITS, bits << _EXPONENT_BITS)
        return lax.bitcast_convert_type(powers, jnp.float32)
    size = bits & 0x7FFF
    normal = lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    found = jnp.where(size < 0x400, size.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -found, found)
