"""Weights rounded to any number of bits, to be measured: they are kept as the floats that their codes stand for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.errors import InvalidOption
from jaxinfer.language_model import LanguageModel
from jaxinfer.models.few_bits import is_kernel, is_table
from jaxinfer.models.layers import TRANSPOSED_KERNEL
from jaxinfer.notation import Array, Float, Params
from jaxinfer.ops.few_bits.formats import GROUPS, Format
from jaxinfer.ops.few_bits.quantized_array import is_quantized

FEWEST, MOST = 2, 8
# Each group has a scale and a minimum, in float16.
_GROUP_BYTES = 4


@dataclass(frozen=True)
class BitWidth:
    """Kernels in ``bits`` a code, with a scale and a minimum for each ``group``; tables stay as they are.

    Equally spaced levels from a group's smallest weight to its largest, each weight the nearest. The library multiplies
    no such codes but those of 4 bits: here they cost what floats do, and only what they change is true.
    """

    bits: int
    group: int

    @property
    def name(self) -> str:
        """What it is called in a report."""
        return f"{self.bits} bits:group={self.group}"

    @property
    def bits_per_weight(self) -> float:
        """The bits of a weight with its part of scale and minimum."""
        return self.bits + 8 * _GROUP_BYTES / self.group

    def num_bytes(self, params: Params) -> int:
        """Return the bytes that all parameters would take."""
        kernels: list[Any] = []
        _each_kernel(params, lambda path, matrix: kernels.append(matrix))
        others = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - sum(each.nbytes for each in kernels)
        return others + round(sum(each.size for each in kernels) * self.bits_per_weight / 8)

    def check(self, params: Params) -> None:
        """Raise InvalidOption for rows that do not divide into groups, and for weights in few bits."""
        if any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
            raise InvalidOption("--bits rounds wide weights, and the model's are in few bits: name another model")

        def check(path: tuple[str, ...], matrix: Array) -> None:
            width = _rows(path, matrix).shape[-1]
            smaller = [str(group) for group in GROUPS if group < self.group and width % group == 0]
            mend = f"--groups {' or '.join(smaller)}" if smaller else "another model"
            Format(4, self.group).check_width(f"--bits: {'.'.join(path)}", width, mend)

        _each_kernel(params, check)

    def round(self, lm: LanguageModel) -> LanguageModel:
        """Return a model with its kernels rounded."""

        def change(path: tuple[str, ...], matrix: Array) -> Array:
            return _rows(path, round_evenly(_rows(path, matrix), self.bits, self.group).astype(matrix.dtype))

        return lm.changed(_each_kernel(lm.params, change))


@partial(jax.jit, static_argnums=(1, 2))
def round_evenly(weights: Float[Array, "*shape"], bits: int, group: int) -> Float[Array, "*shape"]:
    """Return each weight's nearest of ``2 ** bits`` levels, from its group's smallest weight to its largest."""
    groups = weights.astype(jnp.float32).reshape(*weights.shape[:-1], -1, group)
    least, most = jnp.min(groups, axis=-1, keepdims=True), jnp.max(groups, axis=-1, keepdims=True)
    steps = ((most - least) / (2**bits - 1)).astype(jnp.float16).astype(jnp.float32)
    least = least.astype(jnp.float16).astype(jnp.float32)
    codes = jnp.clip(jnp.round((groups - least) / jnp.where(steps == 0, 1, steps)), 0, 2**bits - 1)
    return (codes * steps + least).reshape(weights.shape)


def _rows(path: tuple[str, ...], matrix: Array) -> Array:
    """Return a kernel as ``[..., out, in]``, or such a one as it is stored."""
    return matrix.swapaxes(-1, -2) if path[-1] == TRANSPOSED_KERNEL else matrix


def _each_kernel(params: Params, change: Callable[[tuple[str, ...], Any], Any]) -> Params:
    def changed(path: Any, leaf: Any) -> Any:
        names = tuple(key.key for key in path)
        return change(names, leaf) if is_kernel(names) and not is_table(names) else leaf

    return jax.tree_util.tree_map_with_path(changed, params)
