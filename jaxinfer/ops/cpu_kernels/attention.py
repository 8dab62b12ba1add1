"""Attention of any number of tokens to a cache on the CPU, the same in every bit in any company.

It uses the functions of `products`. Slots that no token of a row sees are not read.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Bool, Float, Int, Num
from jaxinfer.ops.cpu_kernels.attention_code import CHUNK, attention_module, scratch_numbers
from jaxinfer.ops.cpu_kernels.machine_code import call, host_vectors
from jaxinfer.ops.cpu_kernels.products import multiplies
from jaxinfer.ops.rows_in_bytes import holds_bytes, row_lanes, to_numbers


class Order(NamedTuple):
    """In which order the slots of a row hold its sequence.

    First come slots 0 to ``near_slots - 1``, which are compared with queries of their own, then from ``turn_B`` to
    ``ring_end - 1``, then from ``near_slots`` to ``turn_B - 1``, and last all from ``ring_end`` on.
    """

    near_slots: int
    turn_B: Any
    ring_end: int


def attends(dtype: Any, head_dim: int) -> bool:
    """Whether `attend_to_seen` supports keys and values of a dtype and a head width."""
    # Floats of 8 bits become float16 first.
    needed = {"float32": "float32", "float16": "float16", "int8": "float32", "uint8": "float16"}.get(
        jnp.dtype(dtype).name
    )
    return needed is not None and multiplies(needed, head_dim)


def attend_to_seen(
    query_BCRTH: Float[Array, "B C R T H"],
    keys_LPZF: Num[Array, "L P Z F"],
    values_LPZF: Num[Array, "L P Z F"],
    layer: Int[Array, ""] | int,
    mask_BTE: Bool[Array, "B T E"],
    softcap: float = 0.0,
    near_query_BCRTH: Float[Array, "B C R T H"] | None = None,
    order: Order | None = None,
    table_BX: Int[Array, "B X"] | None = None,
    sink_logits_CR: Float[Array, "C R"] | None = None,
) -> Float[Array, "B C R T H"]:
    """Attend from scaled queries to the first E slots of ``keys[layer]``; return the weighted means, in float32.

    All inputs are float32, keys and values possibly float16 or rows in bytes. A slot has C heads of H numbers, and may
    have more, which rows in bytes do not. Slot s of row b is slot ``s % Z`` of
    page ``table_BX[b, s // Z]``, clipped to the pages there are; without a table, each row has a page of its own. Slots
    that no query of a batch row sees are not read. A query without visible slots gets the mean of all E. A ``softcap``
    c bounds each score x by ``c * tanh(x / c)``; 0 is none. ``order`` is that of the sequence (None: as the slots
    stand); ``near_query_BCRTH`` are the queries of its first slots. ``sink_logits_CR`` is a score of each head that no
    slot has: its weight counts in the sum, and has no value. Check `attends` first.
    """
    batch, _, _, tokens, _ = query_BCRTH.shape
    extent, shape = mask_BTE.shape[2], keys_LPZF.shape
    near_query_BCRTH = query_BCRTH if near_query_BCRTH is None else near_query_BCRTH
    order = order or Order(0, jnp.zeros((batch,), jnp.int32), extent)
    if table_BX is None:
        # One page for each row.
        fits = shape[1] == batch and extent <= shape[2]
        table_BX = jnp.arange(batch)[:, None]
    else:
        fits = table_BX.shape[0] == batch and extent <= table_BX.shape[1] * shape[2]
    in_bytes, heads = holds_bytes(keys_LPZF.dtype), (query_BCRTH.shape[1], query_BCRTH.shape[4])
    fits &= (row_lanes(*heads) if in_bytes else heads[0] * heads[1]) <= shape[3]
    are_alike = values_LPZF.shape == shape and mask_BTE.shape[:2] == (batch, tokens)
    is_known = in_bytes or keys_LPZF.dtype in (jnp.float32, jnp.float16)
    are_alike &= keys_LPZF.dtype == values_LPZF.dtype and is_known
    if sink_logits_CR is None:
        sink_logits_CR = jnp.full(query_BCRTH.shape[1:3], -jnp.inf, jnp.float32)
    are_alike &= sink_logits_CR.shape == query_BCRTH.shape[1:3] and sink_logits_CR.dtype == jnp.float32
    are_alike &= near_query_BCRTH.shape == query_BCRTH.shape and 0 <= order.near_slots <= order.ring_end <= extent
    queries = query_BCRTH, near_query_BCRTH
    # The kernel itself checks nothing.
    if not fits or not are_alike or any(each.dtype != jnp.float32 for each in queries) or 0 in (
        *query_BCRTH.shape, *shape, extent
    ):  # fmt: skip
        given = (*queries, keys_LPZF, values_LPZF, mask_BTE)
        raise ValueError(f"{', '.join(f'{array.dtype}{array.shape}' for array in given)} do not fit")
    turn_B = jnp.clip(jnp.asarray(order.turn_B, jnp.int32), order.near_slots, order.ring_end)
    near_B, end_B = (jnp.full_like(turn_B, each) for each in (order.near_slots, order.ring_end))
    walk_B3 = jnp.stack([near_B, turn_B, end_B], axis=1)
    sees_none_BT = ~jnp.any(mask_BTE, axis=2)
    mask_BTE = mask_BTE | sees_none_BT[..., None]
    # Scores of nothing but zeros have equal weights.
    queries = (jnp.where(sees_none_BT[:, None, None, :, None], 0, each) for each in queries)
    table_BX = jnp.clip(table_BX, 0, shape[1] - 1).astype(jnp.int32)
    held = keys_LPZF, values_LPZF, layer, table_BX
    return _attend(*queries, *held, mask_BTE, sink_logits_CR, walk_B3, softcap)


@jax.custom_jvp
def _attend(
    query_BCRTH: Any,
    near_BCRTH: Any,
    keys: Any,
    values: Any,
    layer: Any,
    table_BX: Any,
    mask_BTE: Any,
    sinks_CR: Any,
    walk: Any,
    cap: Any,
) -> Any:
    batch, heads, group, tokens, numbers = query_BCRTH.shape
    extent = mask_BTE.shape[2]
    vectors = host_vectors()
    assert vectors is not None
    first_BT, after_BT = jnp.argmax(mask_BTE, axis=2), extent - jnp.argmax(mask_BTE[..., ::-1], axis=2)
    ranges_BT2 = jnp.stack([first_BT, after_BT], axis=2).astype(jnp.int32)
    mask_BTP = jnp.pad(mask_BTE, ((0, 0), (0, 0), (0, -extent % CHUNK)))
    items, rows = batch * heads, group * tokens
    query_IXH, near_IXH = (each.reshape(items, rows, numbers) for each in (query_BCRTH, near_BCRTH))
    count = scratch_numbers(items, rows, numbers, mask_BTP.shape[2], vectors)
    results = (
        jax.ShapeDtypeStruct((items, rows, numbers), jnp.float32),
        jax.ShapeDtypeStruct((count,), jnp.float32),
    )
    operands = (
        query_IXH, near_IXH, jnp.asarray(layer, jnp.int32), keys, values, table_BX, mask_BTP.astype(jnp.int8),
        ranges_BT2, walk, jnp.asarray(cap, jnp.float32).reshape(1), sinks_CR.reshape(-1),
    )  # fmt: skip
    dtype = keys.dtype.name
    # Not the name of products of int8, which pairs may have.
    name = "attend" if dtype == "float32" else f"attend_to_{dtype}"
    means_IXH, _ = call(name, partial(attention_module, dtype=dtype), "float32", results, *operands)
    return means_IXH.reshape(query_BCRTH.shape)


@_attend.defjvp
def _attend_jvp(primals: Any, tangents: Any) -> Any:
    *_, walk_B3, cap = primals

    def reference(
        query_BCRTH: Any,
        near_BCRTH: Any,
        keys: Any,
        values: Any,
        layer: Any,
        table_BX: Any,
        mask_BTE: Any,
        sinks_CR: Any,
    ) -> Any:
        batch, heads, *_, numbers = query_BCRTH.shape
        extent = mask_BTE.shape[2]

        def by_head(stack: Any) -> Any:
            found = stack[layer][table_BX].reshape(batch, -1, stack.shape[3])[:, :extent]
            if holds_bytes(stack.dtype):
                found = to_numbers(found, heads, numbers, 1, jnp.float32)
            return found[..., : heads * numbers].reshape(batch, extent, heads, numbers).astype(jnp.float32)

        keys_BSCH, values_BSCH = by_head(keys), by_head(values)
        precision = jax.lax.Precision.HIGHEST
        own, near = (
            jnp.einsum("bcrth,bsch->bcrts", each, keys_BSCH, precision=precision) for each in (query_BCRTH, near_BCRTH)
        )
        is_near_BS = jnp.arange(extent) < walk_B3[:, :1]
        scores = jnp.where(is_near_BS[:, None, None, None], near, own)
        scores = jnp.where(cap == 0, scores, cap * jnp.tanh(scores / jnp.where(cap == 0, 1, cap)))
        scores = jnp.where(mask_BTE[:, None, None], scores, jnp.finfo(jnp.float32).min)
        sinks = jnp.broadcast_to(sinks_CR[..., None, None], (*scores.shape[:4], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1))[..., :-1]
        return jnp.einsum("bcrts,bsch->bcrth", weights, values_BSCH, precision=precision)

    return jax.jvp(reference, primals[:8], tangents[:8])
