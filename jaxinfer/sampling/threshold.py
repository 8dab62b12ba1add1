"""Thresholds of top-k, top-p and min-p by bisection: no sort, and rows are independent."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.sampling.mass import best_logit, masses_from


def top_k_threshold(logits: Float[Array, "*rows V"], top_k: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the k-th largest logit of each row; -inf if k is 0 or not below the size of the vocabulary."""
    images = _ordered_image(logits)
    found = _largest(
        lambda image: jnp.sum(images >= image[..., None], axis=-1, dtype=jnp.int32) >= top_k, logits.shape[:-1], images
    )
    return jnp.where((top_k > 0) & (top_k < logits.shape[-1]), _from_image(found, logits.dtype), -jnp.inf)


def top_p_threshold(
    logits: Float[Array, "*rows V"],
    kept_from: Float[Array, "*rows"],
    top_p: Float[Array, "*rows"],
    backend: Backend | None = None,
) -> Float[Array, "*rows"]:
    """Return the largest threshold whose tokens hold top_p of the probability of those at or above ``kept_from``.

    This gives the smallest nucleus, with all tied tokens; -inf if top_p is 1.
    """
    # The barrier makes XLA compute these once, not in every iteration.
    images, best = lax.optimization_barrier((_ordered_image(logits), best_logit(logits)))
    mass_from = masses_from(logits, best, backend)
    # Never zero, even if a tiny top_p underflows: a threshold above the best logit would then pass.
    wanted = jnp.maximum(top_p.astype(logits.dtype) * mass_from(kept_from), jnp.finfo(logits.dtype).tiny)
    found = _largest(lambda image: mass_from(_from_image(image, logits.dtype)) >= wanted, logits.shape[:-1], images)
    return jnp.where(top_p < 1, _from_image(found, logits.dtype), -jnp.inf)


def min_p_threshold(logits: Float[Array, "*rows V"], min_p: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Return the logit of a token min_p times as probable as the best one; -inf if min_p is 0."""
    return best_logit(logits) + jnp.log(min_p.astype(logits.dtype))


def _ordered_image(values: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Map floats to signed integers of the same width and order."""
    integer = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
    # The two zeros map to neighbours; as thresholds they keep the same logits.
    bits = lax.bitcast_convert_type(values, integer)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def _from_image(image: Int[Array, "*shape"], dtype: np.dtype) -> Float[Array, "*shape"]:
    bits = jnp.where(image < 0, image ^ jnp.iinfo(image.dtype).max, image)
    return lax.bitcast_convert_type(bits, dtype)


def _largest(
    holds: Callable[[Int[Array, "*rows"]], Bool[Array, "*rows"]], rows: tuple[int, ...], images: Int[Array, "*rows V"]
) -> Int[Array, "*rows"]:
    """Find the largest image at which a condition holds; once false, it must be false for all larger ones."""
    num_bits = jnp.iinfo(images.dtype).bits
    unsigned = jnp.uint64 if num_bits == 64 else jnp.uint32
    top_bit = np.array(1 << (num_bits - 1)).astype(unsigned)

    def signed(number: Array) -> Array:
        return lax.bitcast_convert_type(number ^ top_bit, images.dtype)

    def set_bit(step: Array, found: Array) -> Array:
        tried = found | (top_bit >> step.astype(unsigned))
        return jnp.where(holds(signed(tried)), tried, found)

    return signed(lax.fori_loop(0, num_bits, set_bit, jnp.zeros(rows, unsigned)))
