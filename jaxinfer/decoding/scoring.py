"""The programs that read whole texts: the log-probabilities of their tokens, and their final hidden states."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.models.value_head import head_values
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.top_k import top_k
from jaxinfer.sampling.draw import log_probabilities
from jaxinfer.sampling.mass import log_sum_exp

# Tokens whose logits there are at a time: of a whole text they would take more memory than the model.
_BLOCK = 64


def text_scores(
    decoder: Decoder,
    num_best: int,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    adapters_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T"], Int[Array, "B T best"], Float[Array, "B T best"]]:
    """Return the log-probability of each token's successor, and the ``num_best`` most probable successors with theirs.

    By the raw logits, in float32. T is a power of two. What stands from the last token of a text on means nothing.
    """
    hidden_BTD, backend = hidden_states(decoder, params, tokens_BT, lengths_B, adapters_B), decoder.backend
    model = Model.adapted(decoder, params, adapters_B)

    def score(hidden_BTD: Array, next_BT: Array) -> tuple[Array, Array, Array]:
        logits_BTV = _logits(model, hidden_BTD)
        logprobs_BT = log_probabilities(logits_BTV, next_BT, backend).astype(jnp.float32)
        if not num_best:
            nothing = jnp.zeros((*next_BT.shape, 0))
            return logprobs_BT, nothing.astype(jnp.int32), nothing.astype(jnp.float32)
        best, ids = top_k(logits_BTV, num_best, backend)
        best = best - log_sum_exp(logits_BTV, backend)[..., None]
        return logprobs_BT, ids.astype(jnp.int32), best.astype(jnp.float32)

    return _in_blocks(score, hidden_BTD, _successors(tokens_BT))


def text_values(
    decoder: Decoder,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    adapters_B: Int[Array, " B"] | None,
    head: Params,
) -> Float[Array, "B T"]:
    """Return by a value head what a text is worth at each token, in float32."""
    hidden_BTD = hidden_states(decoder, params, tokens_BT, lengths_B, adapters_B)
    return head_values(head, hidden_BTD, decoder.backend).astype(jnp.float32)


def text_divergence(
    decoders: tuple[Decoder, Decoder],
    params: tuple[Params, Params],
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Bool[Array, "B T"]]:
    """Compare what two models of one vocabulary say of each token's successor: a reference, then another.

    Return the other's log-probability of the successor, the divergence ``KL(reference || other)`` in nats, and whether
    the same token is the most probable one. As `text_scores` otherwise.
    """
    models = [Model(*each) for each in zip(decoders, params)]
    hidden = [hidden_states(*each, tokens_BT, lengths_B) for each in zip(decoders, params)]

    def compare(reference_BTD: Array, other_BTD: Array, next_BT: Array) -> tuple[Array, Array, Array]:
        logits, other_logits = (_logits(model, each) for model, each in zip(models, (reference_BTD, other_BTD)))
        known, found = jax.nn.log_softmax(logits), jax.nn.log_softmax(other_logits)
        divergence_BT = jnp.sum(jnp.exp(known) * (known - found), axis=-1)
        same_BT = jnp.argmax(logits, axis=-1) == jnp.argmax(other_logits, axis=-1)
        return jnp.take_along_axis(found, next_BT[..., None], axis=-1)[..., 0], divergence_BT, same_BT

    return _in_blocks(compare, *hidden, _successors(tokens_BT))


def _successors(tokens_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the token after each; the last token's is the first one, and nobody reads what comes of it."""
    return jnp.roll(tokens_BT, -1, axis=1)


def _logits(model: Model, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Return the logits of all tokens that may be drawn, in float32 or wider."""
    logits_BTV = model.logits(hidden_BTD)[..., : model.config.num_tokens]
    return logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))


def _in_blocks(function: Callable[..., tuple[Array, ...]], *values: Array) -> Any:
    """Map a function over arrays ``[B, T, ...]``, of which it gets a block of tokens at a time."""
    batch, num_tokens = values[0].shape[:2]
    size = min(_BLOCK, num_tokens)

    def cut(value: Array) -> Array:
        return jnp.moveaxis(value.reshape(batch, num_tokens // size, size, *value.shape[2:]), 1, 0)

    def joined(value: Array) -> Array:
        return jnp.moveaxis(value, 0, 1).reshape(batch, num_tokens, *value.shape[3:])

    return tuple(map(joined, jax.lax.map(lambda block: function(*block), tuple(map(cut, values)))))


def hidden_states(
    decoder: Decoder,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    adapters_B: Int[Array, " B"] | None = None,
) -> Float[Array, "B T D"]:
    """Return the hidden states of whole texts after the final norm, as prefill computes them.

    ``adapters_B`` are the texts' loaded adapters; None is none.
    """
    model = Model.adapted(decoder, params, adapters_B)
    batch, num_slots = tokens_BT.shape
    cache = create_cache(decoder.config, batch, num_slots, decoder.backend)
    chunk = prefill_chunk(decoder.backend, tokens_BT.shape[1])
    return forward_prompt(model, tokens_BT, lengths_B, cache, chunk)[0]
