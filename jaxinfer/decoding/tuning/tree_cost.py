"""What it costs the target to verify a tree of M nodes on this device: what the choice of a tree depends on."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.slots import slots_for
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Int, Params
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.sampling.draw import best_token

NODE_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def measure_costs(
    decoder: Decoder,
    params: Params,
    node_counts: Sequence[int] = NODE_COUNTS,
    *,
    num_slots: int = 512,
    num_rows: int = 1,
    num_steps: int = 16,
    trials: int = 3,
) -> dict[int, float]:
    """Return the seconds that a compiled step of M nodes takes, by M: forward, logits, draws and commit.

    Texts have room for ``num_slots`` tokens. Each figure is the best of ``trials`` runs of ``num_steps`` steps.
    """
    return {
        count: _seconds(decoder, params, count, slots_for(num_slots + count), num_rows, num_steps, trials)
        for count in node_counts
    }


def _seconds(
    decoder: Decoder, params: Params, count: int, num_slots: int, num_rows: int, num_steps: int, trials: int
) -> float:
    def steps(params: Params, cache: Any, tokens_BM: Int[Array, "B M"]) -> tuple[Any, Array]:
        return jax.lax.fori_loop(
            0, num_steps, lambda _, carry: _verify(Model(decoder, params), *carry), (cache, tokens_BM)
        )

    cache = create_cache(decoder.config, num_rows, num_slots, decoder.backend, count)
    tokens_BM = jnp.ones((num_rows, count), jnp.int32)
    compiled = jax.jit(steps, donate_argnums=1).lower(params, cache, tokens_BM).compile()
    best = float("inf")
    for _ in range(trials + 1):  # the first run also touches memory for the first time
        began = time.perf_counter()
        cache, tokens_BM = jax.block_until_ready(compiled(params, cache, tokens_BM))
        best = min(best, (time.perf_counter() - began) / num_steps)
    return best


def _verify(model: Model, cache: Any, tokens_BM: Int[Array, "B M"]) -> tuple[Any, Array]:
    """Verify as a step does, at a fixed place; the draws are the next tokens, so that no work can be left out."""
    num_rows, count = tokens_BM.shape
    start_B = jnp.full((num_rows,), count, jnp.int32)
    positions_BM = start_B[:, None] + jnp.arange(count, dtype=jnp.int32)
    placements = cache.place(start_B, causal_ancestors(count)[None])
    hidden_BMD, cache = model.forward(tokens_BM, positions_BM, cache, placements, start_B)
    draws_BM = best_token(model.logits(hidden_BMD), model.decoder.backend)
    # As in a step, the path follows from the draws: else it could be kept before all is read, in a copy of the cache.
    path_BM = jnp.minimum(draws_BM, jnp.arange(count, dtype=jnp.int32))
    return cache.keep(start_B, path_BM, jnp.ones_like(start_B)), draws_BM
