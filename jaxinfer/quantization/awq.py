"""AWQ: large inputs are scaled up before weights are rounded, and what feeds them is scaled down (2306.00978)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import nearest_values, round_to_nearest

# Powers of the inputs' sizes that are tried, and by how much a group's largest weight is cut at most, in so many steps.
_POWERS, _STEPS, _MOST_CUT = 20, 10, 0.5
_LEAST_SIZE = 1e-4


@functools.partial(jax.jit, static_argnames="form")
def scales_for(
    kernels: Sequence[Float[Array, "... K"]], squares_KK: Float[Array, "K K"], sizes_K: Float[Array, " K"], form: Format
) -> Float[Array, " K"]:
    """Return the factor of each input that makes the products of rounded kernels, which share inputs, change least.

    ``squares_KK`` is the mean of ``x x^T`` over the inputs seen and ``sizes_K`` that of ``|x|``, a power of which the
    factors are. Of a stack of kernels one is rounded at a time.
    """

    def factors(power: Any) -> Array:
        raised_K = jnp.maximum(sizes_K, _LEAST_SIZE) ** power
        return raised_K / jnp.sqrt(jnp.max(raised_K) * jnp.min(raised_K))

    def error(power: Any) -> Array:
        factors_K, total = factors(power), jnp.zeros(())

        def missed(kernel: Array) -> Array:
            weights_NK = kernel.astype(jnp.float32)
            missed_NK = weights_NK - nearest_values(weights_NK * factors_K, form) / factors_K
            return jnp.sum(_times(missed_NK, squares_KK) * missed_NK)

        for kernel in kernels:
            total += missed(kernel) if kernel.ndim == 2 else jnp.sum(jax.lax.map(missed, kernel))
        return total

    powers = jnp.arange(_POWERS) / _POWERS
    return factors(powers[jnp.argmin(jax.lax.map(error, powers))])


@functools.partial(jax.jit, static_argnames="form")
def quantize_clipped(weights_NK: Float[Array, "N K"], squares_KK: Float[Array, "K K"], form: Format) -> QuantizedArray:
    """Return weights rounded to the nearest, each group cut where that makes its products change least."""
    num_outputs, width = weights_NK.shape
    num_groups = form.groups(width)
    groups_NGW = weights_NK.astype(jnp.float32).reshape(num_outputs, num_groups, -1)
    every = jnp.arange(num_groups)
    squares_GWW = squares_KK.reshape(num_groups, groups_NGW.shape[2], num_groups, -1)[every, :, every]
    most_NG1 = jnp.max(jnp.abs(groups_NGW), axis=-1, keepdims=True)

    def cut(bounds_NG1: Array) -> Array:
        return jnp.clip(groups_NGW, -bounds_NG1, bounds_NG1).reshape(weights_NK.shape)

    def tighten(step: Any, best: Any) -> Any:
        least_NG1, kept_NG1 = best
        bounds_NG1 = most_NG1 * (1 - step * _MOST_CUT / _STEPS)
        missed_NGW = groups_NGW - nearest_values(cut(bounds_NG1), form).reshape(groups_NGW.shape)
        products_NGW = jnp.einsum("ngw,gwv->ngv", missed_NGW, squares_GWW, precision=jax.lax.Precision.HIGHEST)
        errors_NG1 = jnp.sum(products_NGW * missed_NGW, axis=-1, keepdims=True)
        is_less = errors_NG1 < least_NG1
        return jnp.where(is_less, errors_NG1, least_NG1), jnp.where(is_less, bounds_NG1, kept_NG1)

    start = jnp.full_like(most_NG1, jnp.inf), most_NG1
    _, bounds_NG1 = jax.lax.fori_loop(0, _STEPS, tighten, start)
    return round_to_nearest(cut(bounds_NG1), form)


def _times(one: Array, other: Array) -> Array:
    return jnp.matmul(one, other, precision=jax.lax.Precision.HIGHEST)
