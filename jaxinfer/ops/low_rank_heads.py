"""Low-rank pairs of a row's own between heads and what they share, of which one matrix is each head's.

Such pairs belong to the matrices that latent attention's heads have (`jaxinfer.models.latent_attention`): one half of a
pair is shared by the heads, as the rows of its cache are. Where there are kernels, each reads the pairs of rows and
heads as if these were rows of a larger batch (`jaxinfer.ops.low_rank`).
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import TENSOR, Array, Float, Int
from jaxinfer.ops import low_rank
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import even_axis, row_axes
from jaxinfer.ops.layer_view import LayerView

# Of N heads and A adapters ``[N, A, R, F]``, or ``[A, R, F]`` for all heads; of one layer or of all.
Stack = Array | LayerView


def add_pairs(
    base_BTNO: Float[Array, "B T N O"],
    heads_BTNI: Float[Array, "B T N I"],
    down: Stack,
    up: Stack,
    ids_B: Int[Array, " B"],
    backend: Backend,
) -> Float[Array, "B T N O"]:
    """Return the base plus ``up down x`` of each row's pair for each head; rows of a negative id keep their bits.

    One of the two stacks is of heads.
    """
    num_heads, alone = heads_BTNI.shape[2], replace(backend, mesh=None)
    lead, axis = row_axes(heads_BTNI.shape[:2], backend), even_axis(TENSOR, num_heads, backend)

    def run(base: Any, heads: Any, ids: Any, down: Any, up: Any) -> Any:
        return _add_up(base, _project_down(heads, down, ids, alone), up, ids, alone)

    def spec(stack: Stack) -> Any:
        split = PartitionSpec(axis, None, None, None) if _is_of_heads(stack) else PartitionSpec(None, None, None)
        return low_rank.stack_spec(stack, split)

    of_heads = PartitionSpec(*lead, axis, None)
    parts = of_heads, of_heads, PartitionSpec(lead[0]), spec(down), spec(up)
    return backend.on_devices(run, parts, of_heads)(base_BTNO, heads_BTNI, ids_B, down, up)


def _project_down(heads_BTNI: Any, stack: Stack, ids_B: Any, backend: Backend) -> Any:
    batch, tokens, num_heads, width = heads_BTNI.shape
    if not _is_of_heads(stack):
        rows = heads_BTNI.reshape(batch, tokens * num_heads, width)
        return low_rank.project_down(rows, [stack], ids_B, backend)[0].reshape(batch, tokens, num_heads, -1)
    rows, joined = _as_rows(heads_BTNI), low_rank.joined(stack)
    if low_rank.has_kernels(rows.shape, [joined], backend):
        (found,) = low_rank.project_down(rows, [joined], _ids_of_heads(ids_B, stack), backend)
        return _as_heads(found, batch)
    every_NBTAR = _by_head(heads_BTNI, stack, ((3,), (3,)), backend)
    is_own_BA = ids_B[:, None] == jnp.arange(stack.shape[1])
    found_NBTR = jnp.where(is_own_BA[:, None, :, None], every_NBTAR, 0).sum(axis=3)
    return jnp.moveaxis(found_NBTR, 0, 2)


def _add_up(base_BTNO: Any, inner_BTNR: Any, stack: Stack, ids_B: Any, backend: Backend) -> Any:
    batch, tokens, num_heads, _ = base_BTNO.shape
    if not _is_of_heads(stack):
        base, inner = (each.reshape(batch, tokens * num_heads, -1) for each in (base_BTNO, inner_BTNR))
        return low_rank.add_up(base, inner, stack, ids_B, backend).reshape(base_BTNO.shape)
    rows, joined = _as_rows(inner_BTNR), low_rank.joined(stack)
    if low_rank.has_kernels(rows.shape, [joined], backend):
        found = low_rank.add_up(_as_rows(base_BTNO), rows, joined, _ids_of_heads(ids_B, stack), backend)
        return _as_heads(found, batch)
    # Numbers of other adapters become zero before all are multiplied at once, as outputs of each would be large.
    is_own_BA = ids_B[:, None] == jnp.arange(stack.shape[1])
    own_BTNAR = jnp.where(is_own_BA[:, None, None, :, None], inner_BTNR[:, :, :, None], 0)
    added_NBTO = _by_head(own_BTNAR, stack, ((3, 4), (1, 2)), backend)
    summed_BTNO = (base_BTNO + jnp.moveaxis(added_NBTO, 0, 2)).astype(base_BTNO.dtype)
    return jnp.where((ids_B < 0)[:, None, None, None], base_BTNO, summed_BTNO)


def _by_head(heads_BTNF: Any, stack: Stack, summed: Any, backend: Backend) -> Any:
    """Return the products of each head with its matrices, summed over these axes, ``[N, B, T, ...]``."""
    stack_NARF = stack.whole() if isinstance(stack, LayerView) else stack
    wide = jnp.promote_types(stack_NARF.dtype, jnp.float32)
    return lax.dot_general(
        heads_BTNF.astype(stack_NARF.dtype),
        stack_NARF,
        (summed, ((2,), (0,))),
        precision=backend.precision,
        preferred_element_type=wide,
    )


def _is_of_heads(stack: Stack) -> bool:
    return len(stack.shape) == 4


def _ids_of_heads(ids_B: Any, stack: Stack) -> Any:
    """Return the numbers among joined matrices for each row and head."""
    num_heads, adapters = stack.shape[:2]
    ids_BN = ids_B[:, None] + adapters * jnp.arange(num_heads, dtype=ids_B.dtype)
    return jnp.where(ids_B[:, None] < 0, -1, ids_BN).reshape(-1)


def _as_rows(heads_BTNF: Any) -> Any:
    batch, tokens, num_heads, width = heads_BTNF.shape
    return jnp.moveaxis(heads_BTNF, 2, 1).reshape(batch * num_heads, tokens, width)


def _as_heads(rows: Any, batch: int) -> Any:
    return jnp.moveaxis(rows.reshape(batch, -1, *rows.shape[1:]), 1, 2)
