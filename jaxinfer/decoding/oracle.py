"""Plain decoding as an oracle: what it draws after every beginning of a given text, and by what margin."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxinfer.cache.layouts import CacheLayout
from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.draw import add_noise, draw
from jaxinfer.sampling.history import History
from jaxinfer.sampling.margins import margins
from jaxinfer.sampling.transforms import edit_logits, temper


class Retelling(NamedTuple):
    """For each output token of a text, what plain decoding draws there, and by what margin.

    In rows that drop tokens (top-k, top-p, min-p) the margin is the least change of logits that draws any other token
    (`jaxinfer.sampling.margins`); in all others the lead of the drawn token over the text's own one or the rival, if
    that is the larger: 0 where all three are one.
    """

    draws_BM: Int[Array, "B M"]
    margins_BM: Float[Array, "B M"]


def retell(
    decoder: Decoder,
    layout: CacheLayout,
    params: Params,
    text_BT: Int[Array, "B T"],
    prompt_lengths_B: Int[Array, " B"],
    lengths_B: Int[Array, " B"],
    context_lengths_B: Int[Array, " B"],
    rivals_BM: Int[Array, "B M"],
    sampling: SamplingArrays,
) -> Retelling:
    """Draw all of M output tokens again, each after the text before it, in one forward pass.

    Since noise belongs to positions, this is what plain decoding gives that is restarted anywhere in the text. Entries
    past a row's length mean nothing.
    """
    model, num_outputs = Model(decoder, params), rivals_BM.shape[1]
    batch, num_tokens = text_BT.shape
    cache = create_cache(decoder.config, batch, num_tokens, decoder.backend, layout=layout)
    chunk = prefill_chunk(decoder.backend, num_tokens)
    hidden_BTD, _ = forward_prompt(model, text_BT, lengths_B, cache, chunk, context_lengths_B)
    offset_M = jnp.arange(num_outputs, dtype=jnp.int32)
    before_BM = jnp.minimum(prompt_lengths_B[:, None] - 1 + offset_M, num_tokens - 1)
    positions_BM = prompt_lengths_B[:, None] + offset_M
    logits_BMV = model.logits(jnp.take_along_axis(hidden_BTD, before_BM[..., None], axis=1))
    # The output is a tree without branches below the prompt's last token.
    is_before_BMM = jnp.broadcast_to(jnp.tril(jnp.ones((num_outputs, num_outputs), bool)), (batch, *offset_M.shape * 2))
    node_tokens_BM = jnp.take_along_axis(text_BT, before_BM, axis=1)
    history = History(text_BT, prompt_lengths_B, prompt_lengths_B, node_tokens_BM, is_before_BMM)
    draws_BM = draw(logits_BMV, positions_BM, sampling, history)
    scores_BMV = add_noise(
        temper(edit_logits(logits_BMV, sampling, history, positions_BM), sampling), positions_BM, sampling
    )

    def scores_of(tokens_BM: Int[Array, "B M"]) -> Array:
        return jnp.take_along_axis(scores_BMV, tokens_BM[..., None], axis=-1)[..., 0]

    own_BM = jnp.take_along_axis(text_BT, jnp.minimum(positions_BM, num_tokens - 1), axis=1)
    leads_BM = scores_of(draws_BM) - jnp.minimum(scores_of(own_BM), scores_of(rivals_BM))
    margins_BM = margins(logits_BMV, positions_BM, sampling, history)
    return Retelling(draws_BM, jnp.where(sampling.truncates_B()[:, None], margins_BM, leads_BM))
