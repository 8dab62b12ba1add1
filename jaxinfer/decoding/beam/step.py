"""One step of a batch of beam searches, and prefill: pure functions from state to state.

The rules are those of ``_beam_search`` in transformers 5, kept for each search alone: there, a search of a batch may
run on while others do, without a change to its results.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.decoding.beam.state import OUT_OF_RUNNING, BeamState, Ended, SearchRule, follow_parents, spread_rows
from jaxinfer.decoding.step import forward_prompt
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import DATA, TENSOR, Array, Bool, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rows import take_pairs
from jaxinfer.ops.top_k import top_k
from jaxinfer.sampling.mass import log_sum_exp
from jaxinfer.sampling.transforms import edit_logits


def prefill_beams(
    decoder: Decoder,
    num_tokens: int,
    chunk: int,
    num_candidates: int,
    params: Params,
    rule: SearchRule,
    state: BeamState,
) -> BeamState:
    """Run every prompt once, hand its cache to all texts of its search, and let them begin.

    The state's own cache is only written; ``num_tokens`` spans the longest prompt.
    """
    model = Model.adapted(decoder, params, state.adapters_B)
    batch, _, num_slots = state.tokens_BWS.shape
    cache = create_cache(decoder.config, batch, num_slots, decoder.backend, headroom=1)
    prompt_BT, lengths_B = state.tokens_BWS[:, 0, :num_tokens], state.lengths_B
    hidden_BTD, cache = forward_prompt(model, prompt_BT, lengths_B, cache, chunk)
    hidden_BD = jnp.take_along_axis(hidden_BTD, lengths_B[:, None, None] - 1, axis=1)[:, 0]
    logits_QV = state.each_row(model.logits(hidden_BD))
    return extend(decoder, rule, state._replace(cache=spread_rows(cache, state.width)), logits_QV, num_candidates)


def renew_beams(decoder: Decoder, num_tokens: int, chunk: int, params: Params, state: BeamState) -> BeamState:
    """Compute the cache of waiting searches anew, for texts as long as they are now; ``num_tokens`` spans them."""
    tokens_QT = state.tokens_BWS.reshape(-1, state.tokens_BWS.shape[-1])[:, :num_tokens]
    held_Q = state.each_row(jnp.where(state.waits_B, state.lengths_B - 1, 0))
    lengths_B = jnp.where(state.waits_B, state.lengths_B, state.context_lengths_B)
    cache = create_cache(decoder.config, len(held_Q), state.tokens_BWS.shape[-1], decoder.backend, headroom=1)
    model = Model.adapted(decoder, params, state.each_row(state.adapters_B))
    _, cache = forward_prompt(model, tokens_QT, held_Q, cache, chunk, state.each_row(lengths_B))
    return state._replace(cache=cache, context_lengths_B=lengths_B, reach_B=state.limits_B)


def run_beams(
    decoder: Decoder, num_candidates: int, params: Params, rule: SearchRule, state: BeamState, max_steps: Int[Array, ""]
) -> BeamState:
    """Run steps until every search has ended or waits, at most ``max_steps`` of them."""
    model = Model.adapted(decoder, params, state.each_row(state.adapters_B))

    def goes_on(carry: tuple[Any, BeamState]) -> Any:
        step, state = carry
        return (step < max_steps) & (~state.done_B & ~state.waits_B).any()

    def advance(carry: tuple[Any, BeamState]) -> tuple[Any, BeamState]:
        step, state = carry
        return step + 1, beam_step(model, rule, state, num_candidates)

    return jax.lax.while_loop(goes_on, advance, (jnp.int32(0), state))[1]


def beam_step(model: Model, rule: SearchRule, state: BeamState, num_candidates: int) -> BeamState:
    """Run the last tokens of all running texts through the model, and extend the texts."""
    tokens_QS, start_Q1 = state.history.tokens_BS, state.each_row(state.lengths_B)[:, None] - 1
    current_Q1 = jnp.take_along_axis(tokens_QS, start_Q1, axis=1)
    placements = state.cache.place(start_Q1[:, 0], jnp.ones((1, 1, 1), bool))
    contexts_Q = state.each_row(state.context_lengths_B)
    hidden_Q1D, cache = model.forward(current_Q1, start_Q1, state.cache, placements, contexts_Q)
    steps_B = state.steps_B + (~state.done_B & ~state.waits_B)
    state = state._replace(cache=cache, steps_B=steps_B)
    return extend(model.decoder, rule, state, model.logits(hidden_Q1D[:, 0]), num_candidates)


def extend(
    decoder: Decoder, rule: SearchRule, state: BeamState, logits_QV: Float[Array, "Q V"], num_candidates: int
) -> BeamState:
    """Extend the running texts by their best tokens: those that end compete for a place, the best others run on."""
    width, backend = state.width, decoder.backend
    is_still_B = state.done_B | state.waits_B
    if logits_QV.dtype != jnp.float64:
        logits_QV = logits_QV.astype(jnp.float32)
    # As plain decoding reports them, in every bit.
    log_p_QV = logits_QV - log_sum_exp(logits_QV, backend)[:, None]
    # Penalties change log-probabilities in a search, but logits in the greedy search that one beam is.
    edited_Q1V = edit_logits(
        (logits_QV if width == 1 else log_p_QV)[:, None],
        state.row_sampling,
        state.history,
        state.each_row(state.lengths_B)[:, None],
    )
    log_p_BWV, edited_BWV = (of_rows.reshape(-1, width, logits_QV.shape[-1]) for of_rows in (log_p_QV, edited_Q1V))
    totals_BWV = edited_BWV + state.scores_BW[..., None].astype(edited_BWV.dtype)
    # Of each text first: its best tokens, among which no padding of the vocabulary comes before a token. The barrier
    # keeps slices of the candidates apart, with which XLA's CPU backend would sort all of the vocabulary.
    of_text = min(num_candidates, decoder.config.num_tokens)
    totals_BWC, ids_BWC = jax.lax.optimization_barrier(top_k(totals_BWV, of_text, backend, (DATA, None, TENSOR)))
    totals_BC, place_BC = jax.lax.optimization_barrier(
        top_k(totals_BWC.reshape(-1, width * of_text), num_candidates, backend)
    )
    parents_BC = place_BC // of_text
    tokens_BC = jnp.take_along_axis(ids_BWC.reshape(-1, width * of_text), place_BC, axis=1)
    logprobs_BC = take_pairs(log_p_BWV, parents_BC, tokens_BC).astype(jnp.float32)
    lengths_B = state.lengths_B + 1
    ends_BC = (tokens_BC[..., None] == state.sampling.stop_ids_BE[:, None]).any(axis=-1) | (
        lengths_B >= state.limits_B
    )[:, None]

    # Only the best W candidates may end their text; the others are there so that W can run on whatever ends.
    new = _grown(state, parents_BC[:, :width], tokens_BC[:, :width], logprobs_BC[:, :width])
    scores_BW = totals_BC[:, :width] / _length_factor(state, rule, lengths_B)
    scores_BW = jnp.maximum(scores_BW, jnp.finfo(scores_BW.dtype).min)  # below all others, but above a free place
    counts_BW = ends_BC[:, :width] & ~is_still_B[:, None]
    lengths_BW = jnp.broadcast_to(lengths_B[:, None], scores_BW.shape)
    ended = _best_of(backend, state.ended, Ended(*new, lengths_BW, jnp.where(counts_BW, scores_BW, -jnp.inf)))

    scores_BW, chosen_BW = top_k(totals_BC + jnp.where(ends_BC, OUT_OF_RUNNING, 0), width, backend)
    parents_BW, tokens_BW, logprobs_BW = (
        jnp.take_along_axis(values_BC, chosen_BW, axis=1) for values_BC in (parents_BC, tokens_BC, logprobs_BC)
    )
    # A search that stands still keeps its texts and their rows.
    parents_BW = jnp.where(is_still_B[:, None], jnp.arange(width), parents_BW)
    tokens_BWS, logprobs_BWS = _grown(state, parents_BW, tokens_BW, logprobs_BW)
    grown = state._replace(
        tokens_BWS=tokens_BWS,
        logprobs_BWS=logprobs_BWS,
        scores_BW=jnp.where(is_still_B[:, None], state.scores_BW, scores_BW.astype(state.scores_BW.dtype)),
        lengths_B=jnp.where(is_still_B, state.lengths_B, lengths_B),
        ended=ended,
        cache=state.cache if width == 1 else follow_parents(state.cache, parents_BW, state.lengths_B),
    )
    return grown._replace(done_B=state.done_B | ~is_still_B & (ends_BC.all(axis=1) | _is_settled(grown, rule)))


def _is_settled(state: BeamState, rule: SearchRule) -> Bool[Array, " B"]:
    """Tell the searches whose places are all taken by texts that no running one is expected to beat."""
    longest_B = jnp.where(rule.may_grow_longer, state.limits_B, state.lengths_B)
    hope_B = state.scores_BW[:, 0] / _length_factor(state, rule, longest_B)[:, 0]
    worst_B = state.ended.scores_BW[:, -1]
    return (worst_B > -jnp.inf) & (rule.ends_when_full | (hope_B <= worst_B))


def _length_factor(state: BeamState, rule: SearchRule, lengths_B: Int[Array, " B"]) -> Float[Array, "B 1"]:
    num_new_B1 = jnp.maximum(lengths_B - state.prompt_lengths_B, 1)[:, None].astype(state.scores_BW.dtype)
    return num_new_B1 ** rule.length_penalty.astype(num_new_B1.dtype)


def _grown(
    state: BeamState, parents_BW: Int[Array, "B W"], tokens_BW: Int[Array, "B W"], logprobs_BW: Float[Array, "B W"]
) -> tuple[Int[Array, "B W S"], Float[Array, "B W S"]]:
    """Return copies of running texts with a token more, and their log-probabilities."""

    def with_last(texts_BWS: Array, last_BW: Array) -> Array:
        parents_BWS = jnp.take_along_axis(texts_BWS, parents_BW[..., None], axis=1)
        return jax.vmap(lambda texts_WS, at, last_W: texts_WS.at[:, at].set(last_W, mode="drop"))(
            parents_BWS, state.lengths_B, last_BW
        )

    return with_last(state.tokens_BWS, tokens_BW), with_last(state.logprobs_BWS, logprobs_BW)


def _best_of(backend: Backend, old: Ended, new: Ended) -> Ended:
    """Return the best W of both; the older among equals."""
    both = jax.tree.map(lambda left, right: jnp.concatenate([left, right], axis=1), old, new)
    scores_BW, kept_BW = top_k(both.scores_BW, old.scores_BW.shape[1], backend)
    tokens_BWS, logprobs_BWS = (
        jnp.take_along_axis(texts, kept_BW[..., None], axis=1) for texts in (both.tokens_BWS, both.logprobs_BWS)
    )
    return Ended(tokens_BWS, logprobs_BWS, jnp.take_along_axis(both.lengths_BW, kept_BW, axis=1), scores_BW)
