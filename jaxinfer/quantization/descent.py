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

    def values(codes: Array, parts: list[Array]) -> Array:
        return values_of(codes, parts[0], parts[1] if len(parts) > 1 else None, form)

    def visit(step: Any, carry: Any) -> Any:
        codes_NK, parts, pulls_NK = carry
        place = step % (width // group)
        start = place * group
        codes_NW, pulls_NW = (jax.lax.dynamic_slice_in_dim(each, start, group, axis=1) for each in (codes_NK, pulls_NK))
        rows_WK = jax.lax.dynamic_slice_in_dim(squares_KK, start, group, axis=0)
        own_WW = jax.lax.dynamic_slice_in_dim(rows_WK, start, group, axis=1)
        own = [jax.lax.dynamic_slice_in_dim(part, place, 1, axis=1) for part in parts]
        before_NW = values(codes_NW, own)

        def move(at: Any, carry: Any) -> Any:
            codes_NW, pulls_NW = carry
            code_N1, pull_N1 = (jax.lax.dynamic_slice_in_dim(each, at, 1, axis=1) for each in (codes_NW, pulls_NW))
            old_N1 = values(code_N1, own)
            best_N1 = nearest_codes(old_N1 + pull_N1 / own_WW[at, at], own[0], own[1] if len(own) > 1 else None, form)
            moved_N1 = values(best_N1, own) - old_N1
            codes_NW = jax.lax.dynamic_update_slice_in_dim(codes_NW, best_N1, at, axis=1)
            return codes_NW, pulls_NW - moved_N1 * own_WW[at]

        codes_NW, pulls_NW = jax.lax.fori_loop(0, group, move, (codes_NW, pulls_NW))
        own = _refit(values_of(codes_NW, jnp.ones((1, 1)), None, form), pulls_NW, own_WW, own)
        moved_NW = values(codes_NW, own) - before_NW
        pulls_NK = pulls_NK - jnp.matmul(moved_NW, rows_WK, precision=_HIGHEST)
        codes_NK = jax.lax.dynamic_update_slice_in_dim(codes_NK, codes_NW, start, axis=1)
        placed = (jax.lax.dynamic_update_slice_in_dim(part, one, place, axis=1) for part, one in zip(parts, own))
        return codes_NK, list(placed), pulls_NK

    codes_NK = begun.codes if form.bits == 8 else begun.unpacked()
    missed_NK = weights_NK.astype(jnp.float32) - begun.dequantize()
    parts = [begun.scales] if begun.minima is None else [begun.scales, begun.minima]
    carry = codes_NK, parts, jnp.matmul(missed_NK, squares_KK, precision=_HIGHEST)
    codes_NK, parts, _ = jax.lax.fori_loop(0, _SWEEPS * (width // group), visit, carry)
    return pack_codes(codes_NK, parts[0], parts[1] if len(parts) > 1 else None, form)


def _refit(
    levels_NW: Float[Array, "N W"], pulls_NW: Float[Array, "N W"], own_WW: Float[Array, "W W"], old: list[Array]
) -> list[Array]:
    """Return the scales, and minima, that are best with these codes, in their dtype, where they are better at all."""
    basis = [levels_NW, jnp.ones_like(levels_NW)][: len(old)]
    slopes_NP = jnp.stack([jnp.sum(each * pulls_NW, axis=1) for each in basis], axis=1)
    spread = [jnp.matmul(each, own_WW, precision=_HIGHEST) for each in basis]
    curves_NPP = jnp.stack(
        [jnp.stack([jnp.sum(one * other, axis=1) for other in spread], axis=1) for one in basis], axis=1
    )
    if len(old) == 1:
        steps_NP = slopes_NP / curves_NPP[:, 0]
    else:
        turned_NPP = jnp.stack(
            [
                jnp.stack([curves_NPP[:, 1, 1], -curves_NPP[:, 0, 1]], axis=1),
                jnp.stack([-curves_NPP[:, 0, 1], curves_NPP[:, 0, 0]], axis=1),
            ],
            axis=1,
        )
        determinants_N1 = (curves_NPP[:, 0, 0] * curves_NPP[:, 1, 1] - curves_NPP[:, 0, 1] ** 2)[:, None]
        steps_NP = jnp.sum(turned_NPP * slopes_NP[:, None], axis=2) / determinants_N1
    new = [(part.astype(jnp.float32) + steps_NP[:, [at]]).astype(part.dtype) for at, part in enumerate(old)]
    # What is gained by them as they are rounded; what is no number is not better.
    taken = [one.astype(jnp.float32) - other.astype(jnp.float32) for one, other in zip(new, old)]
    taken_NP = jnp.concatenate(taken, axis=1)
    gains_N = 2 * jnp.sum(taken_NP * slopes_NP, axis=1)
    costs_N = jnp.sum(taken_NP[:, :, None] * taken_NP[:, None] * curves_NPP, axis=(1, 2))
    return [jnp.where((gains_N > costs_N)[:, None], one, other) for one, other in zip(new, old)]
