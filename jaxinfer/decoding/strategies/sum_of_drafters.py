"""Sums of drafters: the union of their trees is verified in one pass of the target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.drafting.part_view import part_view
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import LastNode, Nodes, Prefilled, Proposal, Strategy, Target, Verified, few_nodes
from jaxinfer.decoding.trees.merge import merge, select
from jaxinfer.decoding.trees.static import MAX_NODES
from jaxinfer.decoding.trees.tree import ancestors, depths
from jaxinfer.errors import InvalidOption
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.rows import add_in_rows

# How many steps' worth of belief the first guess of a node's chances has, and that guess for each step down where the
# drafter has none. Of 1, 2, 4, ... 32 steps, 8 foretold best what prompt lookup would draft right along 52 plain texts.
_PRIOR_STEPS, _PRIOR_CHANCE = 8.0, 0.5
# A step of fewer is hardly cheaper.
_FEWEST_NODES = 4
# What is remembered of a count from step to step: texts change.
_MEMORY = 0.95


class Chances(NamedTuple):
    """How often each node of one drafter's trees was there, by kind of tree, and how often taken, the last the most."""

    tries_BAM: Float[Array, "B A M"]
    hits_BAM: Float[Array, "B A M"]


class SumMemory(NamedTuple):
    """The drafters' own memories, their chances, and where the nodes of this step's trees stand in the union."""

    memories: tuple[Any, ...]
    chances: tuple[Chances, ...]
    proposals: Any = ()
    places: Any = ()


