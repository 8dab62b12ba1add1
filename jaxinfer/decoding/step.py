"""One step of any strategy, and prefill: pure functions from state to state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.dense import DenseCache
from jaxinfer.cache.interface import LayeredCache
from jaxinfer.decoding.acceptance.rejection import reject
from jaxinfer.decoding.acceptance.typical import accept_typical
from jaxinfer.decoding.acceptance.walk import Walk, emitted_tokens, is_draft, match
from jaxinfer.decoding.fixed_rows import filled, first_nodes, step_nodes, widened
from jaxinfer.decoding.state import DecodeState, is_stop
from jaxinfer.decoding.strategy import LastNode, Nodes, Prefilled, Proposal, Strategy, Verified
from jaxinfer.decoding.trees.forced import with_forced_tokens
from jaxinfer.decoding.trees.tree import DraftTree, ancestors, depths
from jaxinfer.models.decoder import block_begin
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.ops.once import one_of
from jaxinfer.ops.ring_attention import goes_around, in_text_order, ring_order
from jaxinfer.ops.rows import set_in_rows, take_rows
from jaxinfer.sampling.draw import draw, drawing_distribution, log_probabilities
from jaxinfer.sampling.grammar import FREE, states_after, states_after_path, states_at_nodes


def forward_prompt(
    model: Model,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    cache: LayeredCache,
    chunk: int,
    context_lengths_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T D"], LayeredCache]:
    """Return the final hidden states of whole prompts, and the cache with them written from slot 0 on.

    ``context_lengths_B`` are the lengths that rotary positions are for, where those are not the prompts' own.
    Above ``chunk`` tokens, which then divides T, it runs in chunks, so that attention scores never span the square of
    a long prompt; but all at once where it goes around a ring of devices, each of which has parts of it. What stands
    past a row's length means nothing.
    """
    batch, num_tokens = tokens_BT.shape
    size, backend = min(chunk, num_tokens), model.decoder.backend
    rotary_lengths_B = lengths_B if context_lengths_B is None else context_lengths_B
    # Where shapes are fixed, sums over slots do not span as many as the longest prompt needs.
    extent = num_tokens if backend.fixed_rows == 1 else None

    if goes_around(num_tokens, backend) and all(isinstance(part, DenseCache) for part in cache.parts):
        return _forward_around(model, tokens_BT, lengths_B, cache, rotary_lengths_B)

    begin_B = block_begin(cache)

    def run_chunk(index: Any, cache: LayeredCache) -> tuple[Any, LayeredCache]:
        start_B = jnp.full((batch,), index * size, jnp.int32)
        if begin_B is not None:
            start_B += begin_B
        positions_BT = start_B[:, None] + jnp.arange(size, dtype=jnp.int32)
        counts_B = lengths_B - start_B
        placements = cache.place(start_B, causal_ancestors(size)[None], counts_B, extent)
        chunk_BT = jax.lax.dynamic_slice_in_dim(tokens_BT, index * size, size, axis=1)
        return model.forward(chunk_BT, positions_BT, cache, placements, rotary_lengths_B)

    if num_tokens == size:
        return run_chunk(0, cache)

    def advance(index: Any, carry: tuple[Any, LayeredCache]) -> tuple[Any, LayeredCache]:
        hidden_BTD, cache = carry
        chunk_BTD, cache = run_chunk(index, cache)
        return jax.lax.dynamic_update_slice_in_dim(hidden_BTD, chunk_BTD, index * size, axis=1), cache

    dtype = jnp.dtype(backend.compute_dtype)
    hidden_BTD = jnp.zeros((batch, num_tokens, model.config.model_dim), dtype)
    in_block_B = lengths_B if begin_B is None else lengths_B - begin_B
    return jax.lax.fori_loop(0, num_passes(in_block_B, num_tokens, size, backend), advance, (hidden_BTD, cache))


def num_passes(lengths_B: Int[Array, " B"], num_tokens: int, size: int, backend: Backend) -> Int[Array, ""] | int:
    """Return how many chunks of ``size`` tokens of prompts, which are padded to ``num_tokens``, have any of them.

    On a CPU, where padding takes as long as tokens do; elsewhere all, so that the compiler knows their number and
    `jaxinfer.planning` counts them.
    """
    most = num_tokens // size
    return jnp.clip(-(-jnp.max(lengths_B) // size), 1, most) if backend.platform == "cpu" else most


def _forward_around(
    model: Model,
    tokens_BT: Int[Array, "B T"],
    lengths_B: Int[Array, " B"],
    cache: LayeredCache,
    rotary_lengths_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], LayeredCache]:
    """Run whole prompts around a ring of devices, in whose order the tokens stand on the way."""
    batch, num_tokens = tokens_BT.shape
    order_T = ring_order(num_tokens, model.decoder.backend)
    start_B, ancestors_1TT = jnp.zeros((batch,), jnp.int32), causal_ancestors(num_tokens)[None]
    placements = tuple(
        placement._replace(slots_BT=placement.slots_BT[:, order_T])
        if placement.seen is None
        else placement._replace(seen=placement.seen._replace(order_T=jnp.asarray(order_T)))
        for placement in cache.place(start_B, ancestors_1TT, lengths_B, num_tokens)
    )
    positions_BT = jnp.broadcast_to(order_T, tokens_BT.shape)
    hidden_BTD, cache = model.forward(tokens_BT[:, order_T], positions_BT, cache, placements, rotary_lengths_B)
    return in_text_order(hidden_BTD, model.decoder.backend), cache


def prefill_step(model: Model, state: DecodeState, num_tokens: int, chunk: int) -> tuple[DecodeState, Prefilled]:
    """Write the prompts into the cache and draw every row's first token; ``num_tokens`` spans the longest prompt.

    A finished row draws nothing, and its last token stays the current one, which the cache does not hold.
    """
    prompt_BT = state.tokens_BS[:, :num_tokens]
    counts_B, begin_B = state.lengths_B - state.finished_B, block_begin(state.cache)
    if begin_B is not None:
        at_BT = jnp.minimum(begin_B[:, None] + jnp.arange(num_tokens), state.tokens_BS.shape[1] - 1)
        prompt_BT = jnp.take_along_axis(state.tokens_BS, at_BT, axis=1)
    hidden_BTD, cache = forward_prompt(model, prompt_BT, counts_B, state.cache, chunk, state.context_lengths_B)
    in_block_B = counts_B if begin_B is None else counts_B - begin_B
    last_B11 = jnp.clip(in_block_B - 1, 0, num_tokens - 1)[:, None, None]
    hidden_B1D = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)
    state = draw_first(model, state._replace(cache=cache), hidden_B1D, jnp.where(state.finished_B, 0, 1))
    return state, Prefilled(hidden_B1D[:, 0], num_tokens)


def draw_first(
    model: Model, state: DecodeState, hidden_B1D: Float[Array, "B 1 D"], count_B: Int[Array, " B"]
) -> DecodeState:
    """Append the token that follows a prompt, whose last token has this hidden state, to the rows with a count of 1."""
    logits_B1V = model.logits(hidden_B1D)
    backend = model.decoder.backend
    draws_B1 = draw(logits_B1V, state.lengths_B[:, None], state.sampling, state.history, backend=backend)
    logprobs_B1 = _reported(state, lambda: logits_B1V, draws_B1, backend)
    state = append(state, draws_B1, logprobs_B1, jnp.zeros_like(draws_B1, bool), count_B)
    reached_B = states_after(state.sampling, state.grammar_states_B, draws_B1[:, 0])
    return state._replace(grammar_states_B=jnp.where(count_B > 0, reached_B, state.grammar_states_B))


def decode_step(
    model: Model, strategy: Strategy, drafter_params: Any, state: DecodeState, memory: Any
) -> tuple[DecodeState, Any]:
    """Advance every unfinished row by one to M tokens; ``drafter_params`` are the strategy's parameters."""
    backend = model.decoder.backend
    drafted = strategy.propose(model, drafter_params, state, memory)
    num_drafted = drafted.tree.tokens_BM.shape[1]
    tree, grammars = drafted.tree, (state.sampling, state.grammar_states_B)
    if strategy.acceptance == "match":
        tree, states_BM = with_forced_tokens(tree, *grammars)
    else:
        states_BM = states_at_nodes(*grammars, tree.tokens_BM, tree.parents_BM)
    tree = filled(tree, step_nodes(strategy, num_drafted, backend))
    num_filling = tree.tokens_BM.shape[1] - num_drafted
    states_BM = jnp.pad(states_BM, ((0, 0), (0, num_filling)), constant_values=FREE)
    proposal = drafted._replace(tree=tree)
    if proposal.cache is not None:
        state = state._replace(cache=proposal.cache)
    start_B, relation_BMM = state.lengths_B - 1, ancestors(tree.parents_BM)
    nodes = Nodes(start_B, relation_BMM, start_B[:, None] + depths(relation_BMM))
    verified = _forward(model, strategy, drafter_params, state, proposal, nodes)
    draws_BM, walk = accept(strategy, state, proposal, nodes, states_BM, verified.logits_BMV, backend)
    tokens_BM = emitted_tokens(tree, walk)
    emitted_B = jnp.where(state.finished_B, 0, until_end(state, tokens_BM, walk.taken_B))
    # The accepted nodes of a chain stand where they belong.
    cache = verified.cache.keep(start_B, walk.path_BM, emitted_B) if strategy.branches else verified.cache
    state = _count(state._replace(cache=cache), proposal, verified, jnp.minimum(walk.taken_B - 1, emitted_B))
    path_length = tokens_BM.shape[1]
    from_draft_BM = jnp.arange(path_length)[None, :] < walk.taken_B[:, None] - 1
    num_reported = tree.tokens_BM.shape[1] if backend.fixed_rows > 1 else path_length

    def path_logits() -> Float[Array, "B M V"]:
        return jnp.take_along_axis(verified.logits_BMV, widened(walk.path_BM, num_reported)[..., None], axis=1)

    logprobs_BM = _reported(state, path_logits, widened(tokens_BM, num_reported), backend)[:, :path_length]
    state = append(state, tokens_BM, logprobs_BM, from_draft_BM, emitted_B)
    reached_B = states_after_path(state.sampling, states_BM, walk.path_BM, tokens_BM, walk.taken_B, emitted_B)
    state = state._replace(grammar_states_B=reached_B)
    verified = first_nodes(verified._replace(cache=cache, last=last_node(verified, walk)), num_drafted)
    draws_BM = draws_BM[:, :num_drafted]
    return state, strategy.observe(model, drafter_params, state, drafted, verified, draws_BM, walk)


