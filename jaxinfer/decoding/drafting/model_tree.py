"""Drafting a tree with a model: one pass a level, over the nodes that get children, each on its own path."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import current_tokens
from jaxinfer.decoding.trees.dynamic import Beams, Growth, follow, grow
from jaxinfer.decoding.trees.static import Paths, lay_out
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.errors import InvalidOption
from jaxinfer.notation import DATA, TENSOR, Array, Bool, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.top_k import top_k
from jaxinfer.sampling.draw import add_noise, drawing_distribution
from jaxinfer.sampling.grammar import states_after
from jaxinfer.sampling.noise import ROLE_DRAFT, ROLE_TARGET, role
from jaxinfer.sampling.transforms import transform_logits


class Level(NamedTuple):
    """The nodes of one depth that get children, W of them; 0 is the root's depth.

    ``relation_BWA`` says which of the A nodes that a model has run on, these the last, are each one's ancestors or
    itself.
    """

    depth: int
    tokens_BW: Int[Array, "B W"]
    relation_BWA: Bool[Array, "B W A"]


# From a level and a carry: the logits [B, W, V] after its nodes, and the carry.
LevelLogits = Callable[[Level, Any], tuple[Float[Array, "B W V"], Any]]


class TreeDraft(NamedTuple):
    """A tree, the log-probability that the model gives each node's path, and what each node's children were drawn from.

    The latter is there for rejection alone. ``carry`` is the model's.
    """

    tree: DraftTree
    log_p_BM: Any
    log_q_BMV: Any
    carry: Any


class _Passed(NamedTuple):
    """What a level passes on: all nodes so far, how its own descend from them, and their grammars' states."""

    tokens_BA: Any
    relation_BWA: Any
    states_BW: Any
    carry: Any


def draft_tree(
    state: DecodeState,
    level_logits: LevelLogits,
    carry: Any,
    shape: Paths | Growth,
    acceptance: str,
    vocab_size: int,
    backend: Backend,
) -> TreeDraft:
    """Draft what a model ranks best after each node, along ranks or where its guesses are likely.

    Ranks are those of transformed logits plus noise. Under ``match`` that is the target's own, so that the first child
    is what a drafter of one mind with the target draws, and the others are what it draws if their logits differ a
    little. Under ``rejection`` the noise is the drafts' own: siblings are then drawn one after the other without those
    before (Kool et al., 1903.06059). The same noise serves all nodes of a depth, of which a walk sees the children of
    one.
    """
    own_noise = acceptance == "rejection"
    kind = role(ROLE_DRAFT) if own_noise else ROLE_TARGET
    ranks = num_ranks(shape)
    drawn_from: list[Any] = []
    carries: list[Any] = []

    def guess(depth: int, beams: Beams, before: Any) -> tuple[Any, Any, Any]:
        seen = _first(state, beams, carry) if before is None else _descended(state, beams, before)
        level = Level(depth - 1, beams.tokens_BW, seen.relation_BWA)
        logits_BWV, passed = level_logits(level, seen.carry)
        positions_BW = jnp.broadcast_to(state.lengths_B[:, None] + depth - 1, beams.tokens_BW.shape)
        history = state.history._replace(
            node_tokens_BM=seen.tokens_BA, ancestors_BMM=seen.relation_BWA, grammar_states_BM=seen.states_BW
        )
        transformed_BWV = transform_logits(logits_BWV, state.sampling, history, positions_BW)
        scores_BWV = jax.lax.cond(
            state.sampling.samples_B().any(),
            lambda: add_noise(transformed_BWV, positions_BW, state.sampling, kind),
            lambda: transformed_BWV,
        )
        carries.append(passed)
        if own_noise:
            drawn_from.append(drawing_distribution(logits_BWV, positions_BW, state.sampling, history))
        best_BWR, tokens_BWR = top_k(scores_BWV, ranks, backend, (DATA, None, TENSOR))
        log_p_BWR = best_BWR - jax.nn.logsumexp(scores_BWV, axis=-1, keepdims=True)
        return log_p_BWR, tokens_BWR.astype(jnp.int32), seen._replace(carry=passed)

    roots_B = current_tokens(state)
    if isinstance(shape, Growth):
        tree, log_p_BM = grow(shape, roots_B, guess, backend)
        return TreeDraft(tree, log_p_BM, None, carries[-1])
    tree, log_p_BM = follow(shape, roots_B, guess)
    log_q_BMV = _by_node(shape, drawn_from, vocab_size) if own_noise else None
    return TreeDraft(tree, log_p_BM, log_q_BMV, carries[-1])


def num_ranks(shape: Paths | Growth) -> int:
    """Return how many children a node has at most to choose among."""
    return shape.num_ranks if isinstance(shape, Growth) else 1 + max(max(path) for path in shape)


def num_run(shape: Paths | Growth) -> int:
    """Return how many nodes the model runs on, the root included."""
    if isinstance(shape, Growth):
        return 1 + (shape.max_depth - 1) * min(shape.num_beams, shape.num_ranks)
    return len({path[:-1] for path in shape})


def check_ranks(paths: Paths, named: str) -> None:
    """Raise InvalidOption for a tree that leaves ranks out: a sibling is drawn after all those before it."""
    known = set(paths)
    for path in paths:
        if path[-1] and (*path[:-1], path[-1] - 1) not in known:
            raise InvalidOption(f"{named}: verify=rejection needs the ranks before {list(path)} in the tree too")


def _first(state: DecodeState, beams: Beams, carry: Any) -> _Passed:
    relation_BWA = jnp.ones((*beams.tokens_BW.shape, 1), bool)
    return _Passed(beams.tokens_BW, relation_BWA, state.grammar_states_B[:, None], carry)


def _descended(state: DecodeState, beams: Beams, before: _Passed) -> _Passed:
    """Return what is known of a level's nodes from what the level above passed on."""
    width = beams.tokens_BW.shape[1]
    above_BWA = jnp.take_along_axis(before.relation_BWA, beams.origins_BW[..., None], axis=1)
    itself_BWW = jnp.broadcast_to(jnp.eye(width, dtype=bool), (above_BWA.shape[0], width, width))
    states_BW = jnp.take_along_axis(before.states_BW, beams.origins_BW, axis=1)
    after = jax.vmap(lambda states_B, tokens_B: states_after(state.sampling, states_B, tokens_B), 1, 1)
    return _Passed(
        jnp.concatenate([before.tokens_BA, beams.tokens_BW], axis=1),
        jnp.concatenate([above_BWA, itself_BWW], axis=-1),
        after(states_BW, beams.tokens_BW),
        before.carry,
    )


def _by_node(paths: Paths, drawn_from: list[Any], vocab_size: int) -> Float[Array, "B M V"]:
    """Return what the children of each node of a tree were drawn from, given level by level for those that have any."""
    layout = lay_out(paths)
    log_q_BMV = jnp.zeros((drawn_from[0].shape[0], len(layout.depths_M), vocab_size), jnp.float32)
    for depth, log_q_BWV in enumerate(drawn_from, 1):
        parents = np.unique(layout.parents_M[layout.depths_M == depth])
        log_q_BMV = log_q_BMV.at[:, parents].set(log_q_BWV)
    return log_q_BMV
