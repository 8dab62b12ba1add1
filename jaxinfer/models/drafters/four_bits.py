"""Matrices of drafters in four bits, which a CPU reads in less than a quarter of bfloat16's time; precise enough."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.few_bits import drafting_matrix
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.few_bits.products import multiplies_few_bits
from jaxinfer.ops.few_bits.formats import int4
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest

FORM = int4(32, True)


def in_four_bits(matrix_ND: Any, backend: Backend) -> Any:
    """Return a matrix ``[N, D]`` in four bits where the CPU kernels multiply such, or else as it is."""
    if isinstance(matrix_ND, QuantizedArray):
        return drafting_matrix(matrix_ND, backend)
    if not jnp.issubdtype(matrix_ND.dtype, jnp.floating):
        return matrix_ND
    width = matrix_ND.shape[1]
    if not backend.cpu_kernels or width % FORM.unit or not multiplies_few_bits(FORM, width):
        return matrix_ND
    return drafting_matrix(round_to_nearest(jnp.asarray(matrix_ND), FORM), backend)


def heads_in_four_bits(head_params: Params, backend: Backend) -> Params:
    """Return heads (`jaxinfer.models.drafters.heads`) with all of their matrices in four bits where that is faster."""

    def block_in_four_bits(block: Params) -> Params:
        matrices = {name: in_four_bits(block[name], backend) for name in ("kernel", "out") if name in block}
        return {**block, **matrices}

    def part_in_four_bits(part: Params) -> Params:
        changed = dict(part)
        if "output" in part:
            changed["output"] = {**part["output"], "kernel": in_four_bits(part["output"]["kernel"], backend)}
        if "blocks" in part:
            changed["blocks"] = tuple(map(block_in_four_bits, part["blocks"]))
        return changed

    return {**part_in_four_bits(head_params), "heads": tuple(map(part_in_four_bits, head_params["heads"]))}


def matrices_in_four_bits(params: Any, backend: Backend) -> Any:
    """Return parameters with all that are called ``"kernel"`` as `in_four_bits` has them."""
    if not isinstance(params, Mapping):
        return params
    return {
        name: in_four_bits(value, backend) if name == "kernel" else matrices_in_four_bits(value, backend)
        for name, value in params.items()
    }
