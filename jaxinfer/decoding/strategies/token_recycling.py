"""Token recycling: what the target once answered is drafted again (Luo et al., 2408.08696)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Prefilled, Proposal, Strategy, Target, Verified, current_tokens, few_nodes
from jaxinfer.decoding.trees.dynamic import Beams, Growth, Guess, check_growth, follow, grow, read_growth
from jaxinfer.decoding.trees.static import Paths, read_tree, tree_depth
from jaxinfer.decoding.trees.tree import DraftTree
from jaxinfer.errors import InvalidOption
from jaxinfer.models.drafters.heads import top_chances
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend

# How far an answer's chances hold where it came after the same one, two or three tokens: with 8 nodes, the default
# model's first 96 tokens for one prompt of each category of Spec-Bench came as fast with any of a few such rows.
_TRUST = (0.3, 0.6, 0.8)
# What a prompt's own next token is given, which no answer of the target stands for.
_PROMPT_CHANCE = 0.5
# A row has so many entries, whatever the vocabulary: a table by token would be 8 MB a row for one of 256,000 tokens and
# 8 ranks, this is 0.3 MB. It holds 512 steps of 8 nodes, and 64 of 64.
_NUM_ENTRIES = 4096
# Where nodes are nearly free.
_MANY_NODES, _MOST_DEPTH = 64, 6

# The tree of the paper's code, by depth; a digit a rank.
_PUBLISHED = """
    0 1 2 3 4 5 6 7 00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70 000 001 002 003 004 005 006 007 010
    011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500 0000 0001 0002 0003 0004 0010 0011 0020 0030 0040
    0100 0200 1000 2000 3000 00000 00001 00002 00010 00020 00100 01000 10000 000000 000001 000100"""
PUBLISHED_TREE: Paths = tuple(tuple(map(int, path)) for path in _PUBLISHED.split())


class Answers(NamedTuple):
    """What the target found likeliest after the tokens that it was last asked about: a ring of E entries a row.

    ``contexts_BJE`` int32 are those tokens, the nearest first, and negative where there are none; ``tokens_BRE`` int32
    and ``log_p_BRE`` float32 the likeliest after them. Entries are the last axis, as the others would fill few lanes.
    ``written_B`` int32 counts the entries that steps have written.
    """

    contexts_BJE: Any
    tokens_BRE: Any
    log_p_BRE: Any
    written_B: Any


class Asked(NamedTuple):
    """The answers so far, and the tokens that lead to each node of a step, the nearest first."""

    answers: Answers
    contexts_BJM: Any


@dataclass(frozen=True)
class TokenRecycling(Strategy):
    """Draft what the target found likeliest when it was last asked about the same tokens.

    Every verified node, taken or not, leaves an entry: the tokens that lead to it and the target's likeliest answers.
    The paper's has one token, its table a row for each of the vocabulary. Here it has the last ``context`` tokens, and
    of a bounded number of entries the one that shares most of them is drafted from, of several the latest. A prompt's
    tokens are entries too, each with the one that follows it. Rows learn nothing of each other.

    ``tree`` is ``dynamic:N``, for the N nodes that the answers make likeliest, ``published``, for the paper's 80 ranks,
    or a tree of ranks as `jaxinfer.decoding.trees.static` reads it. By default it is dynamic: of 8 nodes on a CPU, of
    what a sum of bounded size has place for, else of 64. What was never asked about drafts nothing. ``paths`` and
    ``growth`` are the tree itself.
    """

    name: ClassVar[str] = "token_recycling"
    description: ClassVar[str] = "draft what the target answered when it last saw the same tokens"

    tree: str = ""
    context: int = len(_TRUST)
    growth: Growth = field(default=Growth(_MANY_NODES, _MOST_DEPTH), repr=False)
    paths: Paths = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_range(self, "context", 1, len(_TRUST))

    @property
    def may_draft_nothing(self) -> bool:
        return True

    @property
    def headroom(self) -> int:
        return 1 + len(self.paths) if self.paths else self.growth.num_nodes

    @property
    def max_depth(self) -> int:
        return tree_depth(self.paths) if self.paths else self.growth.max_depth

    @property
    def num_ranks(self) -> int:
        """How many answers an entry has."""
        return 1 + max(map(max, self.paths)) if self.paths else self.growth.num_ranks

    def bounded(self, nodes: int) -> "TokenRecycling":
        return self if self.tree else replace(self, tree=f"dynamic:{min(nodes, _MANY_NODES)}")

    def resolve(self, target: Target) -> "TokenRecycling":
        """Read the tree; raises InvalidOption for one that has more ranks or nodes than there can be."""
        num_nodes = read_growth(self.tree) if self.tree else few_nodes(target) or _MANY_NODES
        if num_nodes is None:
            resolved = replace(self, paths=PUBLISHED_TREE if self.tree == "published" else read_tree(self.tree))
        else:
            growth = Growth(num_nodes, min(num_nodes - 1, _MOST_DEPTH))
            resolved = replace(self, growth=check_growth(growth), paths=())
        if resolved.num_ranks > target.config.num_tokens:
            raise InvalidOption(
                f"token_recycling: the tree has {resolved.num_ranks} ranks, the vocabulary {target.config.num_tokens}"
            )
        return resolved

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Answers:
        batch, num_entries = state.lengths_B.shape[0], _NUM_ENTRIES // self.headroom * self.headroom
        answers = Answers(
            jnp.full((batch, self.context, num_entries), -1, jnp.int32),
            jnp.zeros((batch, self.num_ranks, num_entries), jnp.int32),
            jnp.full((batch, self.num_ranks, num_entries), -jnp.inf, jnp.float32),
            jnp.zeros((batch,), jnp.int32),
        )
        # The prompt's tokens are the newest entries, as far as there is place, and the first that steps write over are
        # the empty ones.
        num_seeds = min(prefilled.num_tokens, num_entries)
        place_BE = state.lengths_B[:, None] - 1 - num_seeds + jnp.arange(num_seeds)
        next_BE = jnp.take_along_axis(state.tokens_BS, jnp.maximum(place_BE + 1, 0), axis=1)
        log_p_BE = jnp.full(next_BE.shape, jnp.log(_PROMPT_CHANCE), jnp.float32)
        contexts_BJE = tokens_before(state, place_BE, self.context)
        seeds = Answers(contexts_BJE, next_BE[:, None], log_p_BE[:, None], answers.written_B)
        return write(answers, seeds, jnp.full((batch,), num_entries - num_seeds, jnp.int32))

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Answers) -> Proposal:
        ends_BJ1 = tokens_before(state, state.lengths_B[:, None] - 1, self.context)
        backend = model.decoder.backend
        roots_B, guess = current_tokens(state), guess_from(memory, ends_BJ1, backend)
        if self.paths:
            tree, log_p_BM = follow(self.paths, roots_B, guess)
        else:
            tree, log_p_BM = grow(self.growth, roots_B, guess, backend)
        valid_BM = log_p_BM > -jnp.inf
        tree = tree._replace(valid_BM=valid_BM, acceptable_BM=valid_BM)
        return Proposal(tree, Asked(memory, node_contexts(tree, ends_BJ1)), chances_BM=jnp.exp(log_p_BM))

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Answers:
        answers, contexts_BJM = proposal.memory
        log_p_BMR, tokens_BMR = top_chances({}, verified.logits_BMV, self.num_ranks, model.decoder.backend, 1.0)
        new = Answers(
            jnp.where(proposal.tree.valid_BM[:, None], contexts_BJM, -1),
            tokens_BMR.swapaxes(1, 2),
            log_p_BMR.swapaxes(1, 2),
            answers.written_B + contexts_BJM.shape[2],
        )
        return write(answers, new, answers.written_B % answers.contexts_BJE.shape[2])


def tokens_before(state: DecodeState, places_BE: Int[Array, "B E"], count: int) -> Int[Array, "B J E"]:
    """Return the tokens up to and with places of the text, the nearest first; -2 where the text has not begun."""
    columns = []
    for back in range(count):
        at_BE = places_BE - back
        tokens_BE = jnp.take_along_axis(state.tokens_BS, jnp.maximum(at_BE, 0), axis=1)
        columns.append(jnp.where(at_BE >= 0, tokens_BE, -2))
    return jnp.stack(columns, axis=1)


def node_contexts(tree: DraftTree, ends_BJ1: Int[Array, "B J 1"]) -> Int[Array, "B J M"]:
    """Return the tokens up to and with each node, the nearest first; ``ends_BJ1`` are those of the root."""
    columns = [tree.tokens_BM]
    for back in range(1, ends_BJ1.shape[1]):
        above_BM = jnp.take_along_axis(columns[-1], tree.parents_BM, axis=1)
        columns.append(above_BM.at[:, 0].set(ends_BJ1[:, back, 0]))
    return jnp.stack(columns, axis=1)


def guess_from(answers: Answers, ends_BJ1: Int[Array, "B J 1"], backend: Backend) -> Guess:
    """Return a guess by what was answered after the tokens up to each beam; these are what it passes on."""
    trust_J = jnp.log(jnp.asarray((0.0, *_TRUST), jnp.float32))

    def guess(depth: int, beams: Beams, above_BJW: Any) -> tuple[Any, Any, Any]:
        contexts_BJW = ends_BJ1
        if above_BJW is not None:
            above_BJW = jnp.take_along_axis(above_BJW, beams.origins_BW[:, None], axis=2)
            contexts_BJW = jnp.concatenate([beams.tokens_BW[:, None], above_BJW[:, :-1]], axis=1)
        log_p_BRW, tokens_BRW, length_BW = look_up(answers, contexts_BJW, backend)
        log_p_BRW += trust_J[length_BW][:, None]
        return log_p_BRW.swapaxes(1, 2), tokens_BRW.swapaxes(1, 2), contexts_BJW

    return guess


def look_up(
    answers: Answers, contexts_BJW: Int[Array, "B J W"], backend: Backend
) -> tuple[Float[Array, "B R W"], Int[Array, "B R W"], Int[Array, "B W"]]:
    """Return the latest of the answers that came after most of these tokens, and after how many, 0 for none.

    That is the log-probabilities of its tokens and these.
    """
    num_entries = answers.contexts_BJE.shape[2]
    is_equal_BWE, length_BWE = jnp.bool_(True), jnp.int32(0)
    for back in range(contexts_BJW.shape[1]):
        is_equal_BWE &= answers.contexts_BJE[:, back, None] == contexts_BJW[:, back, :, None]
        length_BWE += is_equal_BWE
    order_BE = (jnp.arange(num_entries) - answers.written_B[:, None]) % num_entries
    best_BW = jnp.max(length_BWE * num_entries + order_BE[:, None], axis=-1)
    slot_BW = (best_BW + answers.written_B[:, None]) % num_entries
    log_p_BRW, tokens_BRW = (
        _take(values_BRE, slot_BW, backend) for values_BRE in (answers.log_p_BRE, answers.tokens_BRE)
    )
    return log_p_BRW, tokens_BRW, best_BW // num_entries


def _take(values_BRE: Any, slots_BW: Int[Array, "B W"], backend: Backend) -> Array:
    """Return the values of some entries; for a gather along lanes a TPU would copy the whole table first."""
    if backend.platform == "cpu":
        return jnp.take_along_axis(values_BRE, slots_BW[:, None], axis=2)
    is_slot_B1WE = (slots_BW[..., None] == jnp.arange(values_BRE.shape[2]))[:, None]
    return jnp.sum(jnp.where(is_slot_B1WE, values_BRE[:, :, None], 0), axis=-1)


def write(answers: Answers, new: Answers, first_B: Int[Array, " B"]) -> Answers:
    """Return the answers with new ones from a place of each row's ring on, where they lie; they reach not past its end.

    Of the ranks that new entries do not have, whatever stood there stays.
    """
    set_slice = jax.vmap(lambda ring, part, first: jax.lax.dynamic_update_slice(ring, part, (0, first)))
    contexts_BJE, tokens_BRE, log_p_BRE = (set_slice(old, part, first_B) for old, part in zip(answers[:3], new[:3]))
    return Answers(contexts_BJE, tokens_BRE, log_p_BRE, new.written_B)
