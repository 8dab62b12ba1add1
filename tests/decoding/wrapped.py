"""A strategy that does as another one does, for those that only look on."""

from dataclasses import dataclass
from typing import Any

from jaxinfer import Strategy
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Nodes, Proposal, Verified
from jaxinfer.models.model import Model


@dataclass(frozen=True)
class Wrapped(Strategy):
    """Say of itself what the other one says; its memory has the other's own as ``inner``."""

    strategy: Strategy

    @property
    def acceptance(self) -> str:
        return self.strategy.acceptance

    @property
    def branches(self) -> bool:
        return self.strategy.branches

    @property
    def has_distinct_siblings(self) -> bool:
        return self.strategy.has_distinct_siblings

    @property
    def features(self) -> tuple[int, ...]:
        return self.strategy.features

    @property
    def typical_thresholds(self) -> tuple[float, float]:
        return self.strategy.typical_thresholds

    @property
    def parameters(self) -> Any:
        return self.strategy.parameters

    @property
    def headroom(self) -> int:
        return self.strategy.headroom

    @property
    def max_depth(self) -> int:
        return self.strategy.max_depth

    def check_slots(self, num_slots: int) -> None:
        self.strategy.check_slots(num_slots)

    def forward(self, model: Model, params: Any, state: DecodeState, proposal: Proposal, nodes: Nodes) -> Verified:
        return self.strategy.forward(model, params, state, proposal._replace(memory=proposal.memory.inner), nodes)
