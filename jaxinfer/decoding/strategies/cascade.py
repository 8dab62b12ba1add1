"""Cascaded drafting: the model in fewer bits decodes ahead, and is itself drafted for (Chen et al., 2312.11462)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from jaxinfer.checkpoint.few_bits import parse_few_bits
from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.drafting.loaded_model import in_fewer_bits, place_draft_model
from jaxinfer.decoding.drafting.schedules import Lengths, first_lengths, next_lengths
from jaxinfer.decoding.drafting.speculate import future_chain, speculate
from jaxinfer.decoding.options import check_range
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.at_hand import UNTRAINED, drafters_at_hand
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategy import DecodesAhead, Prefilled, Proposal, Strategy, Target, Verified, few_nodes
from jaxinfer.decoding.trees.static import MAX_NODES
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.ops.backend import Backend

# Where rows cost time. In four bits a step of 8 nodes takes a fifth more than one of 4 on two CPU cores, and later ones
# are seldom taken; elsewhere a step of so many takes as long as one of a single node.
FEW_NODES, _NODES = 4, 16
_AT_HAND = SumOfDrafters(UNTRAINED)


class CascadeMemory(NamedTuple):
    """What the drafters of the weights in fewer bits remember, and how much these draft next."""

    of_drafter: Any
    lengths: Lengths


@dataclass(frozen=True)
class Cascade(DecodesAhead):
    """Decode ahead with the model's own weights in fewer bits, by the drafters that `auto` would choose.

    Three levels: drafters that cost little (heads, if any came for the weights or are in the folder ``heads``, or else
    token recycling; and prompt lookup) draft ``nodes`` - 1 tokens at a time for the model in ``weights``, and that one
    ``num_draft_tokens`` for the model as it is: one less after each time that not all were taken, and two more, up to
    that number, when all were. Both models share one cache: the draft reads what the model has written of the text, and
    what it writes itself is written over. ``nodes`` 0 are as many as the device does well. It takes the memory of the
    weights in fewer bits, and gains as far as these draw what the model draws.
    """

    name: ClassVar[str] = "cascade"
    description: ClassVar[str] = "decode ahead with the model in fewer bits, which has drafters of its own"

    weights: str = "int4:group=32"
    num_draft_tokens: int = 12
    nodes: int = 0
    heads: str = ""
    drafter: Strategy = field(default=_AT_HAND, repr=False)
    config: DecoderConfig | None = field(default=None, repr=False)
    backend: Backend | None = field(default=None, repr=False)
    params: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_range(self, "num_draft_tokens", 1, 64)
        if self.nodes:
            check_range(self, "nodes", 2, MAX_NODES)

    @property
    def parameters(self) -> Any:
        return () if self.params is None else (self.params, self.drafter.parameters)

    @property
    def branches(self) -> bool:
        return False

    @property
    def verifies_any_tree(self) -> bool:
        # Its drafts are in the target's cache, which a sum does not hand on.
        return False

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    @property
    def num_nodes(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def headroom(self) -> int:
        return self.num_draft_tokens + self.drafter.headroom

    def resolve(self, target: Target) -> "Cascade":
        """Round the weights, and load what drafts for them; raises InvalidOption for bits that do not fit."""
        return self.drafted_for(self.drafter_for(target).resolve(target), target)

    def drafted_for(self, drafter: Strategy, target: Target) -> "Cascade":
        """Round the weights, for which a strategy that has been resolved drafts; raises as `resolve` does."""
        if self.config is not None and self.backend is not None:
            loaded = place_draft_model(self.name, "", self.config, self.backend, self.params, target)
        else:
            loaded = in_fewer_bits(self.name, parse_few_bits(self.weights), target)
        return replace(self, drafter=drafter, **loaded._asdict())

    def drafter_for(self, target: Target) -> Strategy:
        """Return what drafts for the weights in fewer bits, before it is resolved."""
        if self.drafter != _AT_HAND:
            return self.drafter
        parts = (Medusa(heads=self.heads), PromptLookup()) if self.heads else drafters_at_hand(target)
        return SumOfDrafters(parts, self.nodes or (_NODES if few_nodes(target) is None else FEW_NODES))

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> CascadeMemory:
        lengths = first_lengths(state.lengths_B.shape[0], self.num_draft_tokens)
        return CascadeMemory(self.drafter.start(model, params[1], state, prefilled), lengths)

    def propose(self, model: Model, params: Any, state: DecodeState, memory: CascadeMemory) -> Proposal:
        assert self.config is not None
        assert self.backend is not None
        weights, of_drafter = params
        ahead = Model(Decoder(self.config, self.backend), weights)
        begun = self.drafter, memory.of_drafter, of_drafter, state, state.cache
        future, drafted = speculate(ahead, *begun, memory.lengths.counts_B)
        tree = future_chain(state, future, self.num_draft_tokens)
        kept = CascadeMemory(drafted, memory.lengths)
        return Proposal(tree, kept, future.cache, steps_ahead=future.steps_B - state.steps_B)

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> CascadeMemory:
        memory: CascadeMemory = proposal.memory
        accepted_B, running_B = walk.taken_B - 1, ~state.finished_B
        lengths = next_lengths("heuristic", memory.lengths, accepted_B, running_B, self.num_draft_tokens)
        return CascadeMemory(self.drafter.resumed(memory.of_drafter, verified.last), lengths)