def last_node(verified: Verified, walk: Walk) -> LastNode:
    """Return the deepest node that was taken; what a strategy does not read of it is never computed."""
    last_B1 = jnp.take_along_axis(walk.path_BM, walk.taken_B[:, None] - 1, axis=1)
    answers = (verified.logits_BMV, verified.hidden_BMD, verified.aux)
    return LastNode(walk.taken_B - 1, *jax.tree.map(lambda answer: take_rows(answer, last_B1)[:, 0], answers))


def _forward(
    model: Model, strategy: Strategy, drafter_params: Any, state: DecodeState, proposal: Proposal, nodes: Nodes
) -> Verified:
    """Run the target over the tree, or over the roots alone where no row that runs has a draft and nodes cost."""
    tree = proposal.tree
    num_nodes = tree.tokens_BM.shape[1]
    backend = model.decoder.backend
    if not strategy.may_draft_nothing or backend.platform != "cpu" or backend.fixed_rows > 1 or num_nodes == 1:
        return strategy.forward(model, drafter_params, state, proposal, nodes)

    def run(cache: Any, proposal: Proposal, nodes: Nodes) -> tuple[Any, Verified]:
        written = state._replace(cache=cache)
        verified = strategy.forward(model, drafter_params, written, proposal, nodes)
        return verified.cache, verified._replace(cache=None, passes=jnp.asarray(verified.passes, jnp.float32))

    def run_tree(cache: Any) -> tuple[Any, Verified]:
        return run(cache, proposal, nodes)

    def run_roots(cache: Any) -> tuple[Any, Verified]:
        roots = DraftTree(*(field[:, :1] for field in tree))
        alone = Nodes(nodes.start_B, nodes.ancestors_BMM[:, :1, :1], nodes.positions_BM[:, :1])
        cache, verified = run(cache, proposal._replace(tree=roots), alone)
        # No other node of a row that runs is valid: what stands there is never looked at.
        answers = (verified.logits_BMV, verified.hidden_BMD, verified.aux)
        logits_BMV, hidden_BMD, aux = jax.tree.map(
            lambda root: jnp.broadcast_to(root, (root.shape[0], num_nodes, *root.shape[2:])), answers
        )
        return cache, verified._replace(logits_BMV=logits_BMV, hidden_BMD=hidden_BMD, aux=aux)

    has_draft = (tree.valid_BM[:, 1:] & ~state.finished_B[:, None]).any()
    cache, verified = one_of(has_draft, run_tree, run_roots, state.cache)
    return verified._replace(cache=cache)


