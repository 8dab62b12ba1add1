"""What a strategy's options come to in the programs of its searches."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.decoding.beam.state import SearchRule
from jaxinfer.decoding.strategies.beam import BeamSearch
from jaxinfer.ops.backend import Backend


def search_rule(strategy: BeamSearch) -> SearchRule:
    """Return how texts that ended are ranked, and when a search ends."""
    never, penalty = strategy.early_stopping == "never", strategy.length_penalty
    return SearchRule(
        length_penalty=jax.device_put(np.float32(penalty)),
        ends_when_full=jax.device_put(np.bool_(strategy.early_stopping is True or strategy.width == 1)),
        may_grow_longer=jax.device_put(np.bool_(never and penalty > 0)),
    )


def num_candidates(strategy: BeamSearch, eos_token_ids: Sequence[int], vocab_size: int) -> int:
    """Return how many candidates a step looks at.

    With one for every running text to end by every stop id, as many are left as can run on.
    """
    return min(strategy.width * max(2, 1 + len(set(eos_token_ids))), strategy.width * vocab_size)


def score_dtype(backend: Backend) -> Any:
    """Return the type of a search's scores."""
    return jnp.promote_types(backend.compute_dtype, jnp.float32)
