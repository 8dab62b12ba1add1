"""Which drafters there are for a model that nobody named any for."""

from jaxinfer.checkpoint.drafters.shipped import is_shipped
from jaxinfer.decoding.strategies.medusa import Medusa
from jaxinfer.decoding.strategies.prompt_lookup import PromptLookup
from jaxinfer.decoding.strategies.token_recycling import TokenRecycling
from jaxinfer.decoding.strategy import Strategy, Target

UNTRAINED: tuple[Strategy, ...] = (TokenRecycling(), PromptLookup())


def drafters_at_hand(target: Target) -> tuple[Strategy, ...]:
    """Return the heads that come for the weights, or else what the target has answered; and the text."""
    if is_shipped(Medusa.folder_kind, target.fingerprint):
        return Medusa(), PromptLookup()
    return UNTRAINED
