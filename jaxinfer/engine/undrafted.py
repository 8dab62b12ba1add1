"""Plain steps of rows whose drafter rests: what it needs to begin again is kept."""

from dataclasses import dataclass
from typing import Any

from jaxinfer.decoding.acceptance.walk import Walk
from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategies.autoregressive import Autoregressive
from jaxinfer.decoding.strategy import Prefilled, Proposal, Verified
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Float


@dataclass(frozen=True)
class Undrafted(Autoregressive):
    """Plain decoding that remembers the hidden state which each row's current token was drawn from."""

    def start(self, model: Model, params: Any, state: DecodeState, prefilled: Prefilled) -> Float[Array, "B D"]:
        return prefilled.hidden_BD

    def observe(
        self,
        model: Model,
        params: Any,
        state: DecodeState,
        proposal: Proposal,
        verified: Verified,
        draws_BM: Any,
        walk: Walk,
    ) -> Float[Array, "B D"]:
        return verified.last.hidden_BD
