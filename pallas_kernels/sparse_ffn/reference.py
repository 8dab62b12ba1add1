"""The references of `sparse_ffn`, in plain JAX and float32: products with all weights, and a mask of blocks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sparse_ffn.blocks import UNITS, LiveBlocks


def live_inputs_reference(
    hidden_MF: jax.Array, kernel: jax.Array, blocks: LiveBlocks, *, layer: Any = None
) -> jax.Array:
    """Return ``hidden @ kernel.T`` over the listed blocks of inputs; arguments are those of `live_inputs`."""
    kernel_DF = kernel if layer is None else lax.dynamic_index_in_dim(kernel, layer, keepdims=False)
    listed_F = _listed(blocks, hidden_MF.shape[1])
    hidden_MF = jnp.where(listed_F, hidden_MF, 0)
    # Weights of other blocks may be anything.
    return _product(hidden_MF, jnp.where(listed_F, kernel_DF, 0))


def live_outputs_reference(x_MD: jax.Array, kernel: jax.Array, blocks: LiveBlocks, *, layer: Any = None) -> jax.Array:
    """Return ``x @ kernel.T`` for the listed blocks of outputs and zeros elsewhere, as `live_outputs`."""
    kernel_FD = kernel if layer is None else lax.dynamic_index_in_dim(kernel, layer, keepdims=False)
    return jnp.where(_listed(blocks, kernel_FD.shape[0]), _product(x_MD, kernel_FD), 0)


def _listed(blocks: LiveBlocks, units: int) -> jax.Array:
    index_I = blocks.index_I
    is_entry_I = jnp.arange(index_I.shape[0]) < blocks.count
    listed_X = jnp.any(is_entry_I & (index_I == jnp.arange(index_I.shape[0])[:, None]), axis=1)
    return jnp.repeat(listed_X, UNITS)[:units]


def _product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.dot(rows.astype(jnp.float32), kernel.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
