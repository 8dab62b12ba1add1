"""Writes new tokens to a layer of a stacked cache, in place, by a Pallas kernel or by XLA."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int, Num
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.each_device import on_each_device
from jaxinfer.ops.kernel_choice import choose_means
from jaxinfer.ops.rows import write_in_rows
from jaxinfer.ops.rows_in_bytes import holds_bytes, to_bytes


class Around(NamedTuple):
    """The order of a ring: tokens from position ``start_B`` on, of which ``counts_B`` are written (None: all).

    Positions before ``num_sinks`` have their own slots; later ones go around all other slots.
    """

    start_B: Any
    counts_B: Any
    num_sinks: int


def write_to_layer(
    keys_LBSF: Num[Array, "L B S F"],
    values_LBSF: Num[Array, "L B S _"],
    keys_BTKH: Float[Array, "B T K H"],
    values_BTKH: Float[Array, "B T K H"],
    layer: Int[Array, ""] | int,
    slots_BT: Int[Array, "B T"],
    backend: Backend,
    around: Around | None = None,
) -> tuple[Num[Array, "L B S F"], Num[Array, "L B S _"]]:
    """Write one layer's new rows in place; slots past the end are dropped, the others must differ within a row.

    A row's slots are consecutive, or go ``around`` a ring. XLA writes single tokens: for one token its scatter is as
    fast as the kernel; for more it takes six to twelve times as long.
    """
    num_tokens = slots_BT.shape[1]
    new = as_rows(keys_BTKH, keys_LBSF, backend), as_rows(values_BTKH, values_LBSF, backend)

    has_values = bool(values_LBSF.shape[3])

    def by_xla() -> tuple[Any, Any]:
        keys_BTF, values_BTF = new
        if not has_values:
            return write_in_rows(keys_LBSF, layer, slots_BT, keys_BTF), values_LBSF
        return write_in_rows(keys_LBSF, layer, slots_BT, keys_BTF), write_in_rows(
            values_LBSF, layer, slots_BT, values_BTF
        )

    if num_tokens == 1 or not has_values or choose_means(backend, keys_LBSF) != "kernel":
        return by_xla()
    # Imported here: a CPU need not wait for Pallas.
    from pallas_kernels.cache_write.op import cache_write, fits_ring

    if around is not None and not fits_ring(keys_LBSF.shape[2], around.num_sinks, num_tokens):
        return by_xla()
    num_sinks = None if around is None else around.num_sinks
    start_B, counts_B = (slots_BT[:, 0], None) if around is None else (around.start_B, around.counts_B)

    def write(*arguments: Any) -> Any:
        return cache_write(*arguments, num_sinks=num_sinks, interpret=backend.kernels == "interpret")

    run = on_each_device(write, backend, "ccffarr", "cc")
    return run(keys_LBSF, values_LBSF, *new, jnp.asarray(layer, jnp.int32), start_B, counts_B)


def as_rows(rows_BTKH: Float[Array, "B T K H"], buffer: Num[Array, "*lead F"], backend: Backend) -> Num[Array, "B T F"]:
    """Arrange new keys or values as in a cache: heads side by side, and zeros in the lanes after them, or in bytes.

    Where keys are values too, a buffer of values has no lanes.
    """
    if not buffer.shape[-1]:
        return jnp.zeros((*rows_BTKH.shape[:2], 0), buffer.dtype)
    if holds_bytes(buffer.dtype):
        return to_bytes(rows_BTKH, buffer.dtype, buffer.shape[-1], backend.kv_shards)
    rows_BTI = rows_BTKH.reshape(*rows_BTKH.shape[:2], -1)
    if buffer.dtype == jnp.float16 and rows_BTI.dtype != jnp.float16:
        # The largest numbers that float16 has: infinite ones would make a text nothing but NaN.
        most = float(jnp.finfo(jnp.float16).max)
        rows_BTI = jnp.clip(rows_BTI, -most, most)
    rows_BTI = rows_BTI.astype(buffer.dtype)
    return jnp.pad(rows_BTI, ((0, 0), (0, 0), (0, buffer.shape[-1] - rows_BTI.shape[-1])))
