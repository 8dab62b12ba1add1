"""Describes what an engine's programs work on, for the device that runs them and for plans that only compile them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.features import FeatureCache
from jaxinfer.cache.paged import Pool
from jaxinfer.decoding.batch import prompt_bucket
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.state import DecodeState, initial_state
from jaxinfer.decoding.strategy import Prefilled, Strategy
from jaxinfer.engine.programs import NO_CACHE, Pools, Rows
from jaxinfer.models.cache_rows import cache_lanes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.model import Model
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.sampling.arrays import SamplingArrays
from jaxinfer.sampling.params import SamplingParams

# Tables and whole prompts are padded to this many slots, or 4 times as many, or 16 times: few programs, and slots that
# are not there cost little (a step of the default model in 4 bits on a CPU, 1,024 slots instead of 256: 2%).
_LEAST_SLOTS = 1024


@dataclass(frozen=True)
class Entry:
    """A sequence that enters a row: its text, and how its tokens are drawn.

    It ends at ``limit`` tokens; ``adapter`` is its loaded adapter, 0 for none. If it ``draws``, all of its tokens are
    in the cache, else all but the last.
    """

    tokens: Sequence[int]
    prompt_length: int
    context_length: int
    limit: int
    draws: bool
    sampling: SamplingParams
    sample: int
    adapter: int = 0


# Stands for all of them where only shapes are asked for.
ANY_ENTRY = Entry([0], 1, 1, 2, True, SamplingParams(), 0)


def state_of(entry: Entry, arrays: SamplingArrays, num_slots: int, max_depth: int) -> DecodeState:
    """Return a sequence's state of one row without a cache; ``arrays`` say how its tokens are drawn."""
    limit = entry.limit - len(entry.tokens)
    adapters = np.array([entry.adapter], np.int32)
    text = [list(entry.tokens)], [limit]
    return initial_state(*text, num_slots, max_depth, NO_CACHE, arrays, adapters_B=adapters)


def described_pools(
    config: DecoderConfig, backend: Backend, num_pages: int, page_size: int, features: tuple[int, ...] = ()
) -> Pools:
    """Describe pools of so many pages, page 0 included: a pair for each kind of layer, and one of features."""
    lanes = cache_lanes(config, backend)

    def pool(count: int, lanes: int) -> Any:
        return jax.ShapeDtypeStruct((count, num_pages, page_size, lanes), backend.cache_dtype)

    counts = (config.layers.count(kind) for kind in config.kinds)
    of_values = lanes if config.latent is None else 0
    pools = tuple(Pool(pool(count, lanes), pool(count, of_values)) for count in counts)
    if not features:
        return pools
    shape = 1, num_pages, page_size, len(features) * config.model_dim
    return *pools, FeatureCache(jax.ShapeDtypeStruct(shape, jnp.dtype(backend.compute_dtype)), None, features)


def described_rows(
    decoder: Decoder, strategy: Strategy, params: Params, one: DecodeState, batch: int, num_slots: int
) -> Rows:
    """Describe what the device holds of ``batch`` rows, each of which is as ``one`` row."""
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype), one)

    def remembered(params: Params, drafter_params: Any, state: DecodeState) -> Any:
        headroom = step_headroom(strategy, decoder.backend)
        cache = create_cache(decoder.config, batch, num_slots, decoder.backend, headroom, features=strategy.features)
        hidden_BD = jnp.zeros((batch, decoder.config.model_dim), decoder.backend.compute_dtype)
        prefilled = Prefilled(hidden_BD, prompt_bucket(1))
        return strategy.start(Model(decoder, params), drafter_params, state._replace(cache=cache), prefilled)

    hidden_BD = jax.ShapeDtypeStruct((batch, decoder.config.model_dim), decoder.backend.compute_dtype)
    return Rows(state, jax.eval_shape(remembered, params, strategy.parameters, state), hidden_BD)


def described_window(rows: int, columns: int) -> tuple[Any, ...]:
    """Describe what the host gives a window: the rows, their tables, which of them run, and the most steps."""
    return integers(rows), integers(rows, columns), jax.ShapeDtypeStruct((rows,), np.bool_), integers()


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """Describe an array of int32."""
    return jax.ShapeDtypeStruct(shape, np.int32)


def levels_from(count: int, most: int) -> list[int]:
    """Return what so many slots may be padded to: the most there is, and 4^n times `_LEAST_SLOTS` up to its half."""
    level = _LEAST_SLOTS
    while level < count:
        level *= 4
    levels = []
    while 2 * level <= most:
        levels.append(level)
        level *= 4
    return [*levels, most]


def powers_from(count: int, most: int) -> list[int]:
    """Return the powers of two from a count on, up to the most there is."""
    power, powers = 1 << (count - 1).bit_length(), []
    while power < most:
        powers.append(power)
        power *= 2
    return [*powers, most]


def table(pages: Sequence[Sequence[int]], columns: int) -> np.ndarray:
    """Return rows' pages as programs take them, of so many columns; page 0 where a row has none."""
    table_BX = np.zeros((len(pages), columns), np.int32)
    for row, held in enumerate(pages):
        table_BX[row, : len(held)] = held
    return table_BX


def described(tree: Any) -> Any:
    """Describe arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
