"""The kernel of cache_write: it reads, changes and writes back the blocks of slots that the new tokens fall into.

HBM is written in whole tiles of slots, so one token's row cannot be copied alone. The grid has a step for each block
that a row's tokens may touch. The cache is aliased; its other blocks do not change. Blocks of new tokens and blocks of
slots begin at different places, so a step reads two blocks of tokens and rolls their rows into place.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_VMEM_LIMIT_BYTES = 48 << 20


class Steps(NamedTuple):
    """What each step of each row writes, int32 ``[B, X]``: the block of slots, and where the tokens begin in it.

    ``ahead_BX`` counts slots from the block's first slot to that of the row's first token; it is negative after the
    first block. Slots before ``lowest_BX``, counted from the block's first, are not written, nor are tokens from
    ``count_B`` on. A block may repeat only in the very next step.
    """

    block_BX: jax.Array
    ahead_BX: jax.Array
    lowest_BX: jax.Array
    count_B: jax.Array


def write_blocks(
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    new_keys_BTF: jax.Array,
    new_values_BTF: jax.Array,
    layer: jax.Array,
    steps: Steps,
    *,
    block_slots: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write new tokens, padded to whole blocks of ``block_slots``, to ``cache[layer]``."""
    batch, width = keys_LBSF.shape[1], keys_LBSF.shape[3]
    num_steps = steps.block_BX.shape[1]
    num_new = new_keys_BTF.shape[1] // block_slots
    # A single block of tokens rolls within itself.
    parts = 1 if num_new == 1 else 2
    scalars = (*(each.reshape(-1) for each in steps), jnp.reshape(layer, (1,)))

    def first_new(ahead: Any) -> Any:
        """Return the first of the two blocks of tokens; the other one follows it."""
        # Floor division, by a division of non-negative numbers.
        return jax.lax.div(block_slots - ahead, block_slots) - 1

    def cache_block(row: Any, step: Any, block_X: Any, ahead_X: Any, lowest_X: Any, count_B: Any, layer_1: Any) -> Any:
        return layer_1[0], row, block_X[row * num_steps + step], 0

    def new_block(part: int, row: Any, step: Any, block_X: Any, ahead_X: Any, *_: Any) -> Any:
        return row, jnp.clip(first_new(ahead_X[row * num_steps + step]) + part, 0, num_new - 1), 0

    def body(block_X: Any, ahead_X: Any, lowest_X: Any, count_B: Any, _: Any, *refs: Any) -> None:
        row = pl.program_id(0)
        at = row * num_steps + pl.program_id(1)
        ahead, rows = ahead_X[at], parts * block_slots
        # The roll that moves the token of the first slot to the front.
        turn = ahead if parts == 1 else ahead + first_new(ahead) * block_slots
        slot_SF = jax.lax.broadcasted_iota(jnp.int32, (block_slots, width), 0)
        token_SF = slot_SF - ahead
        is_new_SF = (token_SF >= 0) & (token_SF < count_B[row]) & (slot_SF >= lowest_X[at])
        # What the unit that rolls takes, and what numbers of the cache become without loss.
        wide = jnp.int32 if jnp.issubdtype(keys_LBSF.dtype, jnp.integer) else jnp.float32
        for which in range(2):
            held_SF, written_SF = refs[which], refs[2 + 2 * parts + which]
            new = [refs[2 + which * parts + part][...] for part in range(parts)]
            new_RF = (jnp.concatenate(new) if parts > 1 else new[0]).astype(wide)
            turned_RF = pltpu.roll(new_RF, jnp.mod(turn, rows), 0)
            merged_SF = jnp.where(is_new_SF, turned_RF[:block_slots], held_SF[...].astype(wide))
            written_SF[...] = merged_SF.astype(written_SF.dtype)

    cache_spec = pl.BlockSpec((None, None, block_slots, width), cache_block)
    new_specs = [
        pl.BlockSpec((None, block_slots, width), lambda *index, part=part: new_block(part, *index))
        for part in range(parts)
    ]
    moved = 4 * batch * num_steps * block_slots * width + new_keys_BTF.size + new_values_BTF.size
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, num_steps),
            in_specs=[cache_spec, cache_spec, *new_specs, *new_specs],
            out_specs=[cache_spec, cache_spec],
        ),
        out_shape=[jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in (keys_LBSF, values_LBSF)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VMEM_LIMIT_BYTES),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved * keys_LBSF.dtype.itemsize),
        input_output_aliases={len(scalars): 0, len(scalars) + 1: 1},
        interpret=interpret,
        name="cache_write",
    )(*scalars, keys_LBSF, values_LBSF, *[new_keys_BTF] * parts, *[new_values_BTF] * parts)
