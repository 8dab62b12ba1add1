"""What a strategy needs to draft from texts alone: a state of them, and a model that it does not look at."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.state import DecodeState
from jaxinfer.decoding.strategy import Proposal, Strategy
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from tests.toys import TINY_LLAMA, float32_backend

NUM_SLOTS = 24
UNUSED = Model(Decoder(TINY_LLAMA, float32_backend()), {})


def state_of(texts: Sequence[Sequence[int]]) -> DecodeState:
    """Return a state that has the texts, each of fewer than `NUM_SLOTS` tokens, and nothing else."""
    tokens_BS = np.full((len(texts), NUM_SLOTS), 1, np.int32)
    for row, text in enumerate(texts):
        tokens_BS[row, : len(text)] = text
    lengths_B = jnp.asarray([len(text) for text in texts], jnp.int32)
    nothing: dict[str, Any] = dict.fromkeys(DecodeState._fields)
    empty = DecodeState(**nothing)
    return empty._replace(tokens_BS=jnp.asarray(tokens_BS), lengths_B=lengths_B)


def propose(strategy: Strategy, state: DecodeState, memory: Any = (), params: Any = ()) -> Proposal:
    """Return what a strategy drafts without the model, by one program for all texts; ``params`` are its parameters."""
    return _proposing(strategy)(params, state, memory)


@cache
def _proposing(strategy: Strategy) -> Callable[[Any, DecodeState, Any], Proposal]:
    return jax.jit(lambda params, state, memory: strategy.propose(UNUSED, params, state, memory))
