"""Drafters chosen by what is there: those that were trained for the weights, and what needs no training."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from jaxinfer.checkpoint.drafters.shipped import is_shipped
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategies.token_recycling import TokenRecycling
from jaxinfer.decoding.strategy import Strategy, Target

_UNTRAINED = (TokenRecycling(), PromptLookup())
# Where rows are free: of 8 texts that is as many as a chip multiplies while the weights arrive (240 on v5e).
_MOST_NODES = 32


@dataclass(frozen=True)
class Auto(SumOfDrafters):
    """Draft with the heads that come for the weights, or else with what the target has answered, and from the text.

    Whoever runs it may verify fewer nodes, or draft nothing, where that is faster: an engine does, and on a CPU
    `jaxinfer.LanguageModel.generate` too, by what steps have cost and what each text has gained.
    """

    name: ClassVar[str] = "auto"
    description: ClassVar[str] = "draft with what there is for the model, where it pays"

    parts: tuple[Strategy, ...] = field(default=_UNTRAINED, repr=False)

    @property
    def adapts(self) -> bool:
        return True

    def bounded_for(self, target: Target) -> "SumOfDrafters":
        """Choose the most nodes of a step, of which fewer are verified where that is faster."""
        bounded = super().bounded_for(target)
        return bounded if bounded.nodes else replace(bounded, nodes=_MOST_NODES)

    def resolve(self, target: Target) -> "Auto":
        """Choose the drafters, and load them."""
        if self.parts == _UNTRAINED and is_shipped(Medusa.folder_kind, target.fingerprint):
            return replace(self, parts=(Medusa(), PromptLookup())).resolve(target)
        resolved = super().resolve(target)
        assert isinstance(resolved, Auto)
        return resolved
