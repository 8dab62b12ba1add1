"""Coordinate descent on codes and scales, so that products change less than one pass of GPTQ leaves (2309.01885)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import nearest_codes, pack_codes, values_of
from jaxinfer.quantization.awq import quantize_clipped
from jaxinfer.quantization.gptq import quantize_by_gptq

# How often the inputs are gone through: more sweeps change the last percent.
_SWEEPS = 3
_DAMPING = 0.01
_HIGHEST = jax.lax.Precision.HIGHEST


def quantize_with_descent(
    weights_NK: Float[Array, "N K"], squares_KK: Float[Array, "K K"], form: Format
) -> QuantizedArray:
    """Return weights in a form by GPTQ, with the scales and minima that products ask for, and descent after it.

    Each group is cut where that makes its products change least, as AWQ does; descent from there gives scales and
    minima, GPTQ all codes anew, and descent from these the array. ``squares_KK`` is the mean of ``x x^T`` over the
    inputs seen.
    """
    cut = descend(weights_NK, squares_KK, quantize_clipped(weights_NK, squares_KK, form))
    chosen = quantize_by_gptq(weights_NK, squares_KK, form, fitted=(cut.scales, cut.minima))
    return descend(weights_NK, squares_KK, chosen)


@jax.jit
def descend(weights_NK: Float[Array, "N K"], squares_KK: Float[Array, "K K"], begun: QuantizedArray) -> QuantizedArray:
    """Return the array, of 4 or 8 bits, after changes that bring its products nearer to those of the weights.

    What is made smaller is the sum of ``e squares e^T`` over the rows' errors ``e``, with a hundredth of the mean of
    its diagonal added to ``squares_KK``. A sweep goes through the groups: each input of a group takes the code that is
    best with all others as they are, and then the group takes the scale and the minimum that are best with its codes.
    No step makes the sum larger.
    """
    form, width = begun.form, weights_NK.shape[1]
    group = form.group or width
    mean = jnp.mean(jnp.diagonal(squares_KK))
    squares_KK = squares_KK + jnp.where(mean == 0, 1.0, _DAMPING * mean) * jnp.eye(width, dtype=squares_KK.dtype)

    def visit(step: Any, carry: Any) -> Any:
        codes_NK, scales_NG, minima_NG, pulls_NK = carry
        place = step % (width // group)
        start = place * group
        codes_NW, pulls_NW = (jax.lax.dynamic_slice_in_dim(each, start, group, axis=1) for each in (codes_NK, pulls_NK))
        rows_WK = jax.lax.dynamic_slice_in_dim(squares_KK, start, group, axis=0)
        own_WW = jax.lax.dynamic_slice_in_dim(rows_WK, start, group, axis=1)
        scales_N1, minima_N1 = _each(
            lambda part: jax.lax.dynamic_slice_in_dim(part, place, 1, axis=1), scales_NG, minima_NG
        )
        before_NW = values_of(codes_NW, scales_N1, minima_N1, form)

        def move(at: Any, carry: Any) -> Any:
            codes_NW, pulls_NW = carry
            code_N1, pull_N1 = (jax.lax.dynamic_slice_in_dim(each, at, 1, axis=1) for each in (codes_NW, pulls_NW))
            old_N1 = values_of(code_N1, scales_N1, minima_N1, form)
            best_N1 = nearest_codes(old_N1 + pull_N1 / own_WW[at, at], scales_N1, minima_N1, form)
            moved_N1 = values_of(best_N1, scales_N1, minima_N1, form) - old_N1
            codes_NW = jax.lax.dynamic_update_slice_in_dim(codes_NW, best_N1, at, axis=1)
            return codes_NW, pulls_NW - moved_N1 * own_WW[at]

        codes_NW, pulls_NW = jax.lax.fori_loop(0, group, move, (codes_NW, pulls_NW))
        scales_N1, minima_N1 = _refit(_levels(codes_NW, form), pulls_NW, own_WW, scales_N1, minima_N1)
        moved_NW = values_of(codes_NW, scales_N1, minima_N1, form) - before_NW
        pulls_NK = pulls_NK - jnp.matmul(moved_NW, rows_WK, precision=_HIGHEST)
        codes_NK = jax.lax.dynamic_update_slice_in_dim(codes_NK, codes_NW, start, axis=1)
        scales_NG = jax.lax.dynamic_update_slice_in_dim(scales_NG, scales_N1, place, axis=1)
        if minima_NG is not None:
            minima_NG = jax.lax.dynamic_update_slice_in_dim(minima_NG, minima_N1, place, axis=1)
        return codes_NK, scales_NG, minima_NG, pulls_NK

    codes_NK = begun.codes if form.bits == 8 else begun.unpacked()
    missed_NK = weights_NK.astype(jnp.float32) - begun.dequantize()
    carry = codes_NK, begun.scales, begun.minima, jnp.matmul(missed_NK, squares_KK, precision=_HIGHEST)
    codes_NK, scales_NG, minima_NG, _ = jax.lax.fori_loop(0, _SWEEPS * (width // group), visit, carry)
    return pack_codes(codes_NK, scales_NG, minima_NG, form)


def _each(change: Any, scales: Array, minima: Array | None) -> tuple[Array, Array | None]:
    return change(scales), None if minima is None else change(minima)


def _levels(codes: Array, form: Format) -> Array:
    """Return the levels that codes stand for, in float32."""
    return values_of(codes, jnp.ones((1, 1)), None, form)


def _refit(
    levels_NW: Float[Array, "N W"],
    pulls_NW: Float[Array, "N W"],
    own_WW: Float[Array, "W W"],
    scales_N1: Array,
    minima_N1: Array | None,
) -> tuple[Array, Array | None]:
    """Return the scales and minima that are best with these codes, in their dtype, where they are better at all."""
    basis = [levels_NW] if minima_N1 is None else [levels_NW, jnp.ones_like(levels_NW)]
    old = [scales_N1] if minima_N1 is None else [scales_N1, minima_N1]
    slopes = [jnp.sum(each * pulls_NW, axis=1) for each in basis]
    spread = [jnp.matmul(each, own_WW, precision=_HIGHEST) for each in basis]
    curves = [[jnp.sum(one * other, axis=1) for other in spread] for one in basis]
    if minima_N1 is None:
        steps = [slopes[0] / curves[0][0]]
    else:
        determinant = curves[0][0] * curves[1][1] - curves[0][1] ** 2
        steps = [
            (slopes[0] * curves[1][1] - slopes[1] * curves[0][1]) / determinant,
            (slopes[1] * curves[0][0] - slopes[0] * curves[0][1]) / determinant,
        ]
    new = [(each.astype(jnp.float32) + step[:, None]).astype(each.dtype) for each, step in zip(old, steps)]
    # As they are rounded; what is no number is not better.
    taken = [(one.astype(jnp.float32) - other.astype(jnp.float32))[:, 0] for one, other in zip(new, old)]
    gain_N = 2 * sum(step * slope for step, slope in zip(taken, slopes))
    cost_N = sum(one * two * curve for one, row in zip(taken, curves) for two, curve in zip(taken, row))
    kept = [jnp.where((gain_N > cost_N)[:, None], one, other) for one, other in zip(new, old)]
    return kept[0], None if minima_N1 is None else kept[1]
