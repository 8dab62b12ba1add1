"""Grammars on the device: the state after each token, and the tokens that may come next."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.sampling.arrays import SamplingArrays

# Of a row without a grammar, and after a token that may not come: then all tokens may.
FREE = -1
# What a token's logit is at least where only tokens that a logit bias bans may come.
_LEAST = -1e30


def has_grammars(arrays: SamplingArrays) -> bool:
    """Tell whether rows may have grammars; where none can, programs hold nothing of them."""
    return arrays.grammar_next_BNC.shape[1] > 0


def states_after(arrays: SamplingArrays, states_B: Int[Array, "B"], tokens_B: Int[Array, "B"]) -> Int[Array, "B"]:
    """Return each row's state after one more token."""
    if not has_grammars(arrays):
        return states_B
    safe_B = jnp.clip(tokens_B, 0, arrays.grammar_classes_BV.shape[1] - 1)

    def after(next_NC: Array, classes_V: Array, state: Array, token: Array) -> Array:
        return next_NC[jnp.maximum(state, 0), classes_V[token]].astype(jnp.int32)

    found_B = jax.vmap(after)(arrays.grammar_next_BNC, arrays.grammar_classes_BV, states_B, safe_B)
    return jnp.where(states_B == FREE, FREE, found_B)


def states_along(
    arrays: SamplingArrays, states_B: Int[Array, "B"], tokens_BM: Int[Array, "B M"], count_B: Int[Array, "B"]
) -> Int[Array, "B"]:
    """Return each row's state after the first ``count_B`` of some tokens."""
    if not has_grammars(arrays):
        return states_B

    def advance(index: Array, states_B: Array) -> Array:
        return jnp.where(index < count_B, states_after(arrays, states_B, tokens_BM[:, index]), states_B)

    return jax.lax.fori_loop(0, tokens_BM.shape[1], advance, states_B)


def states_at_nodes(
    arrays: SamplingArrays,
    states_B: Int[Array, "B"],
    tokens_BM: Int[Array, "B M"],
    parents_BM: Int[Array, "B M"],
) -> Int[Array, "B M"]:
    """Return the state at each node of a tree, whose root is the last token that ``states_B`` counts."""
    num_nodes = tokens_BM.shape[1]
    states_BM = jnp.broadcast_to(states_B[:, None], tokens_BM.shape)
    if not has_grammars(arrays):
        return states_BM

    def step(node: Array, states_BM: Array) -> Array:
        # A parent stands before its children.
        parent_B1 = jnp.take_along_axis(parents_BM, jnp.broadcast_to(node, (states_BM.shape[0], 1)), axis=1)
        above_B = jnp.take_along_axis(states_BM, parent_B1, axis=1)[:, 0]
        return states_BM.at[:, node].set(states_after(arrays, above_B, tokens_BM[:, node]))

    return jax.lax.fori_loop(1, num_nodes, step, states_BM)


def only_tokens(arrays: SamplingArrays, states_B: Int[Array, "B"]) -> Int[Array, "B"]:
    """Return the token that must come next in each row, or a negative number."""
    found_B1 = jnp.take_along_axis(arrays.grammar_only_BN, jnp.maximum(states_B, 0)[:, None], axis=1)
    return jnp.where(states_B == FREE, FREE, found_B1[:, 0])


def keep_to_grammar(
    logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays, states_BM: Int[Array, "B #M"]
) -> Float[Array, "B M V"]:
    """Drop the tokens that may not come next; what may come stays possible, whatever the row's logit bias."""

    def keep(logits_MV: Array, next_NC: Array, classes_V: Array, states_M: Array) -> Array:
        may_MC = (next_NC >= 0)[jnp.maximum(states_M, 0)] | (states_M == FREE)[:, None]
        may_MV = jnp.take(may_MC, classes_V, axis=1, mode="clip")
        # Tokens of no vocabulary, which only fill a matrix, have no class.
        bounded_MV = jnp.where((states_M == FREE)[:, None], logits_MV, jnp.maximum(logits_MV, _LEAST))
        return jnp.where(may_MV, bounded_MV, -jnp.inf)

    states_BM = jnp.broadcast_to(states_BM, logits_BMV.shape[:2])
    return jax.vmap(keep)(logits_BMV, arrays.grammar_next_BNC, arrays.grammar_classes_BV, states_BM)


def restricts_any(states_BM: Int[Array, "B M"]) -> Bool[Array, ""]:
    """Tell whether any row has a grammar."""
    return (states_BM != FREE).any()
