"""Rounds parameters inside a forward pass to what their codes stand for; gradients pass as if nothing happened."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.errors import InvalidOption
from jaxinfer.models.few_bits import check_no_experts, is_kernel, is_table
from jaxinfer.models.layers import TRANSPOSED_KERNEL
from jaxinfer.notation import Array, Float, Params
from jaxinfer.ops.few_bits.formats import Format
from jaxinfer.ops.few_bits.round_to_nearest import nearest_values


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def straight_through(weights: Float[Array, "*shape"], form: Format) -> Float[Array, "*shape"]:
    """Return the values of weights ``[..., out, in]`` in a form; the gradient passes as it is (Bengio, 1308.3432)."""
    return nearest_values(weights, form).astype(weights.dtype)


def _forward(weights: Array, form: Format) -> tuple[Array, None]:
    return straight_through(weights, form), None


def _backward(form: Format, _: None, gradient: Array) -> tuple[Array]:
    return (gradient,)


straight_through.defvjp(_forward, _backward)


def rounded(params: Params, form: Format) -> Params:
    """Return parameters as they are in few bits: kernels in a form, tables in bytes."""

    def change(path: Any, leaf: Any) -> Any:
        names = tuple(key.key for key in path)
        if is_table(names):
            chosen = form.of_tables
        elif is_kernel(names):
            chosen = form
        else:
            return leaf
        if names[-1] != TRANSPOSED_KERNEL:
            return straight_through(leaf, chosen)
        return jnp.swapaxes(straight_through(jnp.swapaxes(leaf, -1, -2), chosen), -1, -2)

    return jax.tree_util.tree_map_with_path(change, params)


def check_widths(params: Params, form: Format, named: str) -> None:
    """Raise InvalidOption, which begins with ``named``, for rows that do not divide into groups."""

    def check(path: Any, leaf: Any) -> None:
        names = tuple(key.key for key in path)
        check_no_experts(names, named, "experts are not trained to be rounded: round them by load(weights=...)")
        if is_table(names) or is_kernel(names):
            chosen = form.of_tables if is_table(names) else form
            chosen.check_width(f"{named}: {'.'.join(names)}", leaf.shape[-2 if names[-1] == TRANSPOSED_KERNEL else -1])

    jax.tree_util.tree_map_with_path(check, params)


def parse_form(weights: str) -> Format:
    """Return the form that ``--weights`` names; raise InvalidOption for one that nothing is rounded to."""
    from jaxinfer.checkpoint.few_bits import parse_few_bits

    few_bits = parse_few_bits(weights)
    assert few_bits is not None
    if few_bits.only_experts:
        raise InvalidOption(f"--weights {weights}: experts are not trained to be rounded: leave only= out")
    if few_bits.form is None:
        raise InvalidOption(f"--weights {weights} is no form to round to: use int8, int4:group=64, nf4:group=64 or fp8")
    if few_bits.form.kept is not None:
        raise InvalidOption(f"--weights {weights}: which weights are left out is not trained: round them by convert")
    return few_bits.form
