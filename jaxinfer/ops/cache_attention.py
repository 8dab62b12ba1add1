"""Attention of new tokens to a layer of a stacked cache in which they stand already, by Pallas kernels or by XLA.

Pallas is imported where a kernel is used: it takes a CPU, which uses none, as long as everything else here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int, Num
from jaxinfer.ops.attention import Layer, Sinks, attend, values_of
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.attention import Order
from jaxinfer.ops.each_device import on_each_device
from jaxinfer.ops.kernel_choice import choose_means
from jaxinfer.ops.rows_in_bytes import holds_bytes, to_numbers
from pallas_kernels.window import Window

# The slots, and the tokens of a prompt, that kernels take at a time where rows are fixed: sums then have the same order
# in caches of all lengths. Tuning, which looks at the length, chooses the same for most steps of 16 nodes.
_FIXED_BLOCK = 256


class Seen(NamedTuple):
    """What each new token attends to: all slots before ``start_B``, and its ancestors among the T new tokens.

    Where these are the last of more tokens from ``start_B`` on, the others are columns too, and XLA attends.

    ``ancestors_BTT`` bool has one row for all or one per row. ``counts_B`` int32 is the number of real tokens of a
    prompt, which is a chain (None: a draft tree, all real). ``mask_BTS`` bool is the same as a mask over slots.
    ``order_T`` int32 gives the order of a whole prompt's tokens on a ring of devices, if they are in that order.
    """

    start_B: Any
    ancestors_BTT: Any
    counts_B: Any
    mask_BTS: Any
    order_T: Any = None


def attend_to_layer(
    query_BTNH: Float[Array, "B T N H"],
    keys_LBSF: Num[Array, "L B S F"],
    values_LBSF: Num[Array, "L B S _"],
    layer: Int[Array, ""] | int,
    seen: Seen,
    scale: float,
    backend: Backend,
    *,
    softcap: float | None = None,
    window: Window | None = None,
    num_kv_heads: int | None = None,
    sink_logits_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to ``cache[layer]``, ``[B, S, K*H]``, by the backend's means; the mask already includes the window.

    ``sink_logits_N`` are those of `attend`. A cache may have lanes past those of ``num_kv_heads`` heads. Kernels read
    the layer where it lies, and no slots that are not seen. Larger trees than the kernel's are left to XLA, which
    prompts are not.
    """
    num_tokens, has_values = query_BTNH.shape[1], bool(values_LBSF.shape[3])
    means, values_LBSF = choose_means(backend, keys_LBSF), values_of(keys_LBSF, values_LBSF)

    def by_xla() -> Any:
        extent = seen.mask_BTS.shape[-1]
        held = Layer(keys_LBSF, layer, extent), Layer(values_LBSF, layer, extent)
        rule: Any = {"softcap": softcap, "num_kv_heads": num_kv_heads, "sink_logits_N": sink_logits_N}
        return attend(query_BTNH, *held, seen.mask_BTS, scale, backend, **rule)

    if means == "xla" or seen.ancestors_BTT.shape[-1] > num_tokens:
        return by_xla()
    from pallas_kernels.flash_decode.op import flash_decode
    from pallas_kernels.flash_decode.reference import reference_attention
    from pallas_kernels.flash_prefill.op import flash_prefill
    from pallas_kernels.tree_verify.op import MAX_NODES, tree_verify

    is_prompt = seen.counts_B is not None and num_tokens > MAX_NODES
    if means == "kernel" and num_tokens > MAX_NODES and not is_prompt:
        return by_xla()
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": window}
    options["num_kv_heads"] = num_kv_heads and num_kv_heads // backend.kv_shards

    def run(
        query: Any, keys: Any, values: Any, layer: Any, start_B: Any, ancestors_BTT: Any, counts_B: Any, logits_N: Any
    ) -> Any:
        if is_prompt and holds_bytes(keys.dtype):
            # A prompt takes so long to multiply that its layer may be widened first.
            heads = options["num_kv_heads"], query.shape[3]
            keys, values = (to_numbers(each[layer], *heads, 1, query.dtype)[None] for each in (keys, values))
            layer = jnp.int32(0)
        # Kernels read once what is given as both.
        cache = keys, values if has_values else keys, layer, start_B
        rule = {**options, "sink_logits_N": logits_N}
        if means == "reference":
            return reference_attention(query, *cache, ancestors_BTT, **rule)
        how = {**rule, "interpret": backend.kernels == "interpret"}
        if is_prompt:
            return flash_prefill(query, *cache, counts_B, **how, **_fixed(backend, "block_q", "block_k", "block_s"))
        how |= _fixed(backend, "block_slots")
        if num_tokens == 1:
            return flash_decode(query, *cache, **how)
        return tree_verify(query, *cache, ancestors_BTT, **how)

    return _run(run, query_BTNH, keys_LBSF, values_LBSF, layer, seen, backend, sink_logits_N)


