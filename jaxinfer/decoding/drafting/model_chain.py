"""What a chain of drafts takes of a draft model: its logits after the text, then after one draft after the other."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.state import DecodeState
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int
from jaxinfer.ops.masks import causal_ancestors


@dataclass(frozen=True)
class ModelChain:
    """A draft model on a state's texts, of which its cache holds all but the last ``catch_up`` tokens, or more.

    `first_logits` and `next_logits` are those that `jaxinfer.decoding.drafting.chain.draft_chain` asks for; what goes
    along is the cache.
    """

    drafter: Model
    state: DecodeState
    catch_up: int

    def first_logits(self, token_B: Int[Array, " B"], index: Any, cache: LayeredCache) -> tuple[Array, Any]:
        """Return the logits after the current tokens ``[B, V]``, and the cache with all tokens up to them."""
        # At the start of a short text there are fewer; then what follows the current token is written too, and
        # written over by the drafts.
        start_B = self.state.lengths_B - 1
        first_B = jnp.maximum(start_B - self.catch_up + 1, 0)
        places_BT = first_B[:, None] + jnp.arange(self.catch_up, dtype=first_B.dtype)[None, :]
        tokens_BT = jnp.take_along_axis(self.state.tokens_BS, places_BT, axis=1, mode="clip")
        return self._run(tokens_BT, first_B, start_B - first_B, cache)

    def next_logits(self, token_B: Int[Array, " B"], index: Any, cache: LayeredCache) -> tuple[Array, Any]:
        """Return the logits after the draft at ``index`` after the current token, and the cache with it."""
        start_B = self.state.lengths_B - 1
        return self._run(token_B[:, None], start_B + index, jnp.zeros_like(start_B), cache)

    def _run(self, tokens_BT: Any, first_B: Any, last_B: Any, cache: LayeredCache) -> tuple[Array, Any]:
        positions_BT = first_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=first_B.dtype)[None, :]
        placements = cache.place(first_B, causal_ancestors(tokens_BT.shape[1])[None])
        contexts_B = self.state.context_lengths_B
        hidden_BTD, cache = self.drafter.forward(tokens_BT, positions_BT, cache, placements, contexts_B)
        return self.drafter.logits(jnp.take_along_axis(hidden_BTD, last_B[:, None, None], axis=1)[:, 0]), cache
