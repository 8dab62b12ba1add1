"""Quantizes weights by rounding each to the nearest level of its group."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float, Integer
from jaxinfer.ops.few_bits.formats import FP4, MOST_EXPONENT, RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, powers_of
from jaxinfer.ops.few_bits.sparse import compacted, largest

_MOST_BYTE = 127
# The exponent of the largest level of 4-bit floats, which is that of the largest weight of a group.
_LARGEST_EXPONENT = 2
# Of weights whose scales are not finite.
TOO_LARGE = "too large for scales in float16: use int8, whose scales of rows are float32"
# The exponent, in float32, of what is no finite number.
_NO_NUMBER = 255


@functools.partial(jax.jit, static_argnums=1)
def round_to_nearest(weights: Float[Array, "*shape"], form: Format) -> QuantizedArray:
    """Return weights ``[..., N, K]`` in a form; `Format.check_width` says which K fit.

    A sparse form keeps the largest, or the blocks with the largest sums of squares.
    Of a stack of matrices one after the other is rounded, so that one is in memory in float32.
    """
    if weights.ndim > 2:
        return jax.lax.map(lambda matrix: round_to_nearest(matrix, form), weights)
    if form.kept is not None:
        return keep(weights, largest(jnp.square(weights.astype(jnp.float32)), form), form)
    *lead, width = weights.shape
    groups = weights.astype(jnp.float32).reshape(*lead, form.groups(width), -1)
    scales, minima = fit_groups(groups, form)
    codes = nearest_codes(groups, scales[..., None], None if minima is None else minima[..., None], form)
    return pack_codes(codes.reshape(weights.shape), scales, minima, form)


@jax.jit
def are_finite(weights: Float[Array, "*shape"]) -> Bool[Array, ""]:
    """Return whether all weights are finite numbers. A compiled minimum or maximum leaves out what is no number."""
    # Infinity times zero is no number either; on a CPU a sum takes a fifth of the time of a test of each.
    return jnp.isfinite(jnp.sum(weights * jnp.zeros((), weights.dtype)))


@functools.partial(jax.jit, static_argnums=1)
def fits_scales(weights: Float[Array, "*shape"], form: Format) -> Bool[Array, ""]:
    """Return whether scales and minima of a form hold finite weights ``[..., N, K]``: in float16 not the largest."""
    if form.kept is not None:
        return jnp.ones((), bool)
    *lead, width = weights.shape
    found = fit_groups(weights.astype(jnp.float32).reshape(*lead, form.groups(width), -1), form)
    return _are_finite_scales(*found)


def has_finite_scales(array: QuantizedArray) -> Bool[Array, ""]:
    """Return whether what finite weights were rounded to has finite scales and minima."""
    if array.form.kept is not None:
        return jnp.ones((), bool)
    return _are_finite_scales(array.scales, array.minima)


def _are_finite_scales(scales: Array, minima: Array | None) -> Bool[Array, ""]:
    each = [_floats(scales), *(() if minima is None else (minima,))]
    return jnp.stack([jnp.isfinite(values).all() for values in each]).all()


def nearest_values(weights: Float[Array, "*shape"], form: Format) -> Float[Array, "*shape"]:
    """Return the weights that `round_to_nearest` makes of some, in float32."""
    if form.kept is not None:
        return round_to_nearest(weights, form).dequantize()
    *lead, width = weights.shape
    groups = weights.astype(jnp.float32).reshape(*lead, form.groups(width), -1)
    scales, minima = fit_groups(groups, form)
    scales, minima = scales[..., None], None if minima is None else minima[..., None]
    return values_of(nearest_codes(groups, scales, minima, form), scales, minima, form).reshape(weights.shape)


def fit_groups(groups: Float[Array, "*lead G W"], form: Format) -> tuple[Array, Array | None]:
    """Return the scale and the minimum of each group of W weights, ``[..., G]``, in their dtype.

    A group's weight that is farthest from zero is the lowest level, or the lowest or the highest if these are
    opposites; minima are the group's smallest weight, and None where the form has none.
    """
    least, most = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
    if form.scale_dtype == "uint8":
        bits = jax.lax.bitcast_convert_type(jnp.maximum(-least, most), jnp.uint32)
        exponents = (bits >> 23 & _NO_NUMBER).astype(jnp.int32)
        powers = jnp.clip(exponents - _LARGEST_EXPONENT, 0, MOST_EXPONENT)
        return jnp.where(exponents == _NO_NUMBER, _NO_NUMBER, powers).astype(jnp.uint8), None
    farthest = jnp.where(-least > most, least, most)
    minima = None
    if form.has_minima:
        scales, minima = (most - least) / (form.levels[-1] - form.levels[0]), least.astype(form.scale_dtype)
    elif form.levels and min(form.levels) != -max(form.levels):
        scales = farthest / min(form.levels)
    else:
        scales = jnp.abs(farthest) / (max(form.levels) if form.levels else _MOST_BYTE)
    return scales.astype(form.scale_dtype), minima


def nearest_codes(values: Float[Array, "*shape"], scales: Array, minima: Array | None, form: Format) -> Array:
    """Return the codes of the nearest levels, uint8 or, of 8 bits, int8; scales and minima are broadcast."""
    if minima is not None:
        values = values - minima.astype(jnp.float32)
    divisors = _floats(scales)
    ratios = values / jnp.where(divisors == 0, 1, divisors)
    if form.bits == 8 and form.levels:
        # A ratio that a rounded scale makes larger than the largest level would be no number.
        floats = jnp.clip(ratios, -max(form.levels), max(form.levels)).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(floats, jnp.int8)
    if form.bits == 8:
        return jnp.clip(jnp.round(ratios), -_MOST_BYTE, _MOST_BYTE).astype(jnp.int8)
    if form.levels == FP4:  # a sign and a size
        sizes = _count_below(jnp.abs(ratios), form.levels[: len(FP4) // 2])
        return jnp.where(ratios < 0, sizes + jnp.uint8(len(FP4) // 2), sizes)
    return _count_below(ratios, form.levels)


def _count_below(ratios: Float[Array, "*shape"], levels: tuple[float, ...]) -> Array:
    """Return which of ascending levels is the nearest."""
    between = [(one + other) / 2 for one, other in itertools.pairwise(levels)]
    return functools.reduce(operator.add, ((ratios > each).astype(jnp.uint8) for each in between))


def _floats(scales: Array) -> Array:
    return powers_of(scales) if scales.dtype == jnp.uint8 else scales.astype(jnp.float32)


def values_of(
    codes: Integer[Array, "*shape"], scales: Array, minima: Array | None, form: Format
) -> Float[Array, "*shape"]:
    """Return the weights that codes stand for, in float32; scales and minima are broadcast."""
    table = jnp.asarray(form.levels, jnp.float32)
    levels = table[codes.astype(jnp.int32) & 255] if form.levels else codes.astype(jnp.float32)
    values = levels * _floats(scales)
    return values if minima is None else values + minima.astype(jnp.float32)


def pack_codes(codes: Integer[Array, "*lead K"], scales: Array, minima: Array | None, form: Format) -> QuantizedArray:
    """Return the array that has these codes, one for each weight."""
    if form.bits == 8:
        return QuantizedArray(codes, scales, minima, form)
    runs = codes.reshape(*codes.shape[:-1], -1, RUN)
    packed = runs[..., : RUN // 2] | (runs[..., RUN // 2 :] << 4)
    return QuantizedArray(packed.reshape(*codes.shape[:-1], -1), scales, minima, form)


def keep(weights: Float[Array, "N K"], is_kept: Bool[Array, "N K"], form: Format) -> QuantizedArray:
    """Return the sparse array that has the weights that are kept: as many of each row as its form says."""
    return QuantizedArray.of(form, compacted(weights, is_kept, form))
