"""How often each head's guesses are right on texts of the model: what a tree is built from."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.batch import prompt_bucket
from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.drafters.heads import head_logits, head_states, is_conditioned, top_tokens
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int, Params


def measure_accuracies(
    decoder: Decoder, params: Params, head_params: Params, texts: Sequence[Sequence[int]], num_ranks: int = 10
) -> list[list[float]]:
    """Return ``accuracies[k][r]``: how often the token that head k ranks r-th stands where the head looks.

    ``head_params`` are heads as a resolved `jaxinfer.decoding.strategies.medusa.Medusa` has them, ``texts`` token ids
    as the model writes them. Heads that are conditioned on drafted tokens read the text's own, so that theirs are the
    chances of a node whose ancestors are all right. `jaxinfer.decoding.trees.static.build_tree` takes both kinds.
    """
    num_heads = len(head_params["heads"])
    if not texts or max(len(text) for text in texts) < num_heads + 2:
        raise InvalidOption(f"accuracies of {num_heads} heads are measured on texts of {num_heads + 2} tokens or more")
    hits_JR, tries_J = np.zeros((num_heads, num_ranks)), np.zeros((num_heads, 1))
    for text in texts:
        tokens_1T = np.zeros((1, prompt_bucket(len(text))), np.int32)
        tokens_1T[0, : len(text)] = text
        found_JR = _count_hits(
            decoder, num_ranks, params, head_params, jnp.asarray(tokens_1T), jnp.asarray([len(text)])
        )
        hits_JR += np.asarray(found_JR)
        tries_J += np.maximum(len(text) - 2 - np.arange(num_heads), 0)[:, None]
    return (hits_JR / np.maximum(tries_J, 1)).tolist()


@partial(jax.jit, static_argnums=(0, 1))
def _count_hits(
    decoder: Decoder,
    num_ranks: int,
    params: Params,
    head_params: Params,
    tokens_1T: Int[Array, "1 T"],
    length_1: Int[Array, "1"],
) -> Int[Array, "heads ranks"]:
    """Count over one text; its length is padded to few different ones."""
    model, num_tokens = Model(decoder, params), tokens_1T.shape[1]
    cache = create_cache(decoder.config, 1, num_tokens, decoder.backend)
    chunk = prefill_chunk(model.decoder.backend, tokens_1T.shape[1])
    hidden_1TD, _ = forward_prompt(model, tokens_1T, length_1, cache, chunk)
    place_T = jnp.arange(num_tokens)

    def ahead(distance: int) -> Any:
        return jnp.roll(tokens_1T, -distance, axis=1)

    path: list[Any] = []
    counts = []
    for index, head in enumerate(head_params["heads"]):
        if is_conditioned(head_params):
            path.append(model.embedded(ahead(index + 1), (place_T + index + 1)[None]))
        along = jnp.concatenate(path, axis=-1) if path else None
        states_1TD = head_states(head, hidden_1TD, along, decoder.backend)
        best_1TR = top_tokens(
            head_params, head_logits(model, head_params, index, states_1TD), num_ranks, decoder.backend
        )
        # The state at t is followed by the current token, and that by the first that a head looks for.
        is_hit_1TR = best_1TR == ahead(index + 2)[..., None]
        is_inside_1T = place_T[None] + index + 2 < length_1[:, None]
        counts.append(jnp.sum(is_hit_1TR & is_inside_1T[..., None], axis=(0, 1)))
    return jnp.stack(counts)
