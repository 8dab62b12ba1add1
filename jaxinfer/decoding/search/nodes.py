"""What a tree of continuations holds, and how its tokens run through the model.

A search stands at a row's current token, the tree's node 0, in the cache slot after the text's. Node m stands in the
m-th slot from there, whoever its parent is, and attends to the text and to its ancestors: all nodes share the prompt's
cache, and a simulation writes one slot, and those of what continues it, which the next one overwrites.

Letters: M nodes, of which those of the continuation are the last; R the tokens tried at a node, its actions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.state import DecodeState, is_stop
from jaxinfer.models.model import Model
from jaxinfer.notation import DATA, TENSOR, Array, Bool, Float, Int
from jaxinfer.ops.rows import set_in_rows
from jaxinfer.ops.top_k import top_k
from jaxinfer.sampling.draw import add_noise, best_token
from jaxinfer.sampling.grammar import states_after
from jaxinfer.sampling.mass import log_sum_exp
from jaxinfer.sampling.transforms import transform_logits

# Of tokens that sampling dropped: so low that no noise and no value brings one back, and finite, as mctx wants.
IMPOSSIBLE = -1e9


class Held(NamedTuple):
    """What all nodes share: the cache, their tokens and raw log-probabilities; ``passes_B`` counts forward passes."""

    cache: LayeredCache
    tokens_BM: Any
    logprobs_BM: Any
    passes_B: Any


class Place(NamedTuple):
    """Where a text in the tree ends: its nodes, its length, the state of its grammar, and whether it has ended.

    ``stopped_B`` says that it ended by a stop token.
    """

    path_BM: Any
    lengths_B: Any
    grammar_states_B: Any
    ended_B: Any
    stopped_B: Any


class Actions(NamedTuple):
    """The tokens tried at a node: what sampling makes of their logits, their noise, and their raw log-probabilities."""

    tokens_BR: Any
    priors_BR: Any
    noise_BR: Any
    logprobs_BR: Any


def root_place(state: DecodeState, num_nodes: int) -> Place:
    """Return the text as it stands; rows that have finished have ended."""
    path_BM = jnp.zeros((state.lengths_B.shape[0], num_nodes), bool).at[:, 0].set(True)
    return Place(path_BM, state.lengths_B, state.grammar_states_B, state.finished_B, state.finished_B)


def add_token(
    state: DecodeState, held: Held, place: Place, node: Any, token_B: Int[Array, " B"], logprob_B: Float[Array, " B"]
) -> tuple[Place, Held]:
    """Return the place after one more token, which becomes node number ``node``; past an end nothing changes."""
    goes_on_B = ~place.ended_B
    lengths_B = place.lengths_B + goes_on_B
    stops_B = is_stop(state, token_B[:, None])[:, 0]
    is_last_B = stops_B | (lengths_B >= state.limits_B)
    reached_B = states_after(state.sampling, place.grammar_states_B, token_B)
    place = Place(
        place.path_BM.at[:, node].set(goes_on_B),
        lengths_B,
        jnp.where(goes_on_B, reached_B, place.grammar_states_B),
        place.ended_B | is_last_B,
        place.stopped_B | (goes_on_B & stops_B),
    )
    held = held._replace(
        tokens_BM=held.tokens_BM.at[:, node].set(token_B), logprobs_BM=held.logprobs_BM.at[:, node].set(logprob_B)
    )
    return place, held


class Played(NamedTuple):
    """What playing out a node found: what to try there, where the text ends, and two hidden states.

    ``hidden_BD`` is that of the text's last token but for a stop token, ``first_BD`` that of the node. They are None
    unless the last token was to be read.
    """

    actions: Actions
    place: Place
    held: Held
    hidden_BD: Any
    first_BD: Any


def run_node(
    model: Model, state: DecodeState, held: Held, place: Place, node: Any, counts_B: Bool[Array, " B"]
) -> tuple[Float[Array, "B 1 D"], Held]:
    """Run a node's token through the model, with the nodes of its path before it; return its final hidden state.

    ``counts_B`` are the rows whose pass counts.
    """
    start_B = state.lengths_B - 1
    placements = tuple(
        placement._replace(slots_BT=(start_B + node)[:, None])
        for placement in held.cache.place(start_B, place.path_BM[:, None])
    )
    tokens_B1, positions_B1 = held.tokens_BM[:, node][:, None], place.lengths_B[:, None] - 1
    inputs = tokens_B1, positions_B1, held.cache, placements, state.context_lengths_B
    hidden_B1D, cache = model.forward(*inputs)
    return hidden_B1D, held._replace(cache=cache, passes_B=held.passes_B + counts_B)


def play_out(
    model: Model,
    state: DecodeState,
    held: Held,
    place: Place,
    node: Any,
    depth: int,
    num_actions: int,
    known_B: Bool[Array, " B"],
    *,
    with_noise: bool = False,
    reads_last: bool = False,
) -> Played:
    """Run a node and continue its text by up to ``depth`` tokens, the last nodes, as plain decoding would.

    Find the tokens to try at the node too, the most probable ones, or with noise those that draws prefer: the first
    of these is what plain decoding draws. Where the text has ended already, nothing follows. With ``reads_last`` the
    last token of the text is run too, but no stop token, and nothing in rows of ``known_B``, where nothing is asked.
    """
    batch, end, backend = held.tokens_BM.shape[0], held.tokens_BM.shape[1], model.decoder.backend
    first, nothing_BR = end - depth, jnp.zeros((batch, num_actions), jnp.float32)
    no_actions = Actions(nothing_BR.astype(jnp.int32), nothing_BR, nothing_BR, nothing_BR)

    def advance(step: Any, played: Played, counts_B: Any) -> Played:
        """Run the last token so far and, but after the last step, draw the next one."""
        actions, place, held, hidden_BD, first_BD = played
        at = jnp.where(step == 0, node, first + step - 1)
        hidden_B1D, held = run_node(model, state, held, place, at, counts_B)
        if reads_last:
            hidden_BD = jnp.where(counts_B[:, None], hidden_B1D[:, 0], hidden_BD)
            first_BD = jnp.where(step == 0, hidden_BD, first_BD)

        def draw() -> tuple[Actions, Place, Any, Any]:
            return _draw(step, hidden_B1D, actions, place, held)

        def stay() -> tuple[Actions, Place, Any, Any]:
            return actions, place, held.tokens_BM, held.logprobs_BM

        drawn = jax.lax.cond(step < depth, draw, stay) if reads_last and depth else draw()
        actions, place, tokens_BM, logprobs_BM = drawn
        return Played(actions, place, held._replace(tokens_BM=tokens_BM, logprobs_BM=logprobs_BM), hidden_BD, first_BD)

    def _draw(step: Any, hidden_B1D: Any, actions: Actions, place: Place, held: Held) -> Any:
        logits_B1V, positions_B1 = model.logits(hidden_B1D), place.lengths_B[:, None]
        history = state.history._replace(
            node_tokens_BM=held.tokens_BM,
            ancestors_BMM=place.path_BM[:, None],
            grammar_states_BM=place.grammar_states_B[:, None],
        )
        transformed_B1V = transform_logits(logits_B1V, state.sampling, history, positions_B1, backend)
        drawn_B1V = jax.lax.cond(
            state.sampling.samples_B().any(),
            lambda: add_noise(transformed_B1V, positions_B1, state.sampling),
            lambda: transformed_B1V,
        )
        logits_BV = logits_B1V[:, 0] if logits_B1V.dtype == jnp.float64 else logits_B1V[:, 0].astype(jnp.float32)
        raw_BV = logits_BV - log_sum_exp(logits_B1V.astype(logits_BV.dtype), backend)

        def to_try() -> Actions:
            return _actions(transformed_B1V[:, 0], (drawn_B1V if with_noise else transformed_B1V)[:, 0], raw_BV)

        def _actions(transformed_BV: Array, scores_BV: Array, raw_BV: Array) -> Actions:
            best_BR, tokens_BR = top_k(scores_BV, num_actions, backend, (DATA, TENSOR))
            found_BR = jnp.take_along_axis(transformed_BV, tokens_BR, axis=1)
            possible_BR = jnp.isfinite(best_BR)
            most_B1 = jnp.max(jnp.where(possible_BR, found_BR, -jnp.inf), axis=1, keepdims=True)
            return Actions(
                tokens_BR.astype(jnp.int32),
                jnp.where(possible_BR, found_BR - most_B1, IMPOSSIBLE).astype(jnp.float32),
                jnp.where(possible_BR, best_BR - found_BR, 0).astype(jnp.float32),
                jnp.take_along_axis(raw_BV, tokens_BR, axis=1).astype(jnp.float32),
            )

        actions = jax.lax.cond(step == 0, to_try, lambda: actions)
        if depth:
            token_B1 = best_token(drawn_B1V, backend)
            logprob_B1 = jnp.take_along_axis(raw_BV, token_B1, axis=1).astype(jnp.float32)
            place, held = add_token(state, held, place, first + step, token_B1[:, 0], logprob_B1[:, 0])
        return actions, place, held.tokens_BM, held.logprobs_BM

    if not reads_last:

        def goes_on(carry: tuple[Any, Played]) -> Any:
            step, played = carry
            return (step < max(depth, 1)) & ~played.place.ended_B.all()

        def go_on(carry: tuple[Any, Played]) -> tuple[Any, Played]:
            step, played = carry
            return step + 1, advance(step, played, ~played.place.ended_B)

        return jax.lax.while_loop(goes_on, go_on, (jnp.int32(0), Played(no_actions, place, held, None, None)))[1]

    def lacks(carry: tuple[Any, Any, Played]) -> Any:
        step, read_B, _ = carry
        return (step <= depth) & ~read_B.all()

    def read(carry: tuple[Any, Any, Played]) -> tuple[Any, Any, Played]:
        step, read_B, played = carry
        ended_B, played = played.place.ended_B, advance(step, played, ~read_B)
        return step + 1, read_B | ended_B | played.place.stopped_B, played

    hidden_BD = jnp.zeros((batch, model.config.model_dim), backend.compute_dtype)
    start = jnp.int32(0), known_B, Played(no_actions, place, held, hidden_BD, hidden_BD)
    return jax.lax.while_loop(lacks, read, start)[2]


def path_of(place: Place, values_BM: Array) -> Array:
    """Return what the nodes of a path below the root have, in the path's order, zeros behind; ``[B, M]``."""
    below_BM = place.path_BM.at[:, 0].set(False)
    order_BM = jnp.cumsum(below_BM, axis=1, dtype=jnp.int32) - 1
    return set_in_rows(jnp.zeros_like(values_BM), jnp.where(below_BM, order_BM, values_BM.shape[1]), values_BM)
