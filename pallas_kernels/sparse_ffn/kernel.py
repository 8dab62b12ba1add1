"""The bodies of `sparse_ffn`: all rows by a few listed blocks of 128 hidden units a step.

Blocks are multiplied one at a time and added in the order of the list, so the order of a sum does not depend on how
many a step takes, nor its bits on listed blocks whose terms are zero.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.sparse_ffn.blocks import UNITS

_BOTH_LAST = (((1,), (1,)), ((), ()))


def inputs_body(together: int, units: int, precision: lax.Precision) -> Callable[..., None]:
    """Return the body that adds up ``hidden @ kernel.T`` over the listed blocks of the kernel's ``units`` inputs."""
    in_last = units % UNITS

    def body(_layer: Any, index_ref: Any, count_ref: Any, *refs: Any) -> None:
        hidden_refs, kernel_refs, out_ref = refs[:together], refs[together:-1], refs[-1]
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _() -> None:
            out_ref[...] = jnp.zeros_like(out_ref)

        for place, (hidden_ref, kernel_ref) in enumerate(zip(hidden_refs, kernel_refs)):
            entry = step * together + place

            @pl.when(entry < count_ref[0])
            def _(entry: Any = entry, hidden_ref: Any = hidden_ref, kernel_ref: Any = kernel_ref) -> None:
                operands = [hidden_ref[...], kernel_ref[...]]
                if in_last:
                    # Past the last unit a block holds what was in memory.
                    left = units - index_ref[entry] * UNITS
                    operands = [jnp.where(_lanes(each) < left, each, jnp.zeros_like(each)) for each in operands]
                product = lax.dot_general(
                    *operands, _BOTH_LAST, precision=precision, preferred_element_type=jnp.float32
                )
                out_ref[...] += product

        @pl.when(step == pl.num_programs(0) - 1)
        def _() -> None:
            # A sum that underflows to -0 becomes +0 where a block of zeros is added.
            total = out_ref[...]
            out_ref[...] = jnp.where(total == 0, 0.0, total)

    return body


def outputs_body(together: int, precision: lax.Precision) -> Callable[..., None]:
    """Return the body that writes ``rows @ kernel.T`` to the listed blocks of outputs, and zeros elsewhere."""

    def body(_layer: Any, index_ref: Any, count_ref: Any, rows_ref: Any, *refs: Any) -> None:
        *kernel_refs, out_ref = refs
        step = pl.program_id(0)

        @pl.when(step == 0)
        def _() -> None:
            out_ref[...] = jnp.zeros_like(out_ref)

        for place, kernel_ref in enumerate(kernel_refs):
            entry = step * together + place

            @pl.when(entry < count_ref[0])
            def _(entry: Any = entry, kernel_ref: Any = kernel_ref) -> None:
                product = lax.dot_general(
                    rows_ref[...],
                    kernel_ref[...],
                    _BOTH_LAST,
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                first = pl.multiple_of(index_ref[entry] * UNITS, UNITS)
                out_ref[:, pl.ds(first, UNITS)] = product

    return body


def _lanes(array: Any) -> Any:
    return lax.broadcasted_iota(jnp.int32, array.shape, 1)
