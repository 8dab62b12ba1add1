"""Parameters of a model in few bits: its kernels rounded to a form, its tables to bytes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import InvalidOption
from jaxinfer.models.layers import EXPERTS, KERNEL, TRANSPOSED_KERNEL, expert_stacks, stored_kernel
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.panels.products import drafts_by_panels, multiplies_panels
from jaxinfer.ops.few_bits.columns import ColumnArray, kernels_by_columns
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.panels import PanelArray, in_panels
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest

_TABLE = ("embed", "embedding")


def is_table(path: tuple[str, ...]) -> bool:
    """Whether a parameter is read by rows, or makes logits: what is never in less than 8 bits."""
    return path == _TABLE or (path[0] == "head" and path[-1] in (KERNEL, TRANSPOSED_KERNEL))


def is_kernel(path: tuple[str, ...]) -> bool:
    """Whether a parameter is a matrix that multiplies, or a stack of experts' matrices."""
    return path[-1] in (KERNEL, TRANSPOSED_KERNEL) or is_expert(path)


def is_expert(path: tuple[str, ...]) -> bool:
    """Whether a parameter is a stack ``[E, out, in]`` of the kernels of experts."""
    return EXPERTS in path[:-1]


def check_no_experts(path: tuple[str, ...], named: str, why: str) -> None:
    """Raise InvalidOption, ``named: why``, for a parameter of experts."""
    if is_expert(path):
        raise InvalidOption(f"{named}: {why}")


def check_has_experts(params: Mapping[str, Any], only_experts: bool, named: str) -> None:
    """Raise InvalidOption, which begins with ``named``, where experts alone are asked for and there are none."""
    if only_experts and not expert_stacks(params):
        raise InvalidOption(f"{named}: the model has no experts: leave only= out")


def change_matrices(params: Mapping[str, Any], change: Callable[[tuple[str, ...], Any], Any]) -> Params:
    """Return parameters, or what describes them, after ``change(path, matrix)`` of each kernel ``[out, in]`` and table.

    Kernels stay ``[out, in]``, and those of experts ``[E, out, in]``.
    """

    def walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Params:
        made: Params = {}
        for key, value in node.items():
            here = (*path, key)
            if isinstance(value, Mapping):
                made[key] = walk(value, here)
            elif is_expert(here):
                made[key] = change(here, value)
            elif is_kernel(here):
                made[KERNEL] = change((*path, KERNEL), stored_kernel(node))
            else:
                made[key] = change(here, value) if is_table(here) else value
        return made

    return walk(params, ())


def in_few_bits(params: Params, form: Format, named: str, *, only_experts: bool = False) -> Params:
    """Return parameters, in few bits or not, with kernels rounded to a form and tables to bytes, or experts alone.

    With a sparse form tables stay as they are.
    Raises InvalidOption, which begins with ``named``, for rows that do not divide into groups, and for no experts.
    """
    check_has_experts(params, only_experts, named)

    def rounded(path: tuple[str, ...], matrix: Any) -> Any:
        if (only_experts and not is_expert(path)) or (form.kept is not None and is_table(path)):
            return matrix
        chosen = form.of_tables if is_table(path) else form
        chosen.check_width(f"{named}: {'.'.join(path)}", matrix.shape[-1])
        plain = matrix.dequantize() if isinstance(matrix, QuantizedArray) else jnp.asarray(matrix)
        return round_to_nearest(plain, chosen)

    return change_matrices(params, rounded)


def drafting_params(params: Params, backend: Backend) -> Params:
    """Return parameters in few bits as they draft fastest: on one CPU by panels, of rows that are rounded."""
    return change_matrices(params, lambda path, matrix: drafting_matrix(matrix, backend, is_expert(path)))


def drafting_matrix(matrix: Any, backend: Backend, is_stack: bool = False) -> Any:
    """Return a matrix in few bits, or a stack of them, as it drafts fastest on this backend: in panels, or by rows."""
    if not isinstance(matrix, QuantizedArray):
        return matrix
    if not is_stack and _lies_alone(matrix, backend) and drafts_by_panels(matrix.form, matrix.shape[1]):
        panels = _in_panels(matrix)
        return panels if panels.drafts else replace(panels, drafts=True)
    return laid_out_matrix(matrix, backend, is_stack)


def laid_out(params: Params, backend: Backend) -> Params:
    """Return a decoder's parameters, or some of them, with kernels in few bits as one device multiplies them fastest.

    On a TPU they lie by columns, on a CPU in panels; sums, and so bits, are those of kernels by rows.
    """
    if backend.kernels != "xla":
        return kernels_by_columns(params)

    def laid(path: tuple[Any, ...], leaf: Any) -> Any:
        return laid_out_matrix(leaf, backend, is_expert(tuple(each.key for each in path)))

    return jax.tree_util.tree_map_with_path(laid, params, is_leaf=is_quantized)


def laid_out_matrix(matrix: Any, backend: Backend, is_stack: bool = False) -> Any:
    """Return a matrix in few bits in panels if the CPU kernels multiply it so, or else by rows; others unchanged.

    A stack of matrices is one of experts'; layers that are scanned lie by rows.
    """
    if not isinstance(matrix, QuantizedArray) or isinstance(matrix, ColumnArray):
        return matrix
    if isinstance(matrix, PanelArray):
        return matrix if _lies_alone(matrix, backend, is_stack) else matrix.by_rows()
    is_fastest = _lies_alone(matrix, backend, is_stack) and multiplies_panels(matrix.form, matrix.shape[-1])
    return _in_panels(matrix) if is_fastest else matrix


def _lies_alone(matrix: QuantizedArray, backend: Backend, is_stack: bool = False) -> bool:
    """Whether kernels multiply a matrix, or the matrices of a stack, on one CPU device."""
    return backend.cpu_kernels and backend.mesh is None and matrix.ndim == 2 + is_stack


def _in_panels(matrix: QuantizedArray) -> PanelArray:
    if isinstance(matrix, PanelArray):
        return matrix
    # By NumPy: for each shape XLA would compile a program of its own.
    return jax.tree.map(jnp.asarray, in_panels(jax.tree.map(np.asarray, matrix)))
