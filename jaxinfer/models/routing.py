"""Which experts a token goes to, and by what their results are multiplied.

All of it is computed in float32 or wider, in an order that depends on the number of experts alone: a token's choice has
the same bits in any company.
"""

import jax
import jax.numpy as jnp

from jaxinfer.models.config import Experts
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.rounding import rounded

# Added to a sum that is divided by, as DeepSeek-V3 does: scores of sigmoids may all be zero.
_LEAST_SUM = 1e-20


def choose_experts(
    logits_BTE: Float[Array, "B T E"], correction_E: Float[Array, " E"] | None, experts: Experts
) -> tuple[Int[Array, "B T C"], Float[Array, "B T C"]]:
    """Return each token's experts, the best first and of equal ones the lower first, and their weights."""
    if experts.scoring == "sparse_mixer":
        return _one_by_one(logits_BTE, experts)
    scores_BTE = _scores(logits_BTE, experts)
    choice_BTE = scores_BTE if correction_E is None else scores_BTE + correction_E.astype(scores_BTE.dtype)
    if experts.groups > 1:
        choice_BTE = _within_groups(choice_BTE, experts)
    _, chosen_BTC = jax.lax.top_k(choice_BTE, experts.per_token)
    weights_BTC = jnp.take_along_axis(scores_BTE, chosen_BTC, axis=-1)
    if experts.scoring == "chosen_softmax":
        weights_BTC = _softmax(weights_BTC)
    if experts.scoring == "chosen_sigmoid":  # not of all: large logits differ where their sigmoids are equal
        weights_BTC = jax.nn.sigmoid(weights_BTC)
    if experts.normalised:
        weights_BTC = weights_BTC / (_sum(weights_BTC) + _LEAST_SUM)
    return chosen_BTC, weights_BTC * experts.scale if experts.scale != 1.0 else weights_BTC


def _one_by_one(logits_BTE: Array, experts: Experts) -> tuple[Array, Array]:
    """Return experts of which each is the best that is left, with its share among those that are left and near it."""
    left_BTE, weights = jnp.ones_like(logits_BTE, bool), []
    best_BTC, chosen_BTC = jax.lax.top_k(logits_BTE, experts.per_token)
    for place in range(experts.per_token):
        best_BT1 = best_BTC[..., place : place + 1]
        is_near_BTE = best_BT1 - logits_BTE <= experts.spread * jnp.maximum(jnp.abs(logits_BTE), best_BT1)
        shares_BTE = _softmax(jnp.where(left_BTE & is_near_BTE, logits_BTE, -jnp.inf))
        here_BT1 = chosen_BTC[..., place : place + 1]
        weights.append(jnp.take_along_axis(shares_BTE, here_BT1, axis=-1))
        left_BTE &= jnp.arange(experts.num_experts) != here_BT1
    return chosen_BTC, jnp.concatenate(weights, axis=-1)


def _scores(logits: Array, experts: Experts) -> Array:
    if experts.scoring == "softmax":
        return _softmax(logits)
    return jax.nn.sigmoid(logits) if experts.scoring == "sigmoid" else logits


def _within_groups(choice_BTE: Array, experts: Experts) -> Array:
    """Leave only the experts of the best groups; the others are never chosen."""
    grouped = choice_BTE.reshape(*choice_BTE.shape[:-1], experts.groups, -1)
    best, _ = jax.lax.top_k(grouped, 1 if experts.group_score == "best" else 2)
    _, kept = jax.lax.top_k(_sum(best)[..., 0], experts.kept_groups)
    is_kept = (kept[..., None] == jnp.arange(experts.groups)).any(axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice_BTE.shape)


def _softmax(logits: Array) -> Array:
    # Rounded, or the compiler could multiply and add at once where a program's shape suits it: in the exponential of a
    # difference too, which begins with a product.
    powers = rounded(jnp.exp(rounded(logits - jnp.max(logits, axis=-1, keepdims=True))))
    return powers / _sum(powers)


def _sum(values: Array) -> Array:
    """Return sums over the last axis, which stays: the upper half is added to the lower half until one is left."""
    while values.shape[-1] > 1:
        half = (values.shape[-1] + 1) // 2
        lower, upper = values[..., :half], values[..., half:]
        values = lower + jnp.pad(upper, [(0, 0)] * (values.ndim - 1) + [(0, half - upper.shape[-1])])
    return values
