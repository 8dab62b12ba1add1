"""Drafting while the target verifies: programs of the drafter's devices, and what the target's verify.

A round's chain is c_1 ... c_k. While the target verifies it, the draft model goes on as if all of it were accepted: it
guesses the token that the target adds, g, and the next chain after that. If the target takes c_1 ... c_k and adds g,
the next chain is there when the round ends; else it is drafted then. What is drawn depends on the text alone, so that
either way drafts are those of a draft model that does not draft ahead.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.drafting.chain import ChainStrategy
from jaxinfer.decoding.drafting.schedules import first_lengths
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.draft_model import DraftModel, DraftModelMemory
from jaxinfer.decoding.strategy import Prefilled, Proposal
from jaxinfer.decoding.trees.tree import chain
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Int, Params
from jaxinfer.ops.rows import set_in_rows
from jaxinfer.sampling.grammar import states_after

# No text is as long, whatever a step adds to it.
_NOWHERE = -(2**30)


class Chain(NamedTuple):
    """The current token and the drafts after it; ``drafted_BM`` tells which nodes count."""

    tokens_BM: Any
    drafted_BM: Any


class Ahead(NamedTuple):
    """What the drafter keeps between rounds.

    ``expected_BM`` are the tokens that rows would have to get from ``length_B`` on for ``chain`` to be right: the chain
    that the target verifies, and a guess of what it adds. ``reused_B`` counts the steps of each row that verified a
    chain which had been drafted ahead.
    """

    cache: LayeredCache
    chain: Chain
    expected_BM: Any
    length_B: Any
    reused_B: Any


@dataclass(frozen=True)
class GivenChain(ChainStrategy):
    """Verify the chain that is its memory."""

    name: ClassVar[str] = "given_chain"

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Chain:
        return _no_chain(state.lengths_B.shape[0], self.num_draft_tokens)

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Chain) -> Proposal:
        return Proposal(chain(memory.tokens_BM, memory.drafted_BM), memory)


def seen_by_drafter(state: DecodeState) -> DecodeState:
    """Return of a state what drafting needs to know, without what is the target's alone."""
    counted = dict.fromkeys(("steps_B", "passes_B", "steps_ahead_B", "drafted_B", "accepted_B", "accepted_by_depth_BM"))
    return state._replace(cache=LayeredCache(()), logprobs_BS=None, from_draft_BS=None, adapters_B=None, **counted)


def start_ahead(decoder: Decoder, strategy: DraftModel, num_tokens: int, params: Params, state: DecodeState) -> Ahead:
    """Read the prompts; nothing has been drafted yet."""
    batch = state.lengths_B.shape[0]
    hidden_BD = jnp.zeros((batch, decoder.config.model_dim), jnp.dtype(decoder.backend.compute_dtype))
    memory = strategy.start(Model(decoder, params), params, state, Prefilled(hidden_BD, num_tokens))
    count = strategy.max_depth
    nothing_B = jnp.full((batch,), _NOWHERE, jnp.int32)
    expected_BM = jnp.zeros((batch, count + 1), jnp.int32)
    return Ahead(memory.cache, _no_chain(batch, count), expected_BM, nothing_B, jnp.zeros_like(nothing_B))


def next_chain(
    decoder: Decoder, strategy: DraftModel, params: Params, state: DecodeState, ahead: Ahead
) -> tuple[Chain, Ahead]:
    """Return the chain to verify next: what was drafted ahead, or another where a row took another way."""
    index_M, count = jnp.arange(strategy.max_depth + 1), strategy.max_depth
    slots_BM = jnp.maximum(ahead.length_B, 0)[:, None] + index_M
    tokens_BM = jnp.take_along_axis(state.tokens_BS, slots_BM, axis=1, mode="clip")
    as_expected_B = (state.lengths_B == ahead.length_B + count + 1) & (tokens_BM == ahead.expected_BM).all(axis=1)
    is_right = (as_expected_B | state.finished_B).all()

    def reused() -> tuple[Chain, LayeredCache]:
        return ahead.chain, ahead.cache

    def drafted() -> tuple[Chain, LayeredCache]:
        return _draft(decoder, strategy, params, state, ahead.cache, count)

    drafts, cache = jax.lax.cond(is_right, reused, drafted)
    # Those of rows that have ended are no drafts.
    drafts = drafts._replace(drafted_BM=(drafts.drafted_BM & ~state.finished_B[:, None]) | (index_M == 0))
    reused_B = ahead.reused_B + (is_right & ~state.finished_B)
    return drafts, ahead._replace(cache=cache, chain=drafts, reused_B=reused_B)


def draft_ahead(decoder: Decoder, strategy: DraftModel, params: Params, state: DecodeState, ahead: Ahead) -> Ahead:
    """Draft on as if the target took all of a chain; ``state`` is that which the chain is for."""
    count = strategy.max_depth
    drafts_BM, lengths_B = ahead.chain.tokens_BM[:, 1:], state.lengths_B
    slots_BM = lengths_B[:, None] + jnp.arange(count)
    states_B = state.grammar_states_B
    for depth in range(count):
        states_B = states_after(state.sampling, states_B, drafts_BM[:, depth])
    later = state._replace(
        tokens_BS=set_in_rows(state.tokens_BS, slots_BM, drafts_BM),
        lengths_B=lengths_B + count,
        grammar_states_B=states_B,
    )
    further, cache = _draft(decoder, strategy, params, later, ahead.cache, count + 1)
    expected_BM = jnp.concatenate([drafts_BM, further.tokens_BM[:, 1:2]], axis=1)
    next_one = Chain(further.tokens_BM[:, 1:], further.drafted_BM[:, 1:])
    return ahead._replace(cache=cache, chain=next_one, expected_BM=expected_BM, length_B=lengths_B)


def _draft(
    decoder: Decoder, strategy: DraftModel, params: Params, state: DecodeState, cache: LayeredCache, count: int
) -> tuple[Chain, LayeredCache]:
    longer = replace(strategy, num_draft_tokens=count)
    memory = DraftModelMemory(cache, first_lengths(state.lengths_B.shape[0], count))
    proposal = longer.propose(Model(decoder, params), params, state, memory)
    return Chain(proposal.tree.tokens_BM, proposal.tree.valid_BM), proposal.memory.cache


def _no_chain(batch: int, count: int) -> Chain:
    tokens_BM: Int[Array, "B M"] = jnp.zeros((batch, count + 1), jnp.int32)
    drafted_BM: Bool[Array, "B M"] = jnp.broadcast_to(jnp.arange(count + 1) == 0, tokens_BM.shape)
    return Chain(tokens_BM, drafted_BM)