def accept(
    strategy: Strategy,
    state: DecodeState,
    proposal: Proposal,
    nodes: Nodes,
    states_BM: Int[Array, "B M"],
    logits_BMV: Float[Array, "B M V"],
    backend: Backend | None = None,
) -> tuple[Int[Array, "B M"], Walk]:
    """Return the target's own token at every node, where grammars have these states, and the path that is taken."""
    tree, arrays = proposal.tree, state.sampling
    history = state.history._replace(
        node_tokens_BM=tree.tokens_BM, ancestors_BMM=nodes.ancestors_BMM, grammar_states_BM=states_BM
    )
    draws_BM = draw(logits_BMV, nodes.positions_BM + 1, arrays, history, backend=backend)
    if strategy.acceptance == "match":
        return draws_BM, match(tree, draws_BM, strategy.max_depth)
    log_p_BMV = drawing_distribution(logits_BMV, nodes.positions_BM + 1, arrays, history, backend)
    if strategy.acceptance == "typical":
        thresholds = strategy.typical_thresholds
        walk = accept_typical(tree, nodes.ancestors_BMM, log_p_BMV, draws_BM, strategy.max_depth, *thresholds)
    else:
        distributions = log_p_BMV, proposal.log_q_BMV
        places = nodes.ancestors_BMM, nodes.positions_BM
        walk = reject(
            tree,
            *places,
            *distributions,
            arrays,
            strategy.max_depth,
            has_distinct_siblings=strategy.has_distinct_siblings,
        )
    return draws_BM, walk


