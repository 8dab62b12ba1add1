"""JAX's own grouped product, megablox, for comparison: it multiplies by one kernel at a time."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp


def one_by_megablox(rows, kernel, *, sizes: Sequence[int], tile_m: int, tile_k: int, tile_n: int):
    """Multiply rows, sorted by expert and without gaps, of which each expert has a number."""
    return _gmm(rows, kernel, sizes, jnp.float32, (tile_m, tile_k, tile_n))


def gate_and_up_by_megablox(rows, gate, up, *, sizes: Sequence[int], tile_m: int, tile_k: int, tile_n: int):
    """Multiply by each of two kernels and bring the products together."""
    tiling = tile_m, tile_k, tile_n
    gate, up = (_gmm(rows, kernel, sizes, jnp.bfloat16, tiling).astype(jnp.float32) for kernel in (gate, up))
    return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)


def _gmm(rows: Any, kernel: Any, sizes: Sequence[int], dtype: Any, tiling: tuple[int, int, int]) -> Any:
    """Call megablox with lists of steps that are constants: a schedule is read only of kernels with known ones."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    listed = module.make_group_metadata

    def as_constants(**options: Any) -> Any:
        with jax.ensure_compile_time_eval():
            known = {"group_sizes": jnp.asarray(sizes, jnp.int32), "start_group": jnp.int32(0)}
            return listed(**(options | known))

    with mock.patch.object(module, "make_group_metadata", as_constants):
        multiply = functools.partial(module.gmm.__wrapped__, transpose_rhs=True, tiling=tiling)
        return multiply(rows, kernel, jnp.asarray(sizes, jnp.int32), dtype)
