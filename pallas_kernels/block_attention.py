"""Attention to one block of slots, with a running softmax; kernels over caches share it.

The numbers of a row (the largest score so far, the sum of weights) are spread over a lane tile, so that no step has to
move them between lanes. The largest score is the same in all 128 lanes. The sum is split over the lanes and added up at
the end. Scores are in base 2, the base of the hardware's exponential (FlashAttention, 2205.14135).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import ArrayLike

from pallas_kernels.head_groups import LANES

# Finite, so that a row does not become NaN if it attends to nothing in a block.
LOWEST = -1e30
# A sink has the weight 1 beside itself: the total's part in each lane.
SINK_TOTAL = 1 / LANES
# The blocks of rows whose code is written out one after the other.
_TOGETHER = 2


@dataclass(frozen=True)
class ScoreRule:
    """How a product of query and key becomes a score: ``scale``, then ``c * tanh(x / c)`` with a soft-cap c."""

    scale: float
    softcap: float | None = None

    def in_base_2(self, products: jax.Array) -> jax.Array:
        """Return scores whose power of 2 is the exponential of the scaled, capped product."""
        if self.softcap is None:
            return products * (self.scale * math.log2(math.e))
        return jnp.tanh(products * (self.scale / self.softcap)) * (self.softcap * math.log2(math.e))


@dataclass(frozen=True)
class Running:
    """The running results of a row of queries between blocks: ``largest`` and ``total`` ``[C, R, 128]``, ``mixed``."""

    largest_CRL: Any
    total_CRL: Any
    mixed_CRI: Any

    def start(self, sinks_CRL: Any = None) -> None:
        """Reset the results for a new row; its first scores are those of `spread_sinks`, if there are any."""
        if sinks_CRL is None:
            self.largest_CRL[...] = jnp.full_like(self.largest_CRL, LOWEST)
            self.total_CRL[...] = jnp.zeros_like(self.total_CRL)
        else:
            self.largest_CRL[...] = sinks_CRL[...]
            self.total_CRL[...] = jnp.full_like(self.total_CRL, SINK_TOTAL)
        self.mixed_CRI[...] = jnp.zeros_like(self.mixed_CRI)

    def finish(self, output_CRI: Any) -> None:
        """Write the weighted mean of all values."""
        total_CR1 = jnp.sum(self.total_CRL[...], axis=-1, keepdims=True)
        output_CRI[...] = (self.mixed_CRI[...] / total_CR1).astype(output_CRI.dtype)


def running_scratch(groups: int, rows: int, lanes: int) -> list[Any]:
    """Return the scratch shapes of a `Running`, in the order of its fields."""
    spread = pltpu.VMEM((groups, rows, LANES), jnp.float32)
    return [spread, spread, pltpu.VMEM((groups, rows, lanes), jnp.float32)]


def sinks_in_base_2(sink_logits_N: ArrayLike) -> jax.Array:
    """Return the heads' scores that have no slot, in the base of the others."""
    return jnp.asarray(sink_logits_N, jnp.float32) * math.log2(math.e)


def spread_sinks(sink_logits_N: ArrayLike | None, groups: int, tokens: int, rows: int) -> jax.Array | None:
    """Return for each row of `spread_queries` its head's score that has no slot, in base 2: ``[C, R, 128]``."""
    if sink_logits_N is None:
        return None
    sinks_CR = jnp.repeat(sinks_in_base_2(sink_logits_N).reshape(groups, -1), tokens, axis=1)
    sinks_CR = jnp.pad(sinks_CR, ((0, 0), (0, rows - sinks_CR.shape[1])))
    return jnp.broadcast_to(sinks_CR[..., None], (*sinks_CR.shape, LANES))


def check_sinks(kernel: str, sink_logits_N: ArrayLike | None, num_heads: int) -> None:
    """Raise ValueError unless there is one for each head, or none."""
    if sink_logits_N is not None and jnp.shape(sink_logits_N) != (num_heads,):
        raise ValueError(f"{kernel}: sink logits {jnp.shape(sink_logits_N)} are not one for each of {num_heads} heads")


