"""Which features of a feed-forward layer are left out: those that are zero, or that are made zero."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from jaxinfer.errors import InvalidOption, shown
from jaxinfer.notation import Array, Float

_FORMS = "exact, threshold:0.01 or topk:512"


@dataclass(frozen=True)
class Sparsity:
    """``exact`` leaves out features that are zero, which changes nothing; the others make features zero first.

    ``threshold`` makes those zero whose activation is no larger than ``amount`` (CATS, 2404.08763), ``topk`` all but
    the ``amount`` largest of each token. Both change the text. An activation is what the gate's activation function
    returns, or that of ``up`` where there is no gate.
    """

    kind: Literal["exact", "threshold", "topk"]
    amount: float | int = 0

    @property
    def name(self) -> str:
        """The sparsity as `parse_sparsity` reads it."""
        return self.kind if self.kind == "exact" else f"{self.kind}:{self.amount:g}"

    def keep(self, activations: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        """Return activations, with zeros for those that are left out; of equal ones, all or none are."""
        if self.kind == "exact":
            return activations
        sizes = jnp.abs(activations)
        if self.kind == "threshold":
            return jnp.where(sizes <= self.amount, 0, activations)
        return jnp.where(sizes < _largest(sizes, int(self.amount)), 0, activations)


def _largest(sizes: Float[Array, "*rows F"], count: int) -> Float[Array, "*rows 1"]:
    """Return the ``count``-th largest of each row's numbers, none of which is negative: bit by bit, without sorting."""
    bits = lax.bitcast_convert_type(sizes.astype(jnp.float32), jnp.int32)

    def add_bit(step: Any, least: Array) -> Array:
        larger = least | jnp.left_shift(1, 30 - step)
        return jnp.where(jnp.sum(bits >= larger, axis=-1, keepdims=True) >= count, larger, least)

    least = lax.fori_loop(0, 31, add_bit, jnp.zeros((*sizes.shape[:-1], 1), jnp.int32))
    return lax.bitcast_convert_type(least, jnp.float32).astype(sizes.dtype)


def parse_sparsity(text: Any) -> Sparsity | None:
    """Parse ``exact``, ``threshold:T`` with T above 0, or ``topk:K``; None is none."""
    if text is None or isinstance(text, Sparsity):
        return text
    if not isinstance(text, str):
        raise InvalidOption(f"sparsity {shown(text)} is not a text: use {_FORMS}, or none")
    kind, _, amount = text.partition(":")
    if text == "exact":
        return Sparsity("exact")
    if kind == "threshold":
        try:
            value = float(amount)
        except ValueError:
            value = math.nan
        if not 0 < value <= float(jnp.finfo(jnp.float32).max):
            raise InvalidOption(f"sparsity {text!r}: a threshold is a number above 0, as in threshold:0.01")
        return Sparsity("threshold", value)
    if kind == "topk":
        if not amount.isascii() or not amount.isdigit() or len(amount) > 9 or int(amount) == 0:
            raise InvalidOption(f"sparsity {text!r}: topk is a whole number of 1 or more, as in topk:512")
        return Sparsity("topk", int(amount))
    raise InvalidOption(f"unknown sparsity {text!r}; use {_FORMS}, or none")
