"""SparseGPT: weights that are left out are made up for by those that come after them in a row (2301.00774)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import keep
from jaxinfer.ops.few_bits.sparse import largest
from jaxinfer.quantization.gptq import block_of, passed_on, without_dead


@functools.partial(jax.jit, static_argnames=("form", "damping"))
def prune_by_sparsegpt(
    weights_NK: Float[Array, "N K"], squares_KK: Float[Array, "K K"], form: Format, damping: float = 0.01
) -> QuantizedArray:
    """Return weights in a sparse form, so that products with inputs like those seen change little.

    ``squares_KK`` is the mean of ``x x^T`` over the inputs seen; ``damping``, a part of the mean of its diagonal, is
    added to it. Inputs go in their order. Of each few those weights are kept whose loss would cost most, as they are
    once the errors before them were passed on. Blocks of a row are chosen before, by what the loss of each alone would
    cost if all other weights made up for it. Weights that are kept are rounded to bfloat16, and what that changes is
    passed on too.
    """
    assert form.kept is not None
    weights_NK, squares_KK = without_dead(weights_NK, squares_KK, damping)
    passed_KK = passed_on(squares_KK)
    width = weights_NK.shape[1]
    few = form.kept[1] if form.block == 1 else 1
    block = block_of(width, few)
    is_kept_NK = jnp.zeros(weights_NK.shape, bool) if form.block == 1 else _costly(weights_NK, passed_KK, form)

    def prune_block(index: Any, carry: Any) -> Any:
        weights_NK, is_kept_NK = carry
        start = index * block
        part_NJ, kept_NJ = (jax.lax.dynamic_slice_in_dim(each, start, block, axis=1) for each in carry)
        rows_JK = jax.lax.dynamic_slice_in_dim(passed_KK, start, block, axis=0)
        own_JJ = jax.lax.dynamic_slice_in_dim(rows_JK, start, block, axis=1)
        sizes_J = jnp.diagonal(own_JJ)

        def prune_few(which: Any, carry: Any) -> Any:
            part_NJ, errors_NJ, kept_NJ = carry
            first = which * few
            if form.block == 1:
                values, sizes = (jax.lax.dynamic_slice_in_dim(each, first, few, -1) for each in (part_NJ, sizes_J))
                kept_NJ = jax.lax.dynamic_update_slice_in_dim(
                    kept_NJ, largest(jnp.square(values / sizes), form), first, axis=1
                )
            for at in (first + step for step in range(few)):
                values_N = part_NJ[:, at]
                stored_N = jnp.where(kept_NJ[:, at], values_N.astype(jnp.bfloat16).astype(jnp.float32), 0.0)
                error_N = (values_N - stored_N) / sizes_J[at]
                changed_NJ = part_NJ - error_N[:, None] * own_JJ[at]
                # Weights before this one are done, and it is what is stored.
                part_NJ = jnp.where(jnp.arange(block) > at, changed_NJ, part_NJ).at[:, at].set(stored_N)
                errors_NJ = errors_NJ.at[:, at].set(error_N)
            return part_NJ, errors_NJ, kept_NJ

        state = part_NJ, jnp.zeros_like(part_NJ), kept_NJ
        part_NJ, errors_NJ, kept_NJ = jax.lax.fori_loop(0, block // few, prune_few, state)
        is_after_K = jnp.arange(width) >= start + block
        passed_NK = jnp.matmul(errors_NJ, rows_JK, precision=jax.lax.Precision.HIGHEST)
        weights_NK = weights_NK - jnp.where(is_after_K, passed_NK, 0.0)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=1)
            for whole, part in ((weights_NK, part_NJ), (is_kept_NK, kept_NJ))
        )

    weights_NK, is_kept_NK = jax.lax.fori_loop(0, width // block, prune_block, (weights_NK, is_kept_NK))
    return keep(weights_NK, is_kept_NK, form)


def _costly(weights_NK: Float[Array, "N K"], passed_KK: Float[Array, "K K"], form: Format) -> Bool[Array, "N K"]:
    """Return which weights are in the blocks whose loss alone would change products most.

    The loss of a block w costs ``w^T C^-1 w``, where C is its part of the inverse of the squares.
    """
    width, highest = passed_KK.shape[0], jax.lax.Precision.HIGHEST
    columns = passed_KK.reshape(width, -1, form.block)
    inverses = jnp.linalg.inv(jnp.einsum("kbi,kbj->bij", columns, columns, precision=highest))
    blocks = weights_NK.reshape(len(weights_NK), -1, form.block)
    costs = jnp.einsum("nbi,bij,nbj->nb", blocks, inverses, blocks, precision=highest)
    # The costs of blocks, one for each of its weights.
    return largest(jnp.repeat(costs, form.block, axis=-1), form)