def attend_block(
    products: Callable[[int, Any], jax.Array],
    values: Callable[[int], jax.Array],
    visible: Callable[[Any], jax.Array] | None,
    running: Running,
    rule: ScoreRule,
    block_rows: int,
    weights: Callable[[int, Any, jax.Array], jax.Array] | None = None,
) -> None:
    """Attend to a block of slots.

    ``products(group, rows)`` multiplies a group's rows by the block's keys, ``[rows, S]`` in float32. ``values``
    returns the group's values ``[S, I]``, ``visible(rows)`` the mask of those rows (None: everything is visible).
    ``weights(group, rows, weights)`` may change the weights before the product with the group's values. S is a multiple
    of 128.
    """
    groups, num_rows, _ = running.mixed_CRI.shape

    def attend_tile(group: int, rows: Any, products_RS: jax.Array, seen_RS: jax.Array | None) -> None:
        scores_RS = rule.in_base_2(products_RS)
        if seen_RS is not None:
            scores_RS = jnp.where(seen_RS, scores_RS, LOWEST)
        before_RL = running.largest_CRL[group, rows]
        largest_RL = jnp.maximum(before_RL, jnp.max(scores_RS, axis=1, keepdims=True))
        tiles = scores_RS.shape[1] // LANES
        weights_RS = jnp.exp2(scores_RS - jnp.concatenate([largest_RL] * tiles, axis=1))
        kept_RL = jnp.exp2(before_RL - largest_RL)
        total_RL = kept_RL * running.total_CRL[group, rows]
        for tile in range(tiles):
            total_RL += weights_RS[:, tile * LANES : (tile + 1) * LANES]
        running.largest_CRL[group, rows] = largest_RL
        running.total_CRL[group, rows] = total_RL
        if weights is not None:
            weights_RS = weights(group, rows, weights_RS)
        block_SI = values(group)
        added_RI = _dot(weights_RS.astype(block_SI.dtype), block_SI, 0)
        mixed_RI = running.mixed_CRI[group, rows]
        running.mixed_CRI[group, rows] = mixed_RI * _over_lanes(kept_RL, mixed_RI.shape[1]) + added_RI

    def attend_rows(blocks: list[Any]) -> None:
        seen = [None if visible is None else visible(rows) for rows in blocks]
        tiles = [(group, index) for index in range(len(blocks)) for group in range(groups)]
        upcoming_RS = products(0, blocks[0])
        for number, (group, index) in enumerate(tiles):
            products_RS = upcoming_RS
            # The next tile's products keep the matrix unit busy during this tile's softmax.
            if number + 1 < len(tiles):
                following, at = tiles[number + 1]
                upcoming_RS = products(following, blocks[at])
            attend_tile(group, blocks[index], products_RS, seen[index])

    # Of several blocks of rows as many are written out as leave the matrix unit no pause between them.
    together = next(count for count in (_TOGETHER, 1) if num_rows % (count * block_rows) == 0 or count == 1)
    if num_rows <= block_rows:
        attend_rows([pl.ds(0, num_rows)])
    elif num_rows == together * block_rows:
        attend_rows([pl.ds(index * block_rows, block_rows) for index in range(together)])
    else:

        @pl.loop(0, num_rows // (together * block_rows))
        def _(index: jax.Array) -> None:
            first = index * (together * block_rows)
            attend_rows(
                [pl.ds(pl.multiple_of(first + at * block_rows, block_rows), block_rows) for at in range(together)]
            )


def multiply_by_keys(query_RI: jax.Array, keys_SI: jax.Array) -> jax.Array:
    """Return the products ``[R, S]`` of queries and keys in float32."""
    return _dot(query_RI, keys_SI, 1)


def _dot(left: jax.Array, right: jax.Array, contracted: int) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (contracted,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _over_lanes(spread_RL: jax.Array, lanes: int) -> jax.Array:
    """Repeat a value that is the same in all lanes over another number of lanes."""
    tiles = -(-lanes // LANES)
    repeated = jnp.concatenate([spread_RL] * tiles, axis=1) if tiles > 1 else spread_RL
    return repeated[:, :lanes]