@dataclass(frozen=True)
class SumOfDrafters(Strategy):
    """Draft with several strategies at once.

    Nodes on which drafters agree are verified once. ``nodes`` bounds the union, root included: the likeliest nodes
    stay, by what their drafter knows of them, or by how often such nodes were taken in each row's own recent steps. 0
    keeps all, but on a CPU, where more cost more than they gain, few. Only drafters that accept by match and whose
    verification serves any tree can be summed, at most one of them with a verification of its own.
    """

    parts: tuple[Strategy, ...] = ()
    nodes: int = 0

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.drafts_elsewhere:
                raise InvalidOption(f"{part.name}: devices= drafts alone: leave it out, or the other drafters")
            if not part.verifies_any_tree or part.exactness != "identical":
                raise InvalidOption(
                    f"{part.name} cannot be part of a sum: it does not verify any drafter's tree, and by match"
                )
        if len(verifying := [part.name for part in self.parts if _verifies(part)]) > 1:
            raise InvalidOption(f"{' and '.join(verifying)} cannot be parts of one sum: each has its own way to verify")
        if self.nodes:
            check_range(self, "nodes", max(2, self._least_nodes), MAX_NODES)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of the parts, joined as in a specification."""
        return "+".join(part.name for part in self.parts)

    @property
    def parameters(self) -> Any:
        return tuple(part.parameters for part in self.parts)

    @property
    def headroom(self) -> int:
        # What a draft model catches up on stands in its own cache at these places.
        drafting = 1 + sum(part.headroom for part in self.parts)
        if not any(_verifies(part) for part in self.parts):
            return min(self.nodes or drafting, drafting)
        nodes = 1 + sum(part.num_nodes - 1 for part in self.parts)
        return max(drafting, min(self.nodes or nodes, nodes) * self.slots_per_node)

    @property
    def fills_steps(self) -> bool:
        return all(part.fills_steps for part in self.parts)

    @property
    def features(self) -> tuple[int, ...]:
        return tuple(sorted({layer for part in self.parts for layer in part.features}))

    @property
    def slots_per_node(self) -> int:
        return max(part.slots_per_node for part in self.parts)

    @property
    def max_depth(self) -> int:
        return max(part.max_depth for part in self.parts)

    @property
    def narrower(self) -> tuple["SumOfDrafters", ...]:
        """Half of its nodes, if it bounds them, and half of that, down to four."""
        return tuple(replace(self, nodes=nodes) for nodes in self.fewer_nodes)

    @property
    def fewer_nodes(self) -> tuple[int, ...]:
        """How many nodes those that are `narrower` have."""
        fewer, nodes = [], self.nodes // 2
        while nodes >= max(_FEWEST_NODES, self._least_nodes):
            fewer.append(nodes)
            nodes //= 2
        return tuple(fewer)

    @property
    def asked_parts(self) -> tuple[Strategy, ...]:
        """The parts before they are resolved, asked for no more than the sum has a use for."""
        return tuple(part.bounded(self.nodes) for part in self.parts) if self.nodes else self.parts

    def bounded_for(self, target: Target) -> "SumOfDrafters":
        """Choose how many nodes to verify on the target's device, unless that is given."""
        few = few_nodes(target)
        if self.nodes or few is None:
            return self
        nodes = self._least_nodes - 1 + few
        return self if nodes > MAX_NODES else replace(self, nodes=nodes)

    def resolve(self, target: Target) -> "SumOfDrafters":
        """Load what the parts name, and tell them how deep the sum drafts."""
        asked = self.bounded_for(target)
        parts = [part.resolve(target) for part in asked.asked_parts]
        reading = [part.name for part in parts if part.features]
        if reading and (verifying := [part.name for part in parts if _verifies(part)]):
            raise InvalidOption(
                f"{reading[0]} cannot be summed with {verifying[0]}, whose verification keeps no features to draft from"
            )
        depth = max(part.max_depth for part in parts)
        return replace(asked, parts=tuple(part.in_sum(depth) for part in parts))

    @property
    def keeps_file(self) -> bool:
        return any(part.keeps_file for part in self.parts)

    def learn(self, answer: Sequence[int]) -> None:
        for part in self.parts:
            part.learn(answer)

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> SumMemory:
        memories = tuple(part.start(model, mine, state, prefilled) for part, mine in zip(self.parts, params))
        batch = state.lengths_B.shape[0]
        zeros = [jnp.zeros((batch, part.num_kinds, part.num_nodes), jnp.float32) for part in self.parts]
        return SumMemory(memories, tuple(Chances(zero, zero) for zero in zeros))

    def propose(self, model: Model, params: Any, state: DecodeState, memory: SumMemory) -> Proposal:
        drafts = tuple(
            part.propose(model, mine, state, remembered)
            for part, mine, remembered in zip(self.parts, params, memory.memories)
        )
        merged = merge([draft.tree for draft in drafts])
        tree, places = merged.tree, merged.places
        if self.nodes and self.nodes < tree.tokens_BM.shape[1]:
            relation_BMM = ancestors(tree.parents_BM)
            gains_BM = self._gains(tree.tokens_BM.shape, drafts, places, memory.chances)
            tree, moved_BM = select(tree, relation_BMM, gains_BM, self.nodes, model.decoder.backend)
            places = tuple(jnp.take_along_axis(moved_BM, places_BM, axis=1) for places_BM in places)
        passes = sum(draft.passes for draft in drafts)
        return Proposal(tree, SumMemory(memory.memories, memory.chances, drafts, places), passes=passes)

    def forward(self, model: Model, params: Any, state: DecodeState, proposal: Proposal, nodes: Nodes) -> Verified:
        for part, mine in zip(self.parts, params):
            if _verifies(part):
                return part.forward(model, mine, state, Proposal(proposal.tree, None), nodes)
        return super().forward(model, params, state, proposal, nodes)

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> SumMemory:
        memory: SumMemory = proposal.memory
        memories, chances = [], []
        for part, mine, draft, places_BM, seen in zip(
            self.parts, params, memory.proposals, memory.places, memory.chances
        ):
            view = part_view(part, draft, places_BM, proposal.tree, verified, draws_BM, walk, _verifies(part))
            memories.append(part.observe(model, mine, state, view.proposal, view.verified, view.draws_BM, view.walk))
            was_tried_BM, was_taken_BM = view.proposal.tree.valid_BM, view.is_taken_BM
            is_kind_BA1 = (jnp.arange(part.num_kinds) == _kinds(draft)[:, None])[..., None]
            # A tree may have fewer nodes than its drafter's largest.
            missing = seen.tries_BAM.shape[2] - was_tried_BM.shape[1]
            counts = (
                _MEMORY * counts_BAM + (is_kind_BA1 & jnp.pad(was_BM, ((0, 0), (0, missing)))[:, None])
                for counts_BAM, was_BM in zip(seen, (was_tried_BM, was_taken_BM))
            )
            chances.append(Chances(*counts))
        return SumMemory(tuple(memories), tuple(chances))

    def resumed(self, memory: SumMemory, last: LastNode) -> SumMemory:
        return memory._replace(
            memories=tuple(part.resumed(each, last) for part, each in zip(self.parts, memory.memories))
        )

    @property
    def _least_nodes(self) -> int:
        """The root, and the nodes of parts that need all of theirs."""
        return 1 + sum(part.num_nodes - 1 for part in self.parts if part.needs_every_node)

    def _gains(
        self, shape: tuple[int, ...], drafts: Any, places: Any, chances: tuple[Chances, ...]
    ) -> Float[Array, "B M"]:
        """Return each node's chance to be taken: that one of the drafters that propose it is right."""
        log_missed_BM = jnp.zeros(shape, jnp.float32)
        for part, draft, places_BM, seen in zip(self.parts, drafts, places, chances):
            if part.needs_every_node:
                chance_BM = jnp.ones(places_BM.shape, jnp.float32)
            elif draft.chances_BM is not None and draft.kinds_B is None:
                chance_BM = draft.chances_BM
            else:
                prior_BM = draft.chances_BM
                if prior_BM is None:
                    depths_BM = depths(ancestors(draft.tree.parents_BM))
                    prior_BM = _PRIOR_CHANCE ** depths_BM.astype(jnp.float32)
                kinds_B11 = _kinds(draft)[:, None, None]
                num_nodes = draft.tree.tokens_BM.shape[1]
                tries_BM, hits_BM = (
                    jnp.take_along_axis(counts_BAM, kinds_B11, axis=1)[:, 0, :num_nodes] for counts_BAM in seen
                )
                chance_BM = (hits_BM + _PRIOR_STEPS * prior_BM) / (tries_BM + _PRIOR_STEPS)
            missed_BM = jnp.where(draft.tree.valid_BM, 1 - jnp.minimum(chance_BM.astype(jnp.float32), 1 - 1e-6), 1.0)
            log_missed_BM = add_in_rows(log_missed_BM, places_BM, jnp.log(missed_BM))
        return 1 - jnp.exp(log_missed_BM)


def _verifies(part: Strategy) -> bool:
    return type(part).forward is not Strategy.forward


def _kinds(draft: Proposal) -> Int[Array, " B"]:
    """Return which kind of its drafter's drafts each row's is."""
    return jnp.zeros(draft.tree.tokens_BM.shape[0], jnp.int32) if draft.kinds_B is None else draft.kinds_B