def attend_to_pages(
    query_BTNH: Float[Array, "B T N H"],
    keys_LPZF: Num[Array, "L P Z F"],
    values_LPZF: Num[Array, "L P Z _"],
    layer: Int[Array, ""] | int,
    table_BX: Int[Array, "B X"],
    seen: Seen,
    scale: float,
    backend: Backend,
    *,
    softcap: float | None = None,
    window: Window | None = None,
    num_kv_heads: int | None = None,
    sink_logits_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend as `attend_to_layer` does, to slots in the pages of ``cache[layer]`` that the rows' tables name.

    The CPU kernels and Pallas kernels read pages where they lie; XLA, to which larger trees than a kernel's are left,
    gathers them first.
    """
    num_tokens, means = query_BTNH.shape[1], choose_means(backend, keys_LPZF)
    values_LPZF = values_of(keys_LPZF, values_LPZF)

    def by_xla() -> Any:
        extent = seen.mask_BTS.shape[-1]
        held = Layer(keys_LPZF, layer, extent, table_BX), Layer(values_LPZF, layer, extent, table_BX)
        rule: Any = {"softcap": softcap, "num_kv_heads": num_kv_heads, "sink_logits_N": sink_logits_N}
        return attend(query_BTNH, *held, seen.mask_BTS, scale, backend, **rule)

    if means == "xla" or seen.ancestors_BTT.shape[-1] > num_tokens:
        return by_xla()
    from pallas_kernels.paged_decode.op import MAX_TOKENS, PAGE_SIZES, paged_decode
    from pallas_kernels.paged_decode.reference import reference_paged
    from pallas_kernels.paged_prefill.op import paged_prefill

    is_prompt = seen.counts_B is not None
    is_served = keys_LPZF.shape[2] in PAGE_SIZES and (num_tokens <= MAX_TOKENS or is_prompt)
    if means == "kernel" and not is_served:
        return by_xla()
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": window}
    options["num_kv_heads"] = num_kv_heads and num_kv_heads // backend.kv_shards

    def run(
        query: Any,
        keys: Any,
        values: Any,
        layer: Any,
        table_BX: Any,
        start_B: Any,
        ancestors_BTT: Any,
        counts_B: Any,
        logits_N: Any,
    ) -> Any:
        pages, rule = (keys, values, layer, table_BX, start_B), {**options, "sink_logits_N": logits_N}
        if means == "reference":
            return reference_paged(query, *pages, ancestors_BTT=ancestors_BTT, **rule)
        how = {**rule, "interpret": backend.kernels == "interpret", **_fixed(backend, "block_slots")}
        if is_prompt:
            return paged_prefill(query, *pages, counts_B, **how, **_fixed(backend, "block_q"))
        return paged_decode(query, *pages, ancestors_BTT=None if num_tokens == 1 else ancestors_BTT, **how)

    ancestors = "a" if seen.ancestors_BTT.shape[0] == 1 else "r"
    run_each = on_each_device(run, backend, f"hpparr{ancestors}rn", "h")
    pages = keys_LPZF, values_LPZF, jnp.asarray(layer, jnp.int32), table_BX
    query_BTNH = query_BTNH.astype(_query_dtype(keys_LPZF, backend))
    mixed_BTNH = run_each(query_BTNH, *pages, seen.start_B, seen.ancestors_BTT, seen.counts_B, sink_logits_N)
    return mixed_BTNH.astype(backend.compute_dtype)


def attend_to_ring(
    query_BTNH: Float[Array, "B T N H"],
    keys_LBSF: Num[Array, "L B S F"],
    values_LBSF: Num[Array, "L B S _"],
    layer: Int[Array, ""] | int,
    seen: Seen,
    scale: float,
    backend: Backend,
    *,
    window: Window,
    softcap: float | None = None,
    num_sinks: int = 0,
    sink_query_BTNH: Float[Array, "B T N H"] | None = None,
    num_kv_heads: int | None = None,
    sink_logits_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to sinks and the ring after them in ``cache[layer]``, which holds the new tokens and the window before.

    A sink's position p is slot p, any other is slot ``num_sinks + (p - num_sinks) % C``; the mask covers all slots. If
    ``sink_query_BTNH`` is given, sinks use that query.
    """
    means, values_LBSF = choose_means(backend, keys_LBSF), values_of(keys_LBSF, values_LBSF)

    def by_xla() -> Any:
        sinks = None if sink_query_BTNH is None else Sinks(sink_query_BTNH, num_sinks)
        held = Layer(keys_LBSF, layer, keys_LBSF.shape[2]), Layer(values_LBSF, layer, values_LBSF.shape[2])
        order = ring_order(seen.start_B + query_BTNH.shape[1], num_sinks, keys_LBSF.shape[2])
        rule: Any = {"softcap": softcap, "num_kv_heads": num_kv_heads, "sink_logits_N": sink_logits_N}
        return attend(query_BTNH, *held, seen.mask_BTS, scale, backend, sinks=sinks, order=order, **rule)

    if means == "xla":
        return by_xla()
    from pallas_kernels.ring_decode.op import MAX_SINKS, MAX_TOKENS, ring_decode
    from pallas_kernels.ring_decode.reference import reference_ring

    if means == "kernel" and (query_BTNH.shape[1] > MAX_TOKENS or num_sinks > MAX_SINKS):
        return by_xla()
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": window, "num_sinks": num_sinks}

    def run(
        query: Any,
        keys: Any,
        values: Any,
        layer: Any,
        start_B: Any,
        ancestors_BTT: Any,
        _: Any,
        logits_N: Any,
        at_sinks: Any,
    ) -> Any:
        further, rule = (layer, start_B, ancestors_BTT, at_sinks), {**options, "sink_logits_N": logits_N}
        if means == "reference":
            lanes = None if num_kv_heads is None else num_kv_heads * query.shape[-1] // backend.kv_shards
            return reference_ring(query, keys[..., :lanes], values[..., :lanes], *further, **rule)
        how = {"num_kv_heads": num_kv_heads and num_kv_heads // backend.kv_shards, **_fixed(backend, "block_slots")}
        interpret = backend.kernels == "interpret"
        return ring_decode(query, keys, values, *further, interpret=interpret, **how, **rule)

    return _run(run, query_BTNH, keys_LBSF, values_LBSF, layer, seen, backend, sink_logits_N, sink_query_BTNH)


def _fixed(backend: Backend, *names: str) -> dict[str, int]:
    """Return the sizes of a kernel's blocks where rows are fixed; elsewhere it chooses the fastest ones."""
    return dict.fromkeys(names, _FIXED_BLOCK) if backend.fixed_rows > 1 else {}


def ring_order(next_B: Int[Array, " B"], num_sinks: int, ring_end: int) -> Order:
    """Return the order of slots whose sinks and ring have had all positions before ``next_B`` written."""
    behind_B = jnp.maximum(next_B - num_sinks, 0)
    return Order(num_sinks, num_sinks + behind_B % (ring_end - num_sinks), ring_end)


def _query_dtype(keys_LBSF: Any, backend: Backend) -> Any:
    """Return the dtype of queries: the cache's, or the model's where that is in bytes."""
    return backend.compute_dtype if holds_bytes(keys_LBSF.dtype) else keys_LBSF.dtype


def _run(
    function: Any,
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int,
    seen: Seen,
    backend: Backend,
    sink_logits_N: jax.Array | None,
    *further_BTNH: jax.Array | None,
) -> jax.Array:
    """Run on each device of the mesh, with queries in the cache's dtype and the result in the backend's."""
    ancestors = "a" if seen.ancestors_BTT.shape[0] == 1 else "r"
    run = on_each_device(function, backend, f"hccar{ancestors}rn" + "h" * len(further_BTNH), "h")
    dtype = _query_dtype(keys_LBSF, backend)
    query_BTNH = query_BTNH.astype(dtype)
    further = [None if each is None else each.astype(dtype) for each in further_BTNH]
    layer = jnp.asarray(layer, jnp.int32)
    tokens = seen.start_B, seen.ancestors_BTT, seen.counts_B
    mixed_BTNH = run(query_BTNH, keys_LBSF, values_LBSF, layer, *tokens, sink_logits_N, *further)
    return mixed_BTNH.astype(backend.compute_dtype)
