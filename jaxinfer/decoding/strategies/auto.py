"""Drafters chosen by what is there: those that were trained for the weights, and what needs no training."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax

from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.drafting.loaded_model import loses_nothing
from jaxinfer.decoding.drafting.schedules import first_lengths
from jaxinfer.decoding.drafting.tree_drafter import TreeDrafter
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.at_hand import UNTRAINED, drafters_at_hand
from jaxinfer.decoding.strategies.cascade import FEW_NODES, Cascade, CascadeMemory
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategy import Prefilled, Proposal, Strategy, Target, Verified, few_nodes
from jaxinfer.models.model import Model
from jaxinfer.ops.few_bits.quantized_array import is_quantized

# Where rows are free: of 8 texts that is as many as a chip multiplies while the weights arrive (240 on v5e).
_MOST_NODES = 32
# Weights in 4 bits arrive sooner: on a CPU a third row is the last that hardly costs more (steps of 1, 2, 3, 4 and 8
# nodes of the default model: 5.0, 5.0, 5.6, 7.0, 9.6 ms), so three nodes stand for what else has four.
_FOUR_BITS, _NODES_OF_FOUR_BITS, _FEWEST_ELSE = 4, 3, 4
_NONE = "none"


@dataclass(frozen=True)
class Auto(SumOfDrafters):
    """Draft with the heads that come for the weights, or else with what the target has answered, and from the text.

    Whoever runs it may verify fewer nodes, or draft nothing, where that is faster: an engine does, and on a CPU
    `jaxinfer.LanguageModel.generate` too, by what steps have cost and what each text has gained. Then the model in
    fewer bits may also decode ahead, as in `cascade`: in ``weights``, or, without a word about them, on a CPU if
    rounding the model to 4 bits loses nothing, since its file had no more. ``none`` spares the memory that they take.
    """

    name: ClassVar[str] = "auto"
    description: ClassVar[str] = "draft with what there is for the model, where it pays"

    parts: tuple[Strategy, ...] = field(default=UNTRAINED, repr=False)
    weights: str = ""
    cascade: Cascade | None = field(default=None, repr=False)
    is_in_four_bits: bool = field(default=False, repr=False)

    @property
    def adapts(self) -> bool:
        return True

    @property
    def ahead(self) -> Cascade | None:
        return self.cascade

    @property
    def headroom(self) -> int:
        return super().headroom if self.cascade is None else max(super().headroom, self.cascade.headroom)

    @property
    def num_nodes(self) -> int:
        return -(-super().headroom // self.slots_per_node)

    @property
    def max_depth(self) -> int:
        return super().max_depth if self.cascade is None else max(super().max_depth, self.cascade.max_depth)

    @property
    def narrower(self) -> tuple[SumOfDrafters, ...]:
        """Those with fewer nodes, whose drafters do not look for more of them either."""

        def narrowed(nodes: int) -> SumOfDrafters:
            parts = (each.narrowed(nodes) if isinstance(each, TreeDrafter) else each for each in self.parts)
            return replace(self, nodes=nodes, parts=tuple(parts))

        return tuple(map(narrowed, self.fewer_nodes))

    @property
    def fewer_nodes(self) -> tuple[int, ...]:
        """Half as many, and half of that, and so on; in 4 bits, at last as many as cost little."""
        halves, few = super().fewer_nodes, _NODES_OF_FOUR_BITS
        if not self.is_in_four_bits or few < self._least_nodes or self.nodes <= few:
            return halves
        return *(nodes for nodes in halves if nodes > _FEWEST_ELSE), few

    def bounded_for(self, target: Target) -> "SumOfDrafters":
        """Choose the most nodes of a step, of which fewer are verified where that is faster."""
        bounded = super().bounded_for(target)
        return bounded if bounded.nodes else replace(bounded, nodes=_MOST_NODES)

    def resolve(self, target: Target) -> "Auto":
        """Choose the drafters, and load them."""
        asked = self if self.parts != UNTRAINED else replace(self, parts=drafters_at_hand(target))
        resolved = super(Auto, asked).resolve(target)
        assert isinstance(resolved, Auto)
        blocks = jax.tree.leaves(target.params["blocks"], is_leaf=is_quantized)
        in_four_bits = (is_quantized(each) and each.form.bits == _FOUR_BITS for each in blocks)
        is_in_four_bits = few_nodes(target) is not None and any(in_four_bits)
        return replace(resolved, cascade=_cascade(resolved, target), is_in_four_bits=is_in_four_bits)

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Any:
        memory = super().start(model, params, state, prefilled)
        if self.cascade is None:
            return memory
        return CascadeMemory(memory, first_lengths(state.lengths_B.shape[0], self.cascade.num_draft_tokens))

    def propose(self, model: Model, params: Any, state: DecodeState, memory: Any) -> Proposal:
        if self.cascade is None:
            return super().propose(model, params, state, memory)
        proposal = super().propose(model, params, state, memory.of_drafter)
        return proposal._replace(memory=CascadeMemory(proposal.memory, memory.lengths))

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Any:
        if self.cascade is None:
            return super().observe(model, params, state, proposal, verified, draws_BM, walk)
        kept: CascadeMemory = proposal.memory
        own = proposal._replace(memory=kept.of_drafter)
        return CascadeMemory(super().observe(model, params, state, own, verified, draws_BM, walk), kept.lengths)


def _cascade(drafters: Auto, target: Target) -> Cascade | None:
    """Return what lets the model in fewer bits decode ahead, drafted for by the same drafters, if that is wanted."""
    few, asked = few_nodes(target) is not None, drafters.cascade
    if asked is None:
        asked = Cascade(drafters.weights or Cascade.weights)
        if drafters.weights == _NONE or not (drafters.weights or (few and loses_nothing(asked.weights, target))):
            return None
    own = SumOfDrafters(drafters.parts, min(FEW_NODES, drafters.nodes) if few else drafters.nodes)
    # No two kinds of steps have as many nodes.
    longest = max(asked.num_draft_tokens, drafters.num_nodes)
    return replace(asked, num_draft_tokens=longest).drafted_for(own, target)
