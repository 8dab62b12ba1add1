"""One search for each row of a batch, and prefill: pure functions from state to state. The trees are grown by mctx."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx as _mctx

from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.decoding.search.nodes import (
    IMPOSSIBLE,
    Actions,
    Held,
    Place,
    add_token,
    path_of,
    play_out,
    root_place,
)
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.step import append, forward_prompt, until_end
from jaxinfer.decoding.strategies.mcts import TreeSearch
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.models.value_head import head_values
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.sampling.grammar import states_after
from jaxinfer.sampling.noise import gumbel

# Types do not see through the decorator that makes its dataclasses.
mctx: Any = _mctx

# From rows to score, their candidates' tokens and their numbers, and whether they have ended: a value for each.
Score = Callable[[Array, Array, Array, Array], Array]


class Leaf(NamedTuple):
    """What the tree keeps of a node: where it stands, what may follow, what its text is worth and how it begins.

    ``own_value_B`` is what a value head says of the text up to the node.
    """

    place: Place
    tokens_BR: Any
    logprobs_BR: Any
    value_B: Any
    begin_BJ: Any
    begin_logprobs_BJ: Any
    own_value_B: Any


def prefill_search(
    decoder: Decoder, num_tokens: int, params: Params, state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Write all but the last token of each text into the cache; return how many tokens of each it lacks: one."""
    model = Model.adapted(decoder, params, state.adapters_B)
    text_BT, counts_B = state.tokens_BS[:, :num_tokens], state.lengths_B - 1
    chunk = prefill_chunk(decoder.backend, text_BT.shape[1])
    _, cache = forward_prompt(model, text_BT, counts_B, state.cache, chunk, state.context_lengths_B)
    return state._replace(cache=cache), jnp.ones_like(state.lengths_B)


