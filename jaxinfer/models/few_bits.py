"""Parameters of a model in few bits: its kernels rounded to a form, its tables to bytes."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.layers import KERNEL, TRANSPOSED_KERNEL, stored_kernel
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.formats import INT8, Format
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest

_TABLE = ("embed", "embedding")


def is_table(path: tuple[str, ...]) -> bool:
    """Whether a parameter is read by rows, or makes logits: what is never in less than 8 bits."""
    return path == _TABLE or (path[0] == "head" and path[-1] in (KERNEL, TRANSPOSED_KERNEL))


def is_kernel(path: tuple[str, ...]) -> bool:
    """Whether a parameter is a matrix that multiplies."""
    return path[-1] in (KERNEL, TRANSPOSED_KERNEL)


def in_few_bits(params: Params, form: Format, named: str) -> Params:
    """Return parameters, in few bits or not, rounded to a form; kernels are then ``[out, in]``.

    Raises InvalidOption, which begins with ``named``, for rows that do not divide into groups.
    """

    def walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Params:
        made: Params = {}
        for key, value in node.items():
            here = (*path, key)
            if isinstance(value, Mapping):
                made[key] = walk(value, here)
            elif is_kernel(here) or is_table(here):
                rows = stored_kernel(node) if is_kernel(here) else value
                chosen = INT8 if is_table(here) else form
                chosen.check_width(f"{named}: {'.'.join(here)}", rows.shape[-1])
                rows = rows.dequantize() if isinstance(rows, QuantizedArray) else jnp.asarray(rows)
                made[KERNEL if is_kernel(here) else key] = round_to_nearest(rows, chosen)
            else:
                made[key] = value
        return made

    return walk(params, ())
