"""The programs that read whole texts: the log-probabilities of their tokens, and their final hidden states."""

import jax
import jax.numpy as jnp

from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.top_k import top_k
from jaxinfer.sampling.draw import log_probabilities
from jaxinfer.sampling.mass import log_sum_exp

# Tokens whose logits there are at a time: of a whole text they would take more memory than the model.
_BLOCK = 64


def text_scores(
    decoder: Decoder, num_best: int, params: Params, tokens_BT: Int[Array, "B T"], lengths_B: Int[Array, " B"]
) -> tuple[Float[Array, "B T"], Int[Array, "B T best"], Float[Array, "B T best"]]:
    """Return the log-probability of each token's successor, and the ``num_best`` most probable successors with theirs.

    By the raw logits, in float32. T is a power of two. What stands from the last token of a text on means nothing.
    """
    hidden_BTD, backend = hidden_states(decoder, params, tokens_BT, lengths_B), decoder.backend
    model, (batch, num_tokens) = Model(decoder, params), tokens_BT.shape
    size = min(_BLOCK, num_tokens)

    def in_blocks(values: Array) -> Array:
        return jnp.moveaxis(values.reshape(batch, num_tokens // size, size, *values.shape[2:]), 1, 0)

    def joined(values: Array) -> Array:
        return jnp.moveaxis(values, 0, 1).reshape(batch, num_tokens, *values.shape[3:])

    def score(block: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        hidden_BTD, next_BT = block
        logits_BTV = model.logits(hidden_BTD)[..., : decoder.config.num_tokens]
        if logits_BTV.dtype != jnp.float64:
            logits_BTV = logits_BTV.astype(jnp.float32)
        logprobs_BT = log_probabilities(logits_BTV, next_BT, backend).astype(jnp.float32)
        if not num_best:
            nothing = jnp.zeros((*next_BT.shape, 0))
            return logprobs_BT, nothing.astype(jnp.int32), nothing.astype(jnp.float32)
        best, ids = top_k(logits_BTV, num_best, backend)
        best = best - log_sum_exp(logits_BTV, backend)[..., None]
        return logprobs_BT, ids.astype(jnp.int32), best.astype(jnp.float32)

    # The last token's successor is the first one; nobody reads it.
    blocks = in_blocks(hidden_BTD), in_blocks(jnp.roll(tokens_BT, -1, axis=1))
    logprobs, ids, best = jax.lax.map(score, blocks)
    return joined(logprobs), joined(ids), joined(best)


def hidden_states(
    decoder: Decoder, params: Params, tokens_BT: Int[Array, "B T"], lengths_B: Int[Array, " B"]
) -> Float[Array, "B T D"]:
    """Return the hidden states of whole texts after the final norm, as prefill computes them."""
    batch, num_slots = tokens_BT.shape
    cache = create_cache(decoder.config, batch, num_slots, decoder.backend)
    return forward_prompt(Model(decoder, params), tokens_BT, lengths_B, cache, prefill_chunk(decoder.backend))[0]