def search_step(
    decoder: Decoder,
    strategy: TreeSearch,
    score: Score | None,
    head: Params | None,
    params: Params,
    state: DecodeState,
    lacks_B: Any,
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Search once for every row and append what that decides; ``lacks_B`` tokens of each row are not in the cache.

    What texts are worth says ``score``, or the value head ``head``, or their likelihood.
    """
    model = Model.adapted(decoder, params, state.adapters_B)
    search = _Search(model, strategy, score, head, state)
    held = search.hold(lacks_B)
    place = root_place(state, strategy.headroom)
    actions, root, held = search.leaf(held, place, 0, state.finished_B, with_noise=strategy.policy == "gumbel")
    tree, held = search.grow(root, held, actions)
    tokens_BJ, logprobs_BJ = search.decided(tree, actions)
    count_B = jnp.where(state.finished_B, 0, until_end(state, tokens_BJ, jnp.full_like(lacks_B, strategy.tokens)))
    states_B = state.grammar_states_B
    for step in range(strategy.tokens):
        states_B = jnp.where(step < count_B, states_after(state.sampling, states_B, tokens_BJ[:, step]), states_B)
    running_B = ~state.finished_B
    state = state._replace(
        cache=held.cache,
        grammar_states_B=states_B,
        steps_B=state.steps_B + running_B,
        passes_B=state.passes_B + jnp.where(running_B, held.passes_B, 0.0),
    )
    return append(state, tokens_BJ, logprobs_BJ, jnp.zeros_like(tokens_BJ, bool), count_B), jnp.maximum(count_B, 1)


class _Search:
    """One search of a batch while it is traced."""

    def __init__(
        self, model: Model, strategy: TreeSearch, score: Score | None, head: Params | None, state: DecodeState
    ) -> None:
        self.model, self.strategy, self.score, self.head, self.state = model, strategy, score, head, state

    def hold(self, lacks_B: Int[Array, " B"]) -> Held:
        """Return what the nodes will share, once the cache has all of the text but its last token."""
        state, width, cache = self.state, self.strategy.tokens - 1, self.state.cache
        shape = state.lengths_B.shape[0], self.strategy.headroom
        current_B1 = jnp.take_along_axis(state.tokens_BS, state.lengths_B[:, None] - 1, axis=1)
        tokens_BM = jnp.zeros(shape, jnp.int32).at[:, :1].set(current_B1)
        passes_B = (lacks_B > 1).astype(jnp.float32)
        if width:
            # What comes behind the text here is written over before a node sees it.
            start_B = state.lengths_B - lacks_B
            positions_BT = start_B[:, None] + jnp.arange(width, dtype=jnp.int32)
            tokens_BT = jnp.take_along_axis(state.tokens_BS, positions_BT, axis=1, mode="clip")
            placements = cache.place(start_B, causal_ancestors(width)[None])
            inputs = tokens_BT, positions_BT, cache, placements, state.context_lengths_B
            _, cache = self.model.forward(*inputs)
        return Held(cache, tokens_BM, jnp.zeros(shape, jnp.float32), passes_B)

    def leaf(
        self, held: Held, place: Place, node: Any, known_B: Any, *, with_noise: bool = False
    ) -> tuple[Actions, Leaf, Held]:
        """Run a node, play its text out and say what it is worth; ``known_B`` as in `play_out`."""
        state, strategy, head = self.state, self.strategy, self.head
        how = {"with_noise": with_noise, "reads_last": head is not None}
        sizes = strategy.depth, strategy.actions
        actions, end, held, *states = play_out(self.model, state, held, place, node, *sizes, known_B, **how)
        tokens_BM, logprobs_BM = path_of(end, held.tokens_BM), path_of(end, held.logprobs_BM)
        counts_B = end.lengths_B - state.lengths_B
        own_value_B = jnp.zeros_like(counts_B, jnp.float32)
        if self.score is not None:
            value_B = self.score(~state.finished_B, tokens_BM, counts_B, end.ended_B)
        elif head is not None:
            values_B2 = head_values(head, jnp.stack(states, axis=1), self.model.decoder.backend)
            value_B, own_value_B = jnp.unstack(values_B2.astype(jnp.float32), axis=1)
        else:
            # A row that has finished has no tokens here.
            value_B = jnp.sum(logprobs_BM, axis=1) / jnp.maximum(counts_B, 1)
        begins = tokens_BM[:, : strategy.tokens], logprobs_BM[:, : strategy.tokens]
        return actions, Leaf(place, actions.tokens_BR, actions.logprobs_BR, value_B, *begins, own_value_B), held

    def grow(self, root: Leaf, held: Held, actions: Actions) -> tuple[Any, Held]:
        """Run all simulations; return mctx's tree and what the nodes share."""
        # The cache is one for all nodes, so it goes beside the tree, which mctx hands to each simulation in parts.
        shared, number = held, jnp.int32(0)

        def loop(first: int, end: int, simulate: Callable[[Any, Any], Any], carry: Any) -> Any:
            nonlocal shared

            def with_shared(simulation: Any, both: tuple[Any, Held]) -> tuple[Any, Held]:
                nonlocal shared, number
                carry, shared = both
                number = simulation
                return simulate(simulation, carry), shared

            carry, shared = jax.lax.fori_loop(first, end, with_shared, (carry, shared))
            return carry

        def expand(_: Any, __: Any, action_B: Any, parent: Leaf) -> tuple[Any, Leaf]:
            nonlocal shared
            chosen_B1 = action_B[:, None]
            token_B, logprob_B = (
                jnp.take_along_axis(values_BR, chosen_B1, axis=1)[:, 0]
                for values_BR in (parent.tokens_BR, parent.logprobs_BR)
            )
            node = number + 1
            had_ended_B = parent.place.ended_B
            place, shared = add_token(self.state, shared, parent.place, node, token_B, logprob_B)
            actions, leaf, shared = self.leaf(shared, place, node, place.stopped_B | had_ended_B)
            value_B = jnp.where(had_ended_B, parent.value_B, leaf.value_B)
            if self.head is not None:
                # A model has learned nothing of what comes behind a stop token: the text before it is judged.
                value_B = jnp.where(place.stopped_B & ~had_ended_B, parent.own_value_B, value_B)
            leaf = leaf._replace(value_B=value_B)
            # The way to an end is worth what the whole text is; nothing below it counts.
            nothing_B = jnp.zeros_like(leaf.value_B)
            output = mctx.RecurrentFnOutput(
                reward=jnp.where(place.ended_B, leaf.value_B, nothing_B),
                discount=jnp.where(place.ended_B, nothing_B, 1),
                prior_logits=actions.priors_BR,
                value=jnp.where(place.ended_B, nothing_B, leaf.value_B),
            )
            return output, leaf

        at_root, below = self._selections()
        tree = mctx.search(
            None,
            _constant_key(),
            root=mctx.RootFnOutput(prior_logits=actions.priors_BR, value=root.value_B, embedding=root),
            recurrent_fn=expand,
            root_action_selection_fn=at_root,
            interior_action_selection_fn=below,
            num_simulations=self.strategy.simulations,
            invalid_actions=_impossible(actions),
            extra_data=mctx.GumbelMuZeroExtraData(root_gumbel=actions.noise_BR),
            loop_fn=loop,
        )
        return tree, shared

    def decided(self, tree: Any, actions: Actions) -> tuple[Int[Array, "B J"], Float[Array, "B J"]]:
        """Return the tokens that a search decides, and their log-probabilities."""
        if self.strategy.tokens > 1:
            # Of equals the first: the root's text, which is plain decoding's, comes before all others.
            seen_BC = jnp.where(tree.node_visits > 0, tree.embeddings.value_B, -jnp.inf)
            best_B11 = jnp.argmax(seen_BC, axis=1)[:, None, None]
            begins = tree.embeddings.begin_BJ, tree.embeddings.begin_logprobs_BJ
            tokens_BJ, logprobs_BJ = (jnp.take_along_axis(begin, best_B11, axis=1)[:, 0] for begin in begins)
            return tokens_BJ, logprobs_BJ
        visits_BR = tree.children_visits[:, 0]
        if self.strategy.policy == "gumbel":
            worth_BR = jax.vmap(lambda tree: mctx.qtransform_completed_by_mix_value(tree, 0))(tree)
            score_BR = actions.noise_BR + actions.priors_BR + worth_BR
            score_BR = jnp.where(visits_BR == jnp.max(visits_BR, axis=1, keepdims=True), score_BR, -jnp.inf)
        else:
            score_BR = jnp.log(visits_BR.astype(jnp.float32))
            score_BR += self._noise_BR(actions)
        score_BR = jnp.where(_impossible(actions) > 0, -jnp.inf, score_BR)
        best_B1 = jnp.argmax(score_BR, axis=1)[:, None]
        chosen = (actions.tokens_BR, actions.logprobs_BR)
        tokens_B1, logprobs_B1 = (jnp.take_along_axis(values_BR, best_B1, axis=1) for values_BR in chosen)
        return tokens_B1, logprobs_B1

    def _noise_BR(self, actions: Actions) -> Float[Array, "B R"]:
        """Return the noise that plain decoding draws these tokens with, zeros in greedy rows."""
        sampling, positions_B1 = self.state.sampling, self.state.lengths_B[:, None]
        of_token = jax.vmap(lambda key_2, at_1, tokens_R: gumbel(key_2, at_1[0], 0, tokens_R))
        noise_BR = of_token(sampling.key_data_B2, positions_B1, actions.tokens_BR)
        return jnp.where(sampling.samples_B()[:, None], noise_BR, 0)

    def _selections(self) -> tuple[Any, Any]:
        """Return how a simulation goes down, at the root and below it: by what the tree holds, and by no noise of mctx.

        What mctx draws depends on the batch. Its one use here is to part equals, which a constant key does too.
        """
        strategy = self.strategy
        if strategy.policy == "gumbel":

            def at_root(_: Any, tree: Any, node: Any) -> Any:
                counts = {
                    "num_simulations": strategy.simulations,
                    "max_num_considered_actions": strategy.actions,
                }
                return mctx.gumbel_muzero_root_action_selection(_constant_key(), tree, node, **counts)

            return at_root, mctx.gumbel_muzero_interior_action_selection

        def below(_: Any, tree: Any, node: Any, depth: Any) -> Any:
            return mctx.muzero_action_selection(_constant_key(), tree, node, depth)

        return lambda key, tree, node: below(key, tree, node, 0), below


def _constant_key() -> Any:
    return jax.random.key(0, impl="threefry2x32")


def _impossible(actions: Actions) -> Float[Array, "B R"]:
    """Mark the actions that sampling dropped by 1, as mctx wants it."""
    return (actions.priors_BR <= IMPOSSIBLE).astype(jnp.float32)
