"""Attention to a cache whose slots are split over the mesh's axis ``sequence``.

Each device holds a block of consecutive slots. It writes the new tokens that fall into it and attends to its own slots.
Then the devices join their results by the log-sum-exp, as flash-decoding does on one device. The bits of the joined
results depend on the number of slots per device.

Where the CPU kernels keep bits, they attend to all slots in their order instead, whatever the size of the cache. The
devices gather the slots for that, and share one memory.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import SEQUENCE, TENSOR, Array, Float, Int, Num
from jaxinfer.ops.attention import Partial, attend, attend_partially
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cache_attention import Seen
from jaxinfer.ops.cache_write import as_rows
from jaxinfer.ops.each_device import rows_axis, tokens_axis
from jaxinfer.ops.masks import visible_slots
from jaxinfer.ops.rows import write_in_rows
from pallas_kernels.window import Window


def has_split_slots(keys_LBSF: Num[Array, "L B S F"], backend: Backend) -> bool:
    """Tell whether a dense cache's slots are split: there are several devices for them, and they split evenly."""
    return backend.slot_shards > 1 and keys_LBSF.shape[2] % backend.slot_shards == 0


def attend_to_split_slots(
    query_BTNH: Float[Array, "B T N H"],
    keys_LBSF: Num[Array, "L B S F"],
    values_LBSF: Num[Array, "L B S _"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    layer: Int[Array, ""] | int,
    slots_BT: Int[Array, "B T"],
    seen: Seen,
    scale: float,
    backend: Backend,
    *,
    softcap: float | None = None,
    window: Window | None = None,
    sink_logits_N: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "B T N H"], Num[Array, "L B S F"], Num[Array, "L B S _"]]:
    """Write one layer's new tokens and attend from them to all slots.

    Slots past the end are dropped. XLA joins what the devices find; they send as much data as the queries have. If the
    backend keeps bits, the devices gather the layer's slots, and the CPU kernels attend to them in their order.
    """
    own, in_order = on_one_device(backend), backend.keeps_bits
    rule: dict[str, Any] = {"softcap": softcap, "num_kv_heads": keys_BTKH.shape[2] // backend.kv_shards}
    extent = seen.mask_BTS.shape[-1]

    def run(query: Any, *arguments: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys, values, new_keys_BTF, new_values_BTF, layer, slots_BT, logits_N, *masks = arguments
        num_slots = keys.shape[2]
        first = lax.axis_index(SEQUENCE).astype(slots_BT.dtype) * num_slots
        here_BT = slots_BT - first
        here_BT = jnp.where(here_BT < 0, num_slots, here_BT)
        keys = write_in_rows(keys, layer, here_BT, new_keys_BTF)
        values = write_in_rows(values, layer, here_BT, new_values_BTF)
        used = min(num_slots, extent)
        held = keys[layer, :, :used], values[layer, :, :used]
        if in_order:
            (mask_BTS,) = masks
            all_keys, all_values = (lax.all_gather(part, SEQUENCE, axis=1, tiled=True)[:, :extent] for part in held)
            mixed = attend(query, all_keys, all_values, mask_BTS, scale, own, sink_logits_N=logits_N, **rule)
            return mixed, keys, values
        start_B, ancestors_BTT = masks
        mask_BTS = visible_slots(start_B, ancestors_BTT, used, window, first)
        partial = attend_partially(query, *held, mask_BTS, scale, own, **rule)
        return join_over(SEQUENCE, partial, logits_N).astype(backend.compute_dtype), keys, values

    batch, num_tokens, *_ = query_BTNH.shape
    rows = rows_axis(batch, backend)
    # Devices that have all slots attend from some of a prompt's tokens each.
    tokens = tokens_axis(num_tokens, backend) if in_order else None
    heads, lanes = PartitionSpec(rows, tokens, TENSOR, None), PartitionSpec(rows, None, TENSOR)
    cache, of_rows = PartitionSpec(None, rows, SEQUENCE, TENSOR), PartitionSpec(rows)
    if in_order:
        masks, of_masks = (seen.mask_BTS,), (PartitionSpec(rows, tokens),)
    else:
        ancestors = of_rows if seen.ancestors_BTT.shape[0] == batch > 1 else PartitionSpec()
        masks, of_masks = (seen.start_B, seen.ancestors_BTT), (of_rows, ancestors)
    specs = (heads, cache, cache, lanes, lanes, PartitionSpec(), of_rows, PartitionSpec(TENSOR), *of_masks)
    new = as_rows(keys_BTKH, keys_LBSF, backend), as_rows(values_BTKH, values_LBSF, backend)
    layer = jnp.asarray(layer, slots_BT.dtype)
    return backend.on_devices(run, specs, (heads, cache, cache))(
        query_BTNH, keys_LBSF, values_LBSF, *new, layer, slots_BT, sink_logits_N, *masks
    )


def join_over(axis: str, partial: Partial, sink_logits_N: jax.Array | None = None) -> jax.Array:
    """Return the means over the slots of all devices of an axis, beside sinks (`jaxinfer.ops.attention.attend`)."""
    largest_BTN = lax.pmax(partial.largest_BTN, axis)
    joined = partial.scaled_to(largest_BTN)
    sums = lax.psum((joined.weighted_BTNH, joined.totals_BTN), axis)
    return Partial(sums[0], largest_BTN, sums[1]).with_sinks(sink_logits_N).mean_BTNH()


def on_one_device(backend: Backend) -> Backend:
    """Return the backend of each device of a mesh, for its parts of the arguments."""
    return replace(backend, kv_shards=1, mesh=None)
