"""Attention to one block of slots, with a running softmax; kernels over caches share it.

The numbers of a row (the largest score so far, the sum of weights) are spread over a lane tile, so that no step has to
move them between lanes. The largest score is the same in all 128 lanes. The sum is split over the lanes and added up at
the end. Scores are in base 2, the base of the hardware's exponential (FlashAttention, 2205.14135).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    is_started: bool = True
    sinks_CRL: Any = None

    def at_start(self, sinks_CRL: Any = None) -> "Running":
        """Return the results of a new row without those of the row before, which need not be reset."""
        return replace(self, is_started=False, sinks_CRL=sinks_CRL)

    def largest(self, group: int, rows: Any) -> jax.Array:
        """Return the largest scores so far, ``[rows, 128]``."""
        if self.is_started:
            return self.largest_CRL[group, rows]
        if self.sinks_CRL is not None:
            return self.sinks_CRL[group, rows]
        return jnp.full((rows.size, LANES), LOWEST, jnp.float32)

    def update(
        self, group: int, rows: Any, largest_RL: Any, kept_RL: Any, total_RL: Any, mixed_RI: Any
    ) -> Callable[[], jax.Array]:
        """Add a block's weights and values; ``kept_RL`` is what is left of each weight before it.

        Return the weighted mean of the values so far, for who needs it.
        """
        if self.is_started:
            total_RL += kept_RL * self.total_CRL[group, rows]
            mixed_RI += _over_lanes(kept_RL, mixed_RI.shape[1]) * self.mixed_CRI[group, rows]
        elif self.sinks_CRL is not None:
            total_RL += kept_RL * SINK_TOTAL
        self.largest_CRL[group, rows] = largest_RL
        self.total_CRL[group, rows] = total_RL
        self.mixed_CRI[group, rows] = mixed_RI
        return lambda: mixed_RI / jnp.sum(total_RL, axis=-1, keepdims=True)

    def start(self, sinks_CRL: Any = None) -> None:
        """Reset the results for a new row; its first scores are those of `spread_sinks`, if there are any."""
        if sinks_CRL is None:
            self.largest_CRL[...] = jnp.full_like(self.largest_CRL, LOWEST)
            self.total_CRL[...] = jnp.zeros_like(self.total_CRL)
        else:
            self.largest_CRL[...] = sinks_CRL[...]
            self.total_CRL[...] = jnp.full_like(self.total_CRL, SINK_TOTAL)
        self.mixed_CRI[...] = jnp.zeros_like(self.mixed_CRI)

    def mean(self, group: int, rows: Any) -> jax.Array:
        """Return the weighted mean of the values so far of some rows of a group."""
        total_R1 = jnp.sum(self.total_CRL[group, rows], axis=-1, keepdims=True)
        return self.mixed_CRI[group, rows] / total_R1

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


def spread_sinks(
    sink_logits_N: ArrayLike | None, groups: int, tokens: int, rows: int, beside: int = 1
) -> jax.Array | None:
    """Return for each row of `spread_queries` its head's score that has no slot, in base 2: ``[C, R, 128]``.

    ``beside`` heads of a token are rows that follow one another.
    """
    if sink_logits_N is None:
        return None
    sinks_CWB = sinks_in_base_2(sink_logits_N).reshape(groups, -1, beside)
    sinks_CR = jnp.tile(sinks_CWB, (1, 1, tokens)).reshape(groups, -1)
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
    begin: Callable[[int], None] | None = None,
    end: Callable[[int, Any, jax.Array], None] | None = None,
) -> None:
    """Attend to a block of slots.

    ``products(group, rows)`` multiplies a group's rows by the block's keys, ``[rows, S]`` in float32. ``values``
    returns the group's values ``[S, I]``, ``visible(rows)`` the mask of those rows (None: everything is visible).
    ``weights(group, rows, weights)`` may change the weights before the product with the group's values. S is a multiple
    of 128. ``begin(group)`` is called before a group's first product, and ``end(group, rows, mean)`` with the weighted
    mean of the values so far: what they load and store is hidden behind products.
    """
    groups, num_rows, _ = running.mixed_CRI.shape

    def attend_tile(group: int, rows: Any, products_RS: jax.Array, seen_RS: jax.Array | None) -> None:
        scores_RS = rule.in_base_2(products_RS)
        if seen_RS is not None:
            scores_RS = jnp.where(seen_RS, scores_RS, LOWEST)
        before_RL = running.largest(group, rows)
        largest_RL = jnp.maximum(before_RL, jnp.max(scores_RS, axis=1, keepdims=True))
        tiles = scores_RS.shape[1] // LANES
        weights_RS = jnp.exp2(scores_RS - jnp.concatenate([largest_RL] * tiles, axis=1))
        kept_RL = jnp.exp2(before_RL - largest_RL)
        total_RL = weights_RS[:, :LANES]
        for tile in range(1, tiles):
            total_RL += weights_RS[:, tile * LANES : (tile + 1) * LANES]
        if weights is not None:
            weights_RS = weights(group, rows, weights_RS)
        block_SI = values(group)
        added_RI = _dot(weights_RS.astype(block_SI.dtype), block_SI, 0)
        mean = running.update(group, rows, largest_RL, kept_RL, total_RL, added_RI)
        if end is not None and is_written_out:
            end(group, rows, mean())

    def begin_group(group: int) -> None:
        if begin is not None:
            begin(group)

    def attend_rows(blocks: list[Any]) -> None:
        seen = [None if visible is None else visible(rows) for rows in blocks]
        tiles = [(group, index) for index in range(len(blocks)) for group in range(groups)]
        if is_written_out:
            begin_group(0)
        upcoming_RS = products(0, blocks[0])
        for number, (group, index) in enumerate(tiles):
            products_RS = upcoming_RS
            # The next tile's products keep the matrix unit busy during this tile's softmax.
            if number + 1 < len(tiles):
                following, at = tiles[number + 1]
                if is_written_out and at == 0:
                    begin_group(following)
                upcoming_RS = products(following, blocks[at])
            attend_tile(group, blocks[index], products_RS, seen[index])

    # Of several blocks of rows as many are written out as leave the matrix unit no pause between them.
    together = next(count for count in (_TOGETHER, 1) if num_rows % (count * block_rows) == 0 or count == 1)
    is_written_out = num_rows <= together * block_rows
    size = min(num_rows, block_rows)
    all_blocks = [pl.ds(first, size) for first in range(0, num_rows, size)]
    if is_written_out:
        attend_rows(all_blocks)
    else:
        for group in range(groups):
            begin_group(group)

        @pl.loop(0, num_rows // (together * block_rows))
        def _(index: jax.Array) -> None:
            first = index * (together * block_rows)
            attend_rows(
                [pl.ds(pl.multiple_of(first + at * block_rows, block_rows), block_rows) for at in range(together)]
            )

        if end is not None:
            for group in range(groups):
                for rows in all_blocks:
                    end(group, rows, running.mean(group, rows))


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