def _reported(
    state: DecodeState, logits: Callable[[], Float[Array, "B M V"]], tokens_BM: Int[Array, "B M"], backend: Backend
) -> Float[Array, "B M"]:
    """Return the tokens' log-probabilities in rows that ask for them, for they read every logit again, or zeros."""
    reports_B = state.sampling.reports_B

    def computed() -> Float[Array, "B M"]:
        return jnp.where(reports_B[:, None], log_probabilities(logits(), tokens_BM, backend).astype(jnp.float32), 0)

    return jax.lax.cond(reports_B.any(), computed, lambda: jnp.zeros(tokens_BM.shape, jnp.float32))


def _count(state: DecodeState, proposal: Proposal, verified: Verified, accepted_B: Int[Array, " B"]) -> DecodeState:
    """Add a step to the counters of the rows that run."""
    running_B = ~state.finished_B
    accepted_B = jnp.where(running_B, accepted_B, 0)
    drafted_B = jnp.sum(is_draft(proposal.tree), axis=1, dtype=jnp.int32)
    depth_M = jnp.arange(1, state.accepted_by_depth_BM.shape[1] + 1)
    return state._replace(
        steps_B=state.steps_B + running_B,
        passes_B=state.passes_B + jnp.where(running_B, proposal.passes + verified.passes, 0.0),
        steps_ahead_B=state.steps_ahead_B + jnp.where(running_B, proposal.steps_ahead, 0),
        drafted_B=state.drafted_B + jnp.where(running_B, drafted_B, 0),
        accepted_B=state.accepted_B + accepted_B,
        accepted_by_depth_BM=state.accepted_by_depth_BM + (accepted_B[:, None] >= depth_M[None, :]),
    )


def until_end(state: DecodeState, draws_BM: Int[Array, "B M"], taken_B: Int[Array, " B"]) -> Int[Array, " B"]:
    """Count the path's draws up to the first that ends the row, no further than there is room."""
    ends_BM = is_stop(state, draws_BM)
    before_end_BM = jnp.cumsum(ends_BM, axis=1) - ends_BM == 0
    in_path_BM = jnp.arange(draws_BM.shape[1]) < taken_B[:, None]
    count_B = jnp.sum(before_end_BM & in_path_BM, axis=1, dtype=jnp.int32)
    return jnp.minimum(count_B, state.limits_B - state.lengths_B)


def append(
    state: DecodeState,
    tokens_BM: Int[Array, "B M"],
    logprobs_BM: Float[Array, "B M"],
    from_draft_BM: Bool[Array, "B M"],
    count_B: Int[Array, " B"],
) -> DecodeState:
    """Add the first ``count_B`` tokens to each row, and mark the rows that this ends."""
    offset_M = jnp.arange(tokens_BM.shape[1])
    is_new_BM = offset_M < count_B[:, None]
    # What is not new goes past the end, where it is dropped.
    slots_BM = jnp.where(is_new_BM, state.lengths_B[:, None] + offset_M, state.tokens_BS.shape[1])
    lengths_B = state.lengths_B + count_B
    stopped_B = (is_stop(state, tokens_BM) & is_new_BM).any(axis=1)
    return state._replace(
        tokens_BS=set_in_rows(state.tokens_BS, slots_BM, tokens_BM),
        logprobs_BS=set_in_rows(state.logprobs_BS, slots_BM, logprobs_BM),
        from_draft_BS=set_in_rows(state.from_draft_BS, slots_BM, from_draft_BM),
        lengths_B=lengths_B,
        finished_B=state.finished_B | stopped_B | (lengths_B >= state.limits_B),
    )
