"""The tokens before a draw, and their counts."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Int
from jaxinfer.ops.rows import add_in_rows


class History(NamedTuple):
    """The committed tokens of B rows and, in a draft tree, the ancestors of its M nodes.

    ``tokens_BS`` holds prompt and output; slots from ``lengths_B`` on are never read. ``ancestors_BMM[b, m]`` marks the
    nodes on the path to node m, including m. Node 0 is the last committed token and is not counted again. Without a
    tree both node fields are None, and every node has only the committed tokens. ``grammar_states_BM`` is the state of
    the row's grammar after each node, or None where grammars do not count.
    """

    tokens_BS: Int[Array, "B S"]
    prompt_lengths_B: Int[Array, "B"]
    lengths_B: Int[Array, "B"]
    node_tokens_BM: Int[Array, "B M"] | None = None
    ancestors_BMM: Bool[Array, "B M M"] | None = None
    grammar_states_BM: Int[Array, "B #M"] | None = None


def prompt_counts(history: History, vocab_size: int) -> Int[Array, "B V"]:
    """Count each token in the prompt."""
    slots_S = jnp.arange(history.tokens_BS.shape[1])
    return _counts(history.tokens_BS, slots_S < history.prompt_lengths_B[:, None], vocab_size)


def output_counts(history: History, vocab_size: int) -> Int[Array, "B #M V"]:
    """Count each token in the output of each node: the committed output, then the node's path in the tree."""
    slots_S = jnp.arange(history.tokens_BS.shape[1])
    is_output_BS = (slots_S >= history.prompt_lengths_B[:, None]) & (slots_S < history.lengths_B[:, None])
    committed_BV = _counts(history.tokens_BS, is_output_BS, vocab_size)
    if history.node_tokens_BM is None or history.ancestors_BMM is None:
        return committed_BV[:, None]
    num_nodes = history.node_tokens_BM.shape[1]
    is_drafted_BMM = history.ancestors_BMM & (jnp.arange(num_nodes) > 0)
    path_tokens_BMM = jnp.broadcast_to(history.node_tokens_BM[:, None], is_drafted_BMM.shape)
    return committed_BV[:, None] + _counts(path_tokens_BMM, is_drafted_BMM, vocab_size)


def _counts(tokens: Int[Array, "*rows S"], counted: Bool[Array, "*rows S"], vocab_size: int) -> Int[Array, "*rows V"]:
    rows = tokens.shape[:-1]
    # An id beyond the vocabulary is dropped. A negative id would wrap around, so it must be replaced.
    safe = jnp.where(counted & (tokens >= 0), tokens, vocab_size).reshape(-1, tokens.shape[-1])
    counts = jnp.zeros((safe.shape[0], vocab_size), jnp.int32)
    counts = add_in_rows(counts, safe, jnp.ones_like(safe))
    return counts.reshape(*rows, vocab_size)
