"""The kernel of cache_write: read, change and write back the tiles of slots that the new tokens fall into.

HBM is written in whole tiles of slots, so a token's row cannot be copied alone. The grid has a step for each tile that
T tokens may touch; the cache is aliased, and all else in it stays as it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def write_tiles(
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    new_keys_BTF: jax.Array,
    new_values_BTF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array,
    *,
    num_tokens: int,
    slot_tile: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Write token i of row b to slot ``start_B[b] + i`` of ``cache[layer]``; those past the end are dropped.

    New tokens are padded to at least ``slot_tile`` rows, a multiple of 8; the padding is not written.
    """
    _, batch, num_slots, width = keys_LBSF.shape
    rows = new_keys_BTF.shape[1]
    tiles = (num_tokens + slot_tile - 2) // slot_tile + 1
    last_tile = pl.cdiv(num_slots, slot_tile) - 1
    # A tile past the end is the last one again: it gets the same tokens a second time.
    first_B = jnp.clip(start_B, 0, num_slots) // slot_tile
    tile_BX = jnp.minimum(first_B[:, None] + jnp.arange(tiles, dtype=jnp.int32), last_tile)
    scalars = (tile_BX.reshape(-1), start_B, jnp.reshape(layer, (1,)))

    def cache_tile(row: Any, tile: Any, tile_X: Any, _: Any, layer_1: Any) -> tuple[Any, ...]:
        return layer_1[0], row, tile_X[row * tiles + tile], 0

    def body(tile_X: Any, start_B: Any, _: Any, *refs: Any) -> None:
        row = pl.program_id(0)
        ahead = start_B[row] - tile_X[row * tiles + pl.program_id(1)] * slot_tile
        old_and_new = zip(refs[:2], refs[2:4], refs[4:])
        for held_SF, new_TF, written_SF in old_and_new:
            turned_TF = pltpu.roll(new_TF[...].astype(jnp.float32), jnp.where(ahead < 0, ahead + rows, ahead), 0)
            token_SF = jax.lax.broadcasted_iota(jnp.int32, held_SF.shape, 0) - ahead
            is_new_SF = (token_SF >= 0) & (token_SF < num_tokens)
            merged_SF = jnp.where(is_new_SF, turned_TF[:slot_tile], held_SF[...].astype(jnp.float32))
            written_SF[...] = merged_SF.astype(written_SF.dtype)

    cache_spec = pl.BlockSpec((None, None, slot_tile, width), cache_tile)
    new_spec = pl.BlockSpec((None, rows, width), lambda row, *_: (row, 0, 0))
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, tiles),
            in_specs=[cache_spec, cache_spec, new_spec, new_spec],
            out_specs=[cache_spec, cache_spec],
        ),
        out_shape=[jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in (keys_LBSF, values_LBSF)],
        input_output_aliases={len(scalars): 0, len(scalars) + 1: 1},
        interpret=interpret,
        name="cache_write",
    )(*scalars, keys_LBSF, values_LBSF, new_keys_BTF, new_values_BTF)
