"""Experts' kernels in few bits: what their codes stand for, and what a step of `grouped_matmul` reads of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE = 128  # rows of weights that the matrix unit takes at once
GROUPS = (16, 32, 64, 128)
INTEGER, FLOAT8, FLOAT4, LEVELS = "integer", "e4m3", "e2m1", "levels"
# The bias of a group's exponent, a power of two with the bias of float32, and what it multiplies if it is zero.
_EXPONENT_BITS, _LEAST_POWER_BITS = 23, 1 << 22
LEVELS_OF_FOUR_BITS = 16
_UNIT_BYTES = 2
_PARTS = ("codes", "scales", "minima", "zeros", "scale_units", "minima_units")


class Codes(NamedTuple):
    """Weights ``scale * (code - offset - zero) + minimum``, or ``scale * float``, of one or more layers' experts.

    By rows: int8 codes ``[E, F, D]`` and float32 scales ``[E, F]``, one a channel. By columns: int8 or uint4 codes
    ``[E, D, F]``, and scales and minima ``[E, G, F]`` of groups of 16, 32, 64 or 128 inputs: float32, the bits of
    float16 as int16, or, of scales alone, exponents of powers of two with the bias of float32 as uint8. Where several
    groups share a unit, scales and minima are int8, and their units ``[E, U, F]`` the bits of float16. ``zeros`` are
    int8, one a group.

    ``kind`` is what a code is: an ``integer``, the bits of a float of 8 bits (``e4m3``) or 4 (``e2m1``), or of 4 bits
    the number of one of 16 ``levels``, which are taken as bfloat16; codes of 8 bits have no offset.
    """

    codes: Any
    scales: Any
    minima: Any = None
    kind: str = INTEGER
    offset: int = 0
    zeros: Any = None
    scale_units: Any = None
    minima_units: Any = None
    levels: tuple[float, ...] = ()

    @property
    def parts(self) -> dict[str, Any]:
        """The arrays that there are."""
        found = {name: getattr(self, name) for name in _PARTS}
        return {name: part for name, part in found.items() if part is not None}

    @property
    def lies_by_rows(self) -> bool:
        """Whether a row of codes is what a channel multiplies."""
        return self.scales.ndim < self.codes.ndim

    @property
    def form(self) -> "Form":
        """What a kernel needs to know of the codes."""
        bits = 4 if self.codes.dtype == jnp.uint4 else 8
        groups = max(1, self.scales.shape[-2])
        group = 0 if self.lies_by_rows else self.codes.shape[-2] // groups
        supers = 0 if self.scale_units is None else groups // max(1, self.scale_units.shape[-2])
        names, size = tuple(self.parts), self.scales.dtype.itemsize
        return Form(self.kind, bits, group, self.offset, size, names, supers, self.levels)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, ``[E, F, D]``."""
        experts, first, second = self.codes.shape
        return (experts, first, second) if self.lies_by_rows else (experts, second, first)


class Form(NamedTuple):
    """What codes stand for, and the names of their ``parts``.

    ``group`` is 0 for one scale a channel, ``scale_bytes`` those of a scale; ``supers`` groups share a unit.
    """

    kind: str
    bits: int
    group: int
    offset: int
    scale_bytes: int
    parts: tuple[str, ...]
    supers: int = 0
    levels: tuple[float, ...] = ()

    @property
    def is_shifted(self) -> bool:
        """Whether groups have minima or zeros."""
        return "minima" in self.parts or "zeros" in self.parts

    @property
    def name(self) -> str:
        """How tuned.json calls the form."""
        kind = f"int{self.bits}" if self.kind == INTEGER else self.kind
        return f"{kind}/{self.group}" if self.group else kind

    def weight_bytes(self, weights: int) -> int:
        """Return the bytes of so many weights, without the scales of channels."""
        groups = weights // self.group if self.group else 0
        units = groups // self.supers * _UNIT_BYTES if self.supers else 0
        sized = (groups * self.scale_bytes + units) * (1 + ("minima" in self.parts))
        return weights * self.bits // 8 + sized + groups * ("zeros" in self.parts)


