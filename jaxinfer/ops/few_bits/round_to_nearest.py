"""Quantizes weights by rounding each to the nearest level of its group."""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.few_bits.formats import RUN, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray

_MOST_BYTE = 127


@functools.partial(jax.jit, static_argnums=1)
def round_to_nearest(weights: Float[Array, "*shape"], form: Format) -> QuantizedArray:
    """Return weights ``[..., N, K]`` in a form; `Format.check_width` says which K fit.

    Scales and minima are rounded to their dtype first, and codes are the nearest for these. A group's largest weight
    without its sign is the lowest level if levels are signed and 4 bits; minima are the group's smallest weight.
    """
    weights = weights.astype(jnp.float32)
    *lead, width = weights.shape
    groups = weights.reshape(*lead, form.groups(width), -1)
    least, most = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)
    farthest = jnp.where(-least > most, least, most)
    minima = None
    if form.has_minima:
        scales, minima = (most - least) / (form.levels[-1] - form.levels[0]), least.astype(form.scale_dtype)
        groups = groups - minima.astype(jnp.float32)[..., None]
    elif form.bits == 8:
        scales = jnp.abs(farthest) / _MOST_BYTE
    else:
        scales = farthest / form.levels[0]
    scales = scales.astype(form.scale_dtype)
    divisors = scales.astype(jnp.float32)
    divisors = jnp.where(divisors == 0, 1, divisors)
    ratios = groups / divisors[..., None]
    if form.bits == 8:
        codes = jnp.clip(jnp.round(ratios), -_MOST_BYTE, _MOST_BYTE).astype(jnp.int8).reshape(weights.shape)
        return QuantizedArray(codes, scales, minima, form)
    between = [(one + other) / 2 for one, other in itertools.pairwise(form.levels)]
    codes = functools.reduce(operator.add, ((ratios > each).astype(jnp.uint8) for each in between))
    runs = codes.reshape(*lead, -1, RUN)
    packed = runs[..., : RUN // 2] | (runs[..., RUN // 2 :] << 4)
    return QuantizedArray(packed.reshape(*lead, -1), scales, minima, form)
