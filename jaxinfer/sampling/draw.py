"""Draws tokens: the maximum of the transformed logits plus keyed Gumbel noise."""

import math

import jax.numpy as jnp
from jax import lax

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.best import best_places, finds_best
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.grammar import best_that_may_come, keep_to_grammar, restricts_any
from jaxinfer.sampling.history import History
from jaxinfer.sampling.mass import log_softmax, log_sum_exp
from jaxinfer.sampling.noise import ROLE_TARGET, gumbel, vocabulary_ids
from jaxinfer.sampling.transforms import edits_numbers, grammar_states, transform_logits


def draw(
    logits_BMV: Float[Array, "B M V"],
    positions_BM: Int[Array, "B M"],
    arrays: SamplingArrays,
    history: History,
    role: int | Int[Array, ""] = ROLE_TARGET,
    backend: Backend | None = None,
) -> Int[Array, "B M"]:
    """Draw each node's token from its raw logits; ties go to the lowest id, temperature 0 uses no noise.

    Positions are the drawn tokens' positions in prompt + output; with the row's key they determine the noise. The
    logits' ``backend`` may have kernels for it.
    """

    def drawn() -> Array:
        transformed_BMV = transform_logits(logits_BMV, arrays, history, positions_BM, backend)
        return lax.cond(
            arrays.samples_B().any(),
            lambda: best_token(add_noise(transformed_BMV, positions_BM, arrays, role), backend),
            lambda: best_token(transformed_BMV, backend),
        )

    keeps_numbers = ~arrays.samples_B().any() & ~edits_numbers(arrays, history, positions_BM)
    states_BM = grammar_states(arrays, history)
    if states_BM is None:
        return lax.cond(keeps_numbers, lambda: best_token(logits_BMV, backend), drawn)
    return lax.cond(keeps_numbers, lambda: _best_that_may_come(logits_BMV, arrays, states_BM, backend), drawn)


def _best_that_may_come(
    logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays, states_BM: Int[Array, "B #M"], backend: Backend | None
) -> Int[Array, "B M"]:
    """Return each node's token of the highest raw logit that the row's grammar, if it has one, lets come."""

    def among_some() -> Array:
        all_have_classes = arrays.grammar_classes_BV.shape[1] == logits_BMV.shape[-1]
        if all_have_classes and _has_kernel(logits_BMV, backend):
            return best_that_may_come(logits_BMV, arrays, states_BM)
        return best_token(keep_to_grammar(logits_BMV, arrays, states_BM), backend)

    return lax.cond(restricts_any(states_BM), among_some, lambda: best_token(logits_BMV, backend))


def drawing_distribution(
    logits_BMV: Float[Array, "B M V"],
    positions_BM: Int[Array, "B M"],
    arrays: SamplingArrays,
    history: History,
    backend: Backend | None = None,
) -> Float[Array, "B M V"]:
    """Return the log-probabilities that `draw` draws from; at temperature 0 one token has all the probability."""
    transformed_BMV = transform_logits(logits_BMV, arrays, history, positions_BM, backend)
    is_best_BMV = best_token(transformed_BMV)[..., None] == vocabulary_ids(logits_BMV.shape[-1])
    greedy_BMV = jnp.where(is_best_BMV, 0.0, -jnp.inf).astype(transformed_BMV.dtype)
    return jnp.where(arrays.samples_B()[:, None, None], log_softmax(transformed_BMV, backend), greedy_BMV)


def add_noise(
    transformed_BMV: Float[Array, "B M V"],
    positions_BM: Int[Array, "B M"],
    arrays: SamplingArrays,
    role: int | Int[Array, ""] = ROLE_TARGET,
) -> Float[Array, "B M V"]:
    """Add the Gumbel noise of (key, position, role, token id) to the rows that sample."""
    noise_BMV = gumbel(arrays.key_data_B2[:, None], positions_BM, role, vocabulary_ids(transformed_BMV.shape[-1]))
    return transformed_BMV + jnp.where(arrays.samples_B()[:, None, None], noise_BMV, 0)


def best_token(scores: Float[Array, "*rows V"], backend: Backend | None = None) -> Int[Array, "*rows"]:
    """Return the id of the highest score, the lowest id among equals.

    If the ``backend`` has CPU kernels and no mesh, one of them does the search. A row with NaN gets an arbitrary id.
    """
    lead, vocab_size = scores.shape[:-1], scores.shape[-1]
    if _has_kernel(scores, backend):
        return best_places(scores.reshape(-1, vocab_size)).reshape(lead)
    # Two reductions, because an argmax reduces pairs and is several times slower on XLA's CPU backend. The barrier
    # makes both read the same values.
    scores = lax.optimization_barrier(scores)
    is_best = scores == jnp.max(scores, axis=-1, keepdims=True)
    ids = jnp.min(jnp.where(is_best, vocabulary_ids(vocab_size), vocab_size), axis=-1)
    # NaN equals nothing; the id must still be in the vocabulary.
    return jnp.minimum(ids, vocab_size - 1)


def _has_kernel(scores: Float[Array, "*rows V"], backend: Backend | None) -> bool:
    has_kernels = backend is not None and backend.cpu_kernels and backend.mesh is None
    return has_kernels and scores.dtype == jnp.float32 and finds_best(math.prod(scores.shape[:-1]), scores.shape[-1])


def log_probabilities(
    logits_BMV: Float[Array, "B M V"], tokens_BM: Int[Array, "B M"], backend: Backend | None = None
) -> Float[Array, "B M"]:
    """Return the tokens' log-softmax of the raw, untempered logits."""
    if logits_BMV.dtype != jnp.float64:
        logits_BMV = logits_BMV.astype(jnp.float32)
    chosen_BM = jnp.take_along_axis(logits_BMV, tokens_BM[..., None], axis=-1, mode="clip")[..., 0]
    return chosen_BM - log_sum_exp(logits_BMV, backend)