def check_codes(kernel: Codes) -> None:
    """Raise ValueError for codes that no kernel reads."""
    codes, scales, minima, kind = kernel[:4]
    form, bits = kernel.form, {FLOAT4: 4, LEVELS: 4, FLOAT8: 8}.get(kind)
    if codes.dtype not in (jnp.int8, jnp.uint4) or (bits or form.bits) != form.bits:
        raise ValueError(f"grouped_matmul: codes of {kind} are {codes.dtype}")
    if kernel.lies_by_rows:
        good = codes.dtype == jnp.int8 and scales.shape == codes.shape[:2] and scales.dtype == jnp.float32
        if not good or len(form.parts) > 2:
            raise ValueError(f"grouped_matmul: codes {codes.shape} need float32 scales [E, F] and no minima")
        return
    experts, width, channels = codes.shape
    if form.group not in GROUPS or scales.shape != (experts, width // form.group, channels) or width % form.group:
        raise ValueError(f"grouped_matmul: scales {scales.shape} are not those of groups of {codes.shape}: [E, G, F]")
    units = kernel.scale_units
    if scales.dtype not in ((jnp.float32, jnp.int16, jnp.uint8) if units is None else (jnp.int8,)):
        raise ValueError(f"grouped_matmul: scales are {scales.dtype}")
    of_minima = (jnp.float32, jnp.int16) if units is None else (jnp.int8,)
    if minima is not None and (minima.shape != scales.shape or minima.dtype not in of_minima):
        raise ValueError(f"grouped_matmul: minima are {minima.dtype}{minima.shape}, but scales {scales.shape}")
    if kernel.zeros is not None and (kernel.zeros.shape != scales.shape or kernel.zeros.dtype != jnp.int8):
        raise ValueError(f"grouped_matmul: zeros are {kernel.zeros.dtype}{kernel.zeros.shape}, not int8{scales.shape}")
    expected = units is not None and (experts, width // (form.group * max(1, form.supers)), channels)
    for name in ("scale_units", "minima_units"):
        part, is_needed = kernel.parts.get(name), bool(expected) and (name == "scale_units" or minima is not None)
        if (part is not None) != is_needed or (part is not None and (part.shape, part.dtype) != (expected, jnp.int16)):
            raise ValueError(f"grouped_matmul: {name} are not those of scales {scales.shape}, as bits of float16")
    if (len(kernel.levels) == LEVELS_OF_FOUR_BITS) != (kind == LEVELS):
        raise ValueError(f"grouped_matmul: codes of {kind} have {len(kernel.levels)} levels")


def widened(kernel: Codes) -> jax.Array:
    """Return the weights ``[E, F, D]`` in float32."""
    codes, scales, minima, kind, offset = kernel[:5]
    if kind == FLOAT8:
        levels = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    elif kind == FLOAT4:
        sizes = jnp.asarray((0, 0.5, 1, 1.5, 2, 3, 4, 6), jnp.float32)
        bits = codes.astype(jnp.int32)
        levels = jnp.where(bits & 8, -sizes[bits & 7], sizes[bits & 7])
    elif kind == LEVELS:
        levels = jnp.asarray(kernel.levels, jnp.bfloat16).astype(jnp.float32)[codes.astype(jnp.int32)]
    else:
        levels = codes.astype(jnp.float32) - offset
    if kernel.lies_by_rows:
        return levels * scales[..., None]

    def spread(part: Any, units: Any = None) -> jax.Array:
        found = as_float32(part) if units is None else in_units(part, units)
        return jnp.repeat(found, levels.shape[1] // part.shape[1], axis=1)

    levels = levels if kernel.zeros is None else levels - spread(kernel.zeros)
    weights = levels * spread(scales, kernel.scale_units)
    return jnp.swapaxes(weights if minima is None else weights + spread(minima, kernel.minima_units), 1, 2)


def in_units(numbers: jax.Array, units: jax.Array) -> jax.Array:
    """Return scales or minima ``[..., G, F]``, which are integers, times their units ``[..., U, F]``, in float32."""
    *lead, groups, channels = numbers.shape
    shape = *lead, units.shape[-2], groups // units.shape[-2], channels
    spread = jnp.broadcast_to(as_float32(units)[..., None, :], shape)
    return numbers.astype(jnp.float32) * spread.reshape(numbers.shape)


def as_float32(numbers: jax.Array) -> jax.Array:
    """Return scales, minima, zeros or units in float32: the chip knows neither float16 nor bytes of exponents."""
    if numbers.dtype in (jnp.float32, jnp.int8):
        return numbers.astype(jnp.float32)
    bits = numbers.astype(jnp.int32)
    if numbers.dtype == jnp.uint8:
        powers = jnp.where(bits == 0, _LEAST_POWER_BITS, bits << _EXPONENT_BITS)
        return lax.bitcast_convert_type(powers, jnp.float32)
    size = bits & 0x7FFF
    normal = lax.bitcast_convert_type((size << 13) + (112 << 23), jnp.float32)
    found = jnp.where(size < 0x400, size.astype(jnp.float32) * 2.0**-24, normal)
    return jnp.where(bits < 0, -found, found)
