"""Grammars on the device: the state after each token, and the tokens that may come next."""

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.cpu_kernels.best import best_places_of_classes
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


def states_after_path(
    arrays: SamplingArrays,
    states_BM: Int[Array, "B M"],
    path_BJ: Int[Array, "B J"],
    tokens_BJ: Int[Array, "B J"],
    taken_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
) -> Int[Array, "B"]:
    """Return each row's state after the first ``count_B`` <= ``taken_B`` tokens that a path through a tree gives.

    The path's nodes have ``states_BM``; all but the last of its ``taken_B`` tokens are those of its nodes after the
    root.
    """
    if not has_grammars(arrays):
        return states_BM[:, 0]
    ends_B = count_B == taken_B
    last_B1 = jnp.where(ends_B, count_B - 1, count_B)[:, None]
    node_B1 = jnp.take_along_axis(path_BJ, last_B1, axis=1)
    there_B = jnp.take_along_axis(states_BM, node_B1, axis=1)[:, 0]
    token_B = jnp.take_along_axis(tokens_BJ, last_B1, axis=1)[:, 0]
    return jnp.where(ends_B, states_after(arrays, there_B, token_B), there_B)


def only_tokens(arrays: SamplingArrays, states_B: Int[Array, "B"]) -> Int[Array, "B"]:
    """Return the token that must come next in each row, or a negative number."""
    found_B1 = jnp.take_along_axis(arrays.grammar_only_BN, jnp.maximum(states_B, 0)[:, None], axis=1)
    return jnp.where(states_B == FREE, FREE, found_B1[:, 0])


def keep_to_grammar(
    logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays, states_BM: Int[Array, "B #M"]
) -> Float[Array, "B M V"]:
    """Drop the tokens that may not come next; what may come stays possible, whatever the row's logit bias."""
    states_BM = jnp.broadcast_to(states_BM, logits_BMV.shape[:2])
    may_BMV = _of_tokens(_may_come(arrays, states_BM), arrays.grammar_classes_BV)
    # Tokens of no vocabulary, which only fill a matrix, have no class, and never come.
    num_filling = logits_BMV.shape[-1] - may_BMV.shape[-1]
    may_BMV = jnp.pad(may_BMV, ((0, 0), (0, 0), (0, num_filling)))
    is_free_BM1 = (states_BM == FREE)[..., None]
    bounded_BMV = jnp.where(is_free_BM1, logits_BMV, jnp.maximum(logits_BMV, _LEAST))
    return jnp.where(may_BMV, bounded_BMV, -jnp.inf)


def best_that_may_come(
    logits_BMV: Float[Array, "B M V"], arrays: SamplingArrays, states_BM: Int[Array, "B #M"]
) -> Int[Array, "B M"]:
    """Return the token of the highest logit that may come at each node, by a kernel; no row has a logit bias.

    Check `best.finds_best` first.
    """
    states_BM = jnp.broadcast_to(states_BM, logits_BMV.shape[:2])
    added_BMC = jnp.where(_may_come(arrays, states_BM), 0.0, -jnp.inf).astype(jnp.float32)
    rows, num_classes = states_BM.size, added_BMC.shape[-1]
    scores_RV, added_RC = logits_BMV.reshape(rows, -1), added_BMC.reshape(rows, num_classes)
    return best_places_of_classes(scores_RV, arrays.grammar_classes_BV, added_RC).reshape(states_BM.shape)


def _may_come(arrays: SamplingArrays, states_BM: Int[Array, "B M"]) -> Bool[Array, "B M C"]:
    """Tell which classes of tokens may come in a state."""
    next_BMC = jax.vmap(lambda next_NC, states_M: next_NC[states_M])(arrays.grammar_next_BNC, jnp.maximum(states_BM, 0))
    return (next_BMC >= 0) | (states_BM == FREE)[..., None]


def _of_tokens(may_BMC: Bool[Array, "B M C"], classes_BV: Int[Array, "B V"]) -> Bool[Array, "B M V"]:
    """Tell of each token at each node what holds for its class.

    A token's class is looked up once for up to 32 nodes, as bits of one number.
    """
    batch, num_nodes, num_classes = may_BMC.shape
    width = min(32, num_nodes)
    num_words = -(-num_nodes // width)
    may_BMC = jnp.pad(may_BMC, ((0, 0), (0, num_words * width - num_nodes), (0, 0)))
    shifts_M1 = jnp.arange(width, dtype=jnp.uint32)[:, None]
    bits_BWMC = may_BMC.reshape(batch, num_words, width, num_classes).astype(jnp.uint32) << shifts_M1
    words_BWC = jnp.sum(bits_BWMC, axis=2, dtype=jnp.uint32)
    words_BWV = jax.vmap(lambda words_WC, classes_V: jnp.take(words_WC, classes_V, axis=1, mode="clip"))(
        words_BWC, classes_BV
    )
    # Otherwise each node would look the classes up.
    words_BWV = jax.lax.optimization_barrier(words_BWV)
    may_BWMV = (words_BWV[:, :, None] >> shifts_M1) & 1 != 0
    return may_BWMV.reshape(batch, num_words * width, -1)[:, :num_nodes]


def restricts_any(states_BM: Int[Array, "B M"]) -> Bool[Array, ""]:
    """Tell whether any row has a grammar."""
    return (states_BM != FREE).any()
