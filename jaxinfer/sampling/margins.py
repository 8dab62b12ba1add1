"""How far a draw is from coming out differently; for oracles and audits, never on the decode path."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.draw import add_noise, best_token
from jaxinfer.sampling.history import History
from jaxinfer.sampling.noise import ROLE_TARGET
from jaxinfer.sampling.threshold import min_p_threshold
from jaxinfer.sampling.transforms import edit_logits, temper


def margins(
    logits_BMV: Float[Array, "B M V"],
    positions_BM: Int[Array, "B M"],
    arrays: SamplingArrays,
    history: History,
    role: int | Int[Array, ""] = ROLE_TARGET,
) -> Float[Array, "B M"]:
    """Return the least change that makes ``draw`` take another token.

    A kept token must gain its gap to the drawn one, in perturbed logits; a dropped one must gain its gap *and* cross
    the boundary that dropped it; the drawn one must itself stay inside. Distances to top-k and min-p are in tempered
    logits, to top-p in probability. Sorts the vocabulary.
    """
    tempered_BMV = temper(edit_logits(logits_BMV, arrays, history, positions_BM), arrays)
    inside_BMV = _distance_inside(tempered_BMV, arrays)
    perturbed_BMV = add_noise(tempered_BMV, positions_BM, arrays, role)
    drawn_BM1 = best_token(jnp.where(inside_BMV >= 0, perturbed_BMV, -jnp.inf))[..., None]

    lead_BMV = jnp.take_along_axis(perturbed_BMV, drawn_BM1, axis=-1) - perturbed_BMV
    needed_BMV = jnp.where(inside_BMV >= 0, lead_BMV, jnp.maximum(lead_BMV, -inside_BMV))
    # A banned token (-inf) cannot win, and where all are banned nothing is left to compare.
    is_other_BMV = (jnp.arange(tempered_BMV.shape[-1]) != drawn_BM1) & (tempered_BMV > -jnp.inf)
    others_BM = jnp.min(jnp.where(is_other_BMV, needed_BMV, jnp.inf), axis=-1)
    return jnp.minimum(others_BM, jnp.take_along_axis(inside_BMV, drawn_BM1, axis=-1)[..., 0])


def _distance_inside(tempered_BMV: Float[Array, "B M V"], arrays: SamplingArrays) -> Float[Array, "B M V"]:
    """Measure how far each token is inside the nearest truncation boundary; negative outside, inf without one."""
    vocab_size = tempered_BMV.shape[-1]
    samples_B11 = arrays.samples_B()[:, None, None]
    sorted_BMV = jnp.sort(tempered_BMV, axis=-1, descending=True)

    top_k_B11 = arrays.top_k_B[:, None, None]
    has_top_k_B11 = samples_B11 & (top_k_B11 > 0) & (top_k_B11 < vocab_size)
    last_index_BM1 = jnp.broadcast_to(jnp.clip(top_k_B11 - 1, 0, vocab_size - 1), (*tempered_BMV.shape[:2], 1))
    last_kept_BM1 = jnp.take_along_axis(sorted_BMV, last_index_BM1, axis=-1)
    is_kept_BMV = tempered_BMV >= last_kept_BM1
    first_dropped_BM1 = jnp.max(jnp.where(is_kept_BMV, -jnp.inf, tempered_BMV), axis=-1, keepdims=True)
    top_k_distance_BMV = tempered_BMV - jnp.where(is_kept_BMV, first_dropped_BM1, last_kept_BM1)
    inside_BMV = jnp.where(has_top_k_B11, top_k_distance_BMV, jnp.inf)

    # A token is in the nucleus while the mass strictly above it is less than top_p.
    in_top_k_BMV = jnp.where(has_top_k_B11 & (sorted_BMV < last_kept_BM1), -jnp.inf, sorted_BMV)
    above_BMV = jnp.cumsum(jax.nn.softmax(in_top_k_BMV, axis=-1), axis=-1)
    num_above_BMV = _count_above(sorted_BMV, tempered_BMV)
    mass_above_BMV = jnp.where(
        num_above_BMV > 0, jnp.take_along_axis(above_BMV, jnp.maximum(num_above_BMV - 1, 0), axis=-1), 0
    )
    top_p_B11 = arrays.top_p_B[:, None, None]
    # The best token is inside whatever its own mass is.
    top_p_distance_BMV = jnp.where(num_above_BMV > 0, top_p_B11 - mass_above_BMV, jnp.inf)
    inside_BMV = jnp.minimum(inside_BMV, jnp.where(samples_B11 & (top_p_B11 < 1), top_p_distance_BMV, jnp.inf))

    min_p_BM = jnp.broadcast_to(arrays.min_p_B[:, None], tempered_BMV.shape[:2])
    min_p_distance_BMV = tempered_BMV - min_p_threshold(tempered_BMV, min_p_BM)[..., None]
    return jnp.minimum(inside_BMV, jnp.where(samples_B11 & (min_p_BM > 0)[..., None], min_p_distance_BMV, jnp.inf))


def _count_above(sorted_BMV: Float[Array, "B M V"], values_BMV: Float[Array, "B M V"]) -> Int[Array, "B M V"]:
    def of_node(sorted_V: Array, values_V: Array) -> Array:
        return jnp.searchsorted(-sorted_V, -values_V, side="left").astype(jnp.int32)

    return jax.vmap(jax.vmap(of_node))(sorted_BMV, values_BMV)
