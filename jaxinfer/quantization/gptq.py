"""GPTQ: weights are rounded one input at a time, and those that are left make up for the error (2210.17323)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import fit_groups, nearest_codes, pack_codes, values_of

# Inputs whose errors are passed on at once to all that come after.
_BLOCK = 128


@functools.partial(jax.jit, static_argnames=("form", "damping", "by_size"))
def quantize_by_gptq(
    weights_NK: Float[Array, "N K"],
    squares_KK: Float[Array, "K K"],
    form: Format,
    damping: float = 0.01,
    by_size: bool = True,
    fitted: tuple[Array, Array | None] | None = None,
) -> QuantizedArray:
    """Return weights in a form, so that products with inputs like those seen change little.

    ``squares_KK`` is the mean of ``x x^T`` over the inputs seen. ``damping``, a part of the mean of its diagonal, is
    added to it. With ``by_size`` inputs go from the largest to the smallest ("act-order"), and each group's scale is
    that of the weights as they were ("static groups"), so that groups stay where they are; otherwise in their order,
    and a group's scale is that of its weights once errors were passed on to them. ``fitted`` are scales and minima,
    ``[N, G]``, that are taken instead of both.
    """
    num_outputs, width = weights_NK.shape
    group = form.group or width
    sizes_K = jnp.diagonal(squares_KK)
    weights_NK, squares_KK = without_dead(weights_NK, squares_KK, damping)
    groups_K = jnp.arange(width) // group
    if fitted is not None:
        scales_NG, minima_NG = fitted
    elif by_size or form.group is None:
        scales_NG, minima_NG = fit_groups(weights_NK.reshape(num_outputs, -1, group), form)
    else:
        shape = num_outputs, width // group
        scales_NG, minima_NG = (jnp.zeros(shape, form.scale_dtype) for _ in range(2))
    order_K = jnp.argsort(-sizes_K) if by_size else jnp.arange(width)
    weights_NK, groups_K = weights_NK[:, order_K], groups_K[order_K]
    passed_KK = passed_on(squares_KK[order_K][:, order_K])
    block = block_of(width, group if not by_size and form.group else 1)
    fits_here = not by_size and form.group is not None and fitted is None

    def round_block(index: Any, carry: Any) -> Any:
        weights_NK, codes_NK, scales_NG, minima_NG = carry
        start = index * block
        part_NJ = jax.lax.dynamic_slice_in_dim(weights_NK, start, block, axis=1)
        rows_JK = jax.lax.dynamic_slice_in_dim(passed_KK, start, block, axis=0)
        own_JJ = jax.lax.dynamic_slice_in_dim(rows_JK, start, block, axis=1)
        own_groups_J = jax.lax.dynamic_slice_in_dim(groups_K, start, block)

        def round_one(at: Any, carry: Any) -> Any:
            part_NJ, errors_NJ, codes_NJ, scales_NG, minima_NG = carry
            own = own_groups_J[at]
            values_N, scale_N = part_NJ[:, at], scales_NG[:, own]
            minimum_N = minima_NG[:, own] if form.has_minima else None
            codes_N = nearest_codes(values_N, scale_N, minimum_N, form)
            error_N = (values_N - values_of(codes_N, scale_N, minimum_N, form)) / own_JJ[at, at]
            part_NJ = part_NJ - error_N[:, None] * own_JJ[at]
            return part_NJ, errors_NJ.at[:, at].set(error_N), codes_NJ.at[:, at].set(codes_N), scales_NG, minima_NG

        codes_NJ = jnp.zeros(part_NJ.shape, codes_NK.dtype)
        state = part_NJ, jnp.zeros_like(part_NJ), codes_NJ, scales_NG, minima_NG
        for first in range(0, block, group) if fits_here else (0,):
            past = first + group if fits_here else block
            if fits_here:
                part_NJ, errors_NJ, codes_NJ, scales_NG, minima_NG = state
                scales_N1, minima_N1 = fit_groups(part_NJ[:, None, first:past], form)
                place = start // group + first // group
                scales_NG = jax.lax.dynamic_update_slice_in_dim(scales_NG, scales_N1, place, axis=1)
                if minima_N1 is not None:
                    minima_NG = jax.lax.dynamic_update_slice_in_dim(minima_NG, minima_N1, place, axis=1)
                state = part_NJ, errors_NJ, codes_NJ, scales_NG, minima_NG
            state = jax.lax.fori_loop(first, past, round_one, state)
        _, errors_NJ, codes_NJ, scales_NG, minima_NG = state
        is_after_K = jnp.arange(width) >= start + block
        passed_NK = jnp.matmul(errors_NJ, rows_JK, precision=jax.lax.Precision.HIGHEST)
        weights_NK = weights_NK - jnp.where(is_after_K, passed_NK, 0.0)
        codes_NK = jax.lax.dynamic_update_slice_in_dim(codes_NK, codes_NJ, start, axis=1)
        return weights_NK, codes_NK, scales_NG, minima_NG

    codes_NK = jnp.zeros(weights_NK.shape, jnp.int8 if form.bits == 8 else jnp.uint8)
    if minima_NG is None:
        minima_NG = jnp.zeros_like(scales_NG)
    carry = weights_NK, codes_NK, scales_NG, minima_NG
    _, codes_NK, scales_NG, minima_NG = jax.lax.fori_loop(0, width // block, round_block, carry)
    codes_NK = codes_NK[:, jnp.argsort(order_K)]
    return pack_codes(codes_NK, scales_NG, minima_NG if form.has_minima else None, form)


def without_dead(
    weights_NK: Float[Array, "N K"], squares_KK: Float[Array, "K K"], damping: float
) -> tuple[Float[Array, "N K"], Float[Array, "K K"]]:
    """Return weights in float32, zero for inputs that were always zero, and squares that have an inverse.

    ``damping``, a part of the mean of their diagonal, is added to the squares.
    """
    sizes_K = jnp.diagonal(squares_KK)
    is_dead_K = sizes_K == 0
    weights_NK = jnp.where(is_dead_K, 0.0, weights_NK.astype(jnp.float32))
    return weights_NK, squares_KK + jnp.diag(jnp.where(is_dead_K, 1.0, 0.0) + damping * jnp.mean(sizes_K))


def passed_on(squares_KK: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """Return the upper Cholesky factor of the inverse: row i says what an error at input i does to those after it."""
    factor = jnp.linalg.cholesky(squares_KK)
    inverse = jax.scipy.linalg.cho_solve((factor, True), jnp.eye(len(squares_KK), dtype=squares_KK.dtype))
    return jnp.linalg.cholesky((inverse + inverse.T) / 2).T


def block_of(width: int, unit: int) -> int:
    """Return the most inputs of a block: whole units that divide the width."""
    return max(size for size in range(unit, max(_BLOCK, unit) + 1, unit) if width % size == 0)
