"""Chooses the codes of experts: of each on the tokens that a router gave it, with what it makes of these for down."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import Experts
from jaxinfer.models.layers import EXPERTS
from jaxinfer.models.mlp import ACTIVATIONS
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.experts import gating_of
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.quantization.seen import Method, Seen, seen_in

# Fewer tokens say too little: on inputs that were not seen, GPTQ and AWQ had up to 1.2 and 1.7 times the error of
# rounding to the nearest by 1 to 16 tokens, by 32 at most 1.06 times, and far less where few directions matter.
LEAST_TOKENS = 32
# Tokens that are multiplied at a time.
_TOGETHER = 4096
_BIASES = "expert_biases"
_WIDE = ("gate", "up")


class Routed(NamedTuple):
    """The tokens that came to a layer of experts, ``[N, D]``, and each one's experts and their weights."""

    inputs_ND: Float[np.ndarray, "N D"]
    chosen_NC: Int[np.ndarray, "N C"]
    weights_NC: Float[np.ndarray, "N C"]

    def counts(self, num_experts: int) -> Int[np.ndarray, " E"]:
        """Return how many tokens each expert was given."""
        return np.bincount(self.chosen_NC.reshape(-1), minlength=num_experts)

    def rows_of(self, expert: int, *, scaled: bool) -> Iterator[np.ndarray]:
        """Yield the tokens of an expert, some at a time; the last are filled up with zeros to a power of two.

        ``scaled`` is whether an expert is given them times their weight.
        """
        tokens, places = np.nonzero(self.chosen_NC == expert)
        for first in range(0, len(tokens), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            rows = self.inputs_ND[tokens[some]]
            if scaled:
                rows = rows * self.weights_NC[tokens[some], places[some], None]
            yield np.pad(rows, [(0, (1 << (len(rows) - 1).bit_length()) - len(rows)), (0, 0)])


def num_rounded(counts_E: Int[np.ndarray, " E"]) -> int:
    """Return of how many experts, which were given so many tokens, weights are rounded to the nearest."""
    return int((counts_E < LEAST_TOKENS).sum())


def quantize_experts(
    mlp: Mapping[str, Any], routed: Routed, experts: Experts, activation: str, method: Method
) -> tuple[Params, np.ndarray | None]:
    """Return a layer of experts with the stacks of its kernels in few bits, and what was folded into them.

    That is what each down's inputs were divided by, ``[E, F]``, None for nothing. Gate and up are quantized first; what
    they then make of an expert's tokens is what down is calibrated on.
    """
    made: dict[str, list[Any]] = {}
    factors: dict[int, Any] = {}
    biases = mlp.get(_BIASES)
    for index, count in enumerate(routed.counts(experts.num_experts)):
        expert = {name: stack[index] for name, stack in mlp[EXPERTS].items()}
        own = {} if biases is None else {name: rows[index] for name, rows in biases.items()}
        if count < LEAST_TOKENS:
            found = {name: method.nearest(kernel) for name, kernel in expert.items()}
        else:
            rows = list(routed.rows_of(index, scaled=experts.scales_inputs))
            found, own, factors[index] = _quantized(expert, own, rows, int(count), experts, activation, method)
        for name, value in (*found.items(), *((f"{_BIASES}.{name}", value) for name, value in own.items())):
            # On the host: a layer is in memory twice, and not a third time.
            made.setdefault(name, []).append(jax.tree.map(np.asarray, value))
    stacks = {name: jax.tree.map(lambda *parts: jnp.stack(parts), *made[name]) for name in mlp[EXPERTS]}
    changed = {**mlp, EXPERTS: stacks}
    if biases is not None:
        changed[_BIASES] = {name: jnp.stack(made[f"{_BIASES}.{name}"]).astype(biases[name].dtype) for name in biases}
    if all(factors_F is None for factors_F in factors.values()):
        return changed, None
    shape = mlp[EXPERTS]["down"].shape
    folded_EF = np.ones((shape[0], shape[2]), np.float32)
    for index, factors_F in factors.items():
        folded_EF[index] = factors_F
    return changed, folded_EF


def _quantized(
    expert: Mapping[str, Any],
    biases: Mapping[str, Any],
    rows: list[np.ndarray],
    count: int,
    experts: Experts,
    activation: str,
    method: Method,
) -> tuple[dict[str, Any], Mapping[str, Any], Array | None]:
    """Return the kernels of an expert in few bits, its biases, and what its down's inputs were divided by."""

    def seen_by_down(expert: Mapping[str, Any], biases: Mapping[str, Any]) -> Seen:
        wide = {name: expert[name] for name in _WIDE}
        given = partial(_given_to_down, activation, experts.limit, wide, dict(biases))
        return seen_in(map(given, rows), count)

    factors_F = None
    # With a limit what down multiplies does not grow as up does.
    if experts.limit is None:
        factors_F = method.factors([expert["down"]], partial(seen_by_down, expert, biases))
        if factors_F is not None:
            expert = {**expert, "up": expert["up"] / factors_F[:, None], "down": expert["down"] * factors_F}
            biases = {**biases, "up": biases["up"] / factors_F} if biases else biases
    seen, found = seen_in(rows, count), dict(expert)
    for name in _WIDE:
        found[name] = method.choose((EXPERTS, name), expert[name], seen)
    found["down"] = method.choose((EXPERTS, "down"), expert["down"], seen_by_down(found, biases))
    return found, biases, factors_F


@partial(jax.jit, static_argnums=(0, 1))
def _given_to_down(
    activation: str,
    limit: float | None,
    wide: Mapping[str, Any],
    biases: Mapping[str, Any],
    rows_RD: Float[Array, "R D"],
) -> Float[Array, "R F"]:
    """Return what an expert's down multiplies; of rows of zeros, zeros."""
    gating = gating_of(ACTIVATIONS[activation], limit)
    gate_RF, up_RF = (_times(rows_RD, wide[name]) + biases.get(name, 0) for name in _WIDE)
    is_token_R1 = jnp.any(rows_RD != 0, axis=-1, keepdims=True)
    return jnp.where(is_token_R1, gating(gate_RF, up_RF), 0)


def _times(rows: Array, kernel: Any) -> Array:
    kernel = kernel.dequantize() if is_quantized(kernel) else kernel.astype(jnp.float32)
    return jnp.matmul(rows, kernel.T, precision=jax.lax.Precision.HIGHEST)
