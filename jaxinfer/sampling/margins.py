"""How close a draw is to another token; for oracles and audits, never used while decoding."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.draw import add_noise, best_token
from jaxinfer.sampling.history import History
from jaxinfer.sampling.noise import ROLE_TARGET, vocabulary_ids
from jaxinfer.sampling.transforms import edit_logits, temper, truncation_thresholds

_INFINITY = np.array(np.inf, np.float32).view(np.int32)


def margins(
    logits_BMV: Float[Array, "B M V"],
    positions_BM: Int[Array, "B M"],
    arrays: SamplingArrays,
    history: History,
    role: int | Int[Array, ""] = ROLE_TARGET,
) -> Float[Array, "B M"]:
    """Return the least change that can make ``draw`` take another token, in float32.

    A change is a difference between two logits, tempered and with noise, or a share of the probability. Another token
    is drawn if a kept token closes its gap to the drawn one, if a dropped token does so and also crosses the thresholds
    that dropped it, or if the drawn token is dropped. At temperature 0 the margin is the gap of the two best edited
    logits.
    """
    tempered_BMV = temper(edit_logits(logits_BMV, arrays, history, positions_BM), arrays)
    thresholds_BM1 = tuple(threshold[..., None] for threshold in truncation_thresholds(tempered_BMV, arrays))
    top_k_BM1, top_p_BM1, min_p_BM1 = thresholds_BM1
    kept_BMV = tempered_BMV >= jnp.maximum(jnp.maximum(top_k_BM1, top_p_BM1), min_p_BM1)
    perturbed_BMV = add_noise(tempered_BMV, positions_BM, arrays, role)
    drawn_BM1 = best_token(jnp.where(kept_BMV, perturbed_BMV, -jnp.inf))[..., None]
    is_drawn_BMV = vocabulary_ids(tempered_BMV.shape[-1]) == drawn_BM1
    lead_BMV = jnp.take_along_axis(perturbed_BMV, drawn_BM1, axis=-1) - perturbed_BMV
    drawn_logit_BM1 = jnp.take_along_axis(tempered_BMV, drawn_BM1, axis=-1)

    in_top_k_BMV = tempered_BMV >= top_k_BM1
    first_dropped_BM1 = jnp.max(jnp.where(in_top_k_BMV, -jnp.inf, tempered_BMV), axis=-1, keepdims=True)
    weight_BMV = jnp.exp(tempered_BMV - jnp.max(tempered_BMV, axis=-1, keepdims=True))
    share_BMV = weight_BMV / jnp.sum(jnp.where(in_top_k_BMV, weight_BMV, 0), axis=-1, keepdims=True)
    nucleus_B1 = arrays.top_p_B[:, None]
    has_nucleus_B1 = (arrays.samples_B() & (arrays.top_p_B < 1))[:, None]

    def share_above(logit_BM1: Array, counted_BMV: Array) -> Array:
        return jnp.sum(jnp.where(counted_BMV & (tempered_BMV > logit_BM1), share_BMV, 0), axis=-1)

    def stays(change_BM: Array) -> Array:
        """Tell whether every change of this size leaves the drawn token unchanged."""
        change_BM1 = change_BM[..., None]
        could_lead_BMV = ~is_drawn_BMV & (lead_BMV <= change_BM1)
        # Tokens that may enter or leave the top-k, ties at its end included, each change the shares by their own.
        at_end_BMV = jnp.abs(tempered_BMV - top_k_BM1) <= change_BM1
        num_within_BM = jnp.sum(tempered_BMV >= top_k_BM1 - change_BM1, axis=-1)
        is_vague_BM = (top_k_BM1[..., 0] > -jnp.inf) & (num_within_BM > arrays.top_k_B[:, None])
        slack_BM = change_BM + jnp.where(is_vague_BM, jnp.sum(jnp.where(at_end_BMV, share_BMV, 0), axis=-1), 0)

        others_BMV = in_top_k_BMV & ~is_drawn_BMV
        leaves_nucleus_BM = share_above(drawn_logit_BM1 - change_BM1, others_BMV) >= nucleus_B1 - slack_BM
        # The best token is always in the nucleus, however small; to leave it, the token must be overtaken.
        leaves_nucleus_BM &= jnp.any(others_BMV & (tempered_BMV > drawn_logit_BM1 - change_BM1), axis=-1)
        leaves_BM1 = (drawn_logit_BM1 - first_dropped_BM1 <= change_BM1) & (top_k_BM1 > -jnp.inf)
        leaves_BM1 |= drawn_logit_BM1 - min_p_BM1 <= change_BM1
        leaves_BM = leaves_BM1[..., 0] | (leaves_nucleus_BM & has_nucleus_B1)

        nearest_BM1 = jnp.maximum(top_k_BM1, min_p_BM1) - change_BM1
        entering_BMV = could_lead_BMV & ~kept_BMV & (tempered_BMV >= nearest_BM1)
        # Of the tokens that would then lead, the best one enters the nucleus first.
        first_BM1 = jnp.max(jnp.where(entering_BMV, tempered_BMV, -jnp.inf), axis=-1, keepdims=True)
        enters_nucleus_BM = share_above(first_BM1 + change_BM1, in_top_k_BMV) < nucleus_B1 + slack_BM
        enters_BM = entering_BMV.any(axis=-1) & (enters_nucleus_BM | ~has_nucleus_B1)
        return ~((could_lead_BMV & kept_BMV).any(axis=-1) | leaves_BM | enters_BM)

    return _least_failing(stays, tempered_BMV.shape[:2])


def _least_failing(
    holds: Callable[[Float[Array, "B M"]], Bool[Array, "B M"]], shape: tuple[int, ...]
) -> Float[Array, "B M"]:
    """Find the least non-negative float32 at which a condition fails; it must also fail for all larger ones."""

    def as_float(image: Array) -> Array:
        return lax.bitcast_convert_type(image, jnp.float32)

    def set_bit(step: Array, found: Array) -> Array:
        tried = found | (np.int32(1 << 30) >> step.astype(jnp.int32))
        return jnp.where((tried < _INFINITY) & holds(as_float(tried)), tried, found)

    zeros = jnp.zeros(shape, jnp.int32)
    last_holding = lax.fori_loop(0, 31, set_bit, zeros)
    return as_float(jnp.where(holds(as_float(zeros)), last_holding + 1, 0))
