"""The cost of a run before it starts: parameters, memory and floating-point operations of a step."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def estimate(
    step: Callable[..., Any], state: Any, frozen: Any, batch: Any, num_steps: int, operations: float | None = None
) -> list[str]:
    """Return lines on the cost of a step, by the compiler's own count; nothing runs.

    Compilers count a loop's body once. So ``batch`` should have one microbatch, and if layers are scanned, give
    ``operations``.
    """
    abstract = jax.tree.map(_describe, (state, frozen, batch))
    compiled = jax.jit(step, donate_argnums=0).lower(*abstract).compile()
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    flops = float(costs.get("flops", 0.0)) if operations is None else operations
    trained, held = _count(state.params), _count(frozen)
    lines = [
        f"parameters: {trained:,} trained, {held:,} frozen",
        f"state: {_bytes(state) / 1e6:,.1f} MB of parameters and moments, {_bytes(frozen) / 1e6:,.1f} MB frozen",
    ]
    if memory is not None:
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        lines.append(
            f"memory of a step: {peak / 1e6:,.1f} MB a device, {memory.temp_size_in_bytes / 1e6:,.1f} of it temporary"
        )
    return [*lines, f"operations: {flops / 1e9:,.2f} GFLOP a step, {flops * num_steps / 1e12:,.2f} TFLOP in all"]


def _describe(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _count(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
