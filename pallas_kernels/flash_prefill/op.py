"""Causal attention of a prompt, or of a chunk of one, to a cache, forward and backward."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.block_attention import ScoreRule, check_sinks, sinks_in_base_2
from pallas_kernels.flash_prefill.backward import attention_gradients
from pallas_kernels.flash_prefill.kernel import Prefill, Tiling, attend_prompt
from pallas_kernels.flash_prefill.lane_windows import LaneWindows
from pallas_kernels.head_groups import LANES
from pallas_kernels.tuning import tuned_blocks
from pallas_kernels.window import Chunk, Window, widest

KERNEL = "flash_prefill"
Described = jax.Array | jax.ShapeDtypeStruct


def flash_prefill(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array | int = 0,
    start_B: jax.Array | None = None,
    length_B: jax.Array | None = None,
    *,
    num_kv_heads: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    block_s: int | None = None,
    sink_logits_N: ArrayLike | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attend with new tokens to ``cache[layer]``, which already holds them: ``[B, T, N, H]`` like the queries.

    The cache ``[L, B, S, K*H]`` holds the heads of a slot side by side. A prompt without a cache passes its own keys
    ``[B, T, K, H]`` as ``[1, B, T, K*H]``. Token t of row b is in slot ``start_B[b] + t`` (None: the prompt starts in
    slot 0, known at compile time and faster). It attends to all slots up to its own, or those in its ``window``.
    ``length_B`` is the number of a row's real tokens, 0 to T; the others give zeros. Starts and lengths are clipped to
    the cache. Slots that no token attends to may hold anything, and are read only as the rest of a block. ``scale`` is
    ``H ** -0.5`` by default. Lanes after those of ``num_kv_heads`` heads must be zeros. Differentiable once in queries,
    keys, values and ``sink_logits_N``, a score of each head that no slot has: it takes a part of the weights and has no
    value.

    Blocks are ``block_q`` tokens by ``block_k`` slots; ``block_s`` slots are fetched at a time.
    """
    batch, tokens, num_heads, head_dim = _check(
        query_BTNH, keys_LBSF, values_LBSF, start_B, length_B, num_kv_heads, scale, softcap, window
    )
    check_sinks(KERNEL, sink_logits_N, num_heads)
    num_slots, width = keys_LBSF.shape[2:]
    from_zero = start_B is None
    start_B = jnp.zeros(batch, jnp.int32) if start_B is None else jnp.clip(start_B, 0, num_slots).astype(jnp.int32)
    length_B = jnp.full(batch, tokens, jnp.int32) if length_B is None else length_B.astype(jnp.int32)
    length_B = jnp.clip(length_B, 0, jnp.minimum(tokens, num_slots - start_B))
    num_kv_heads = num_kv_heads or width // head_dim
    given = {"block_q": block_q, "block_k": block_k, "block_s": block_s}
    if None in given.values():
        shape = prefill_shape(query_BTNH, keys_LBSF, num_kv_heads, from_zero, window)
        given = {**tuned_blocks(KERNEL, shape), **{name: size for name, size in given.items() if size is not None}}
    layer = jnp.asarray(layer, jnp.int32)
    if width % LANES:
        # The compiler lays out such a cache in another order, and copies it for a kernel anyway.
        padding = ((0, 0), (0, 0), (0, 0), (0, -width % LANES))
        keys_LBSF, values_LBSF = (jnp.pad(cache[layer][None], padding) for cache in (keys_LBSF, values_LBSF))
        layer = jnp.zeros_like(layer)
    prefill = Prefill(
        tokens=tokens,
        slots=num_slots,
        heads_per_kv=num_heads // num_kv_heads,
        windows=LaneWindows(head_dim, keys_LBSF.shape[3]),
        tiling=_fit_tiling(given, tokens, num_slots, from_zero),
        rule=ScoreRule(head_dim**-0.5 if scale is None else scale, softcap),
        window=window,
        from_zero=from_zero,
    )
    sinks_N = None if sink_logits_N is None else sinks_in_base_2(sink_logits_N)
    return _attend(prefill, interpret, query_BTNH, keys_LBSF, values_LBSF, layer, start_B, length_B, sinks_N)


def attend_block(
    query_BTNH: jax.Array,
    keys_BSF: jax.Array,
    values_BSF: jax.Array,
    distance: jax.Array | int,
    *,
    num_kv_heads: int,
    scale: float | None = None,
    softcap: float | None = None,
    window: Window | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend from one block of a sequence to an earlier one, ``distance`` tokens before it, as far as it is visible.

    Return the values' means ``[B, T, N, H]`` and the scores' log-sum-exp ``[B, T, N]``, which join the results of
    several blocks; without visible slots, the log-sum-exp is so low that the block has no weight. The earlier block has
    a multiple of 128 tokens. See `flash_prefill`.
    """
    batch, tokens, num_heads, head_dim = _check(
        query_BTNH, keys_BSF[None], values_BSF[None], None, None, num_kv_heads, scale, softcap, window
    )
    num_slots, width = keys_BSF.shape[1:]
    if isinstance(window, Chunk):
        raise ValueError(f"{KERNEL}: blocks that are {distance} tokens apart do not say where chunks begin")
    if num_slots % LANES:
        raise ValueError(f"{KERNEL}: {num_slots} tokens to attend to are not a multiple of {LANES}")
    from_zero = isinstance(distance, int) and distance == 0
    blocks = tuned_blocks(KERNEL, prefill_shape(query_BTNH, keys_BSF[None], num_kv_heads, from_zero, window))
    # Distant queries attend to the end of the last block, so it must hold nothing else.
    blocks["block_k"] = math.gcd(blocks["block_k"], num_slots)
    padding = ((0, 0), (0, 0), (0, -width % LANES))
    keys_LBSF, values_LBSF = (jnp.pad(held_BSF, padding)[None] for held_BSF in (keys_BSF, values_BSF))
    prefill = Prefill(
        tokens=tokens,
        slots=num_slots,
        heads_per_kv=num_heads // num_kv_heads,
        windows=LaneWindows(head_dim, keys_LBSF.shape[3]),
        tiling=_fit_tiling(blocks, tokens, num_slots, from_zero),
        rule=ScoreRule(head_dim**-0.5 if scale is None else scale, softcap),
        window=window,
        from_zero=from_zero,
    )
    # Queries past all slots attend to all of them.
    start_B = jnp.full(batch, distance, jnp.int32)
    length_B = jnp.full(batch, tokens, jnp.int32)
    arguments = (query_BTNH, keys_LBSF, values_LBSF, jnp.int32(0), start_B, length_B)
    mixed_BTNH, logsumexp_BNT = _run(prefill, interpret, True, *arguments)
    return mixed_BTNH, jnp.moveaxis(logsumexp_BNT, 1, 2) * math.log(2)


def prefill_shape(
    query_BTNH: Described, keys_LBSF: Described, num_kv_heads: int, from_zero: bool, window: Window | None
) -> dict[str, int | str]:
    """Return the key in tuned.json: what the best blocks depend on."""
    _, tokens, num_heads, head_dim = query_BTNH.shape
    shape: dict[str, int | str] = {"T": tokens, "S": keys_LBSF.shape[2], "N": num_heads, "K": num_kv_heads}
    shape |= {"H": head_dim, "dtype": jnp.dtype(keys_LBSF.dtype).name, "start": "zero" if from_zero else "any"}
    return shape if window is None else {**shape, "W": widest(window)}


def _check(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    start_B: jax.Array | None,
    length_B: jax.Array | None,
    num_kv_heads: int | None,
    scale: float | None,
    softcap: float | None,
    window: Window | None,
) -> tuple[int, int, int, int]:
    """Return the queries' shape; raise ValueError if shapes or options do not match."""
    shape, cache = query_BTNH.shape, keys_LBSF.shape
    if len(shape) != 4 or len(cache) != 4:
        raise ValueError(f"{KERNEL}: queries {shape} must be [B, T, N, H] and keys {cache} [L, B, S, K*H]")
    batch, tokens, num_heads, head_dim = shape
    if cache != values_LBSF.shape or keys_LBSF.dtype != values_LBSF.dtype:
        raise ValueError(f"{KERNEL}: keys {cache} and values {values_LBSF.shape} must be alike, in dtype too")
    if keys_LBSF.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"{KERNEL}: a cache of {keys_LBSF.dtype} is not supported: use bfloat16 or float32")
    if query_BTNH.dtype != keys_LBSF.dtype:
        raise ValueError(f"{KERNEL}: queries are {query_BTNH.dtype}, the cache {keys_LBSF.dtype}: convert one of them")
    if num_kv_heads is None and cache[3] % head_dim:
        raise ValueError(f"{KERNEL}: slots of {cache[3]} numbers are not heads of {head_dim}: give num_kv_heads")
    num_kv_heads = num_kv_heads or cache[3] // head_dim
    if num_kv_heads * head_dim > cache[3] or num_heads % max(num_kv_heads, 1):
        raise ValueError(
            f"{KERNEL}: {num_heads} heads of {head_dim} cannot share {num_kv_heads} in slots of {cache[3]} numbers"
        )
    if cache[1] != batch or cache[2] < tokens:
        raise ValueError(f"{KERNEL}: {batch} rows of {tokens} tokens do not fit a cache {cache} of [L, B, S, K*H]")
    for name, numbers_B in (("starts", start_B), ("lengths", length_B)):
        if numbers_B is not None and numbers_B.shape != (batch,):
            raise ValueError(f"{KERNEL}: {name} {numbers_B.shape} are not one for each of {batch} rows")
    for name, number in (("scale", scale), ("softcap", softcap), ("window", window and widest(window))):
        if number is not None and number <= 0:
            raise ValueError(f"{KERNEL}: {name}={number} must be above 0")
    return batch, tokens, num_heads, head_dim


def _fit_tiling(blocks: dict[str, Any], tokens: int, num_slots: int, from_zero: bool) -> Tiling:
    """Check block sizes, and limit them to the sizes of the arrays."""
    for name, size in blocks.items():
        if size < LANES or size % LANES:
            raise ValueError(f"{KERNEL}: {name}={size} is not a multiple of {LANES}")
    block_q = min(blocks["block_q"], _round_up(tokens, LANES))
    block_k = min(blocks["block_k"], _round_up(num_slots, LANES))
    if from_zero:
        # The triangle's side must be a whole number of blocks.
        block_k = min(block_k, block_q)
        block_q -= block_q % block_k
    unit = block_q if from_zero else block_k
    block_s = max(min(blocks["block_s"], _round_up(num_slots, unit)) // unit, 1) * unit
    return Tiling(block_q, block_k, block_s)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    prefill: Prefill,
    interpret: Any,
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    sinks_N: jax.Array | None,
) -> jax.Array:
    return _run(prefill, interpret, False, query_BTNH, keys_LBSF, values_LBSF, layer, start_B, length_B, sinks_N)[0]


def _run(
    prefill: Prefill,
    interpret: Any,
    with_logsumexp: bool,
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array,
    length_B: jax.Array,
    sinks_N: jax.Array | None = None,
) -> list[jax.Array]:
    batch, tokens, num_heads, head_dim = query_BTNH.shape
    width = prefill.windows.width
    missing = max(prefill.tiling.block_q - tokens, 0)
    query_BTNW = jnp.pad(query_BTNH, ((0, 0), (0, missing), (0, 0), (0, width - head_dim)))
    mixed_BTI, *logsumexp = attend_prompt(
        query_BTNW.reshape(batch, -1, num_heads * width), keys_LBSF, values_LBSF, layer, start_B, length_B,
        prefill, with_logsumexp, interpret, sinks_N,
    )  # fmt: skip
    mixed_BTNH = mixed_BTI[:, :tokens].reshape(batch, tokens, num_heads, width)[..., :head_dim]
    return [mixed_BTNH, *(each[:, :, 0, :tokens] for each in logsumexp)]


def _forward(prefill: Prefill, interpret: Any, *arguments: Any) -> tuple[jax.Array, Any]:
    mixed_BTNH, logsumexp_BNT = _run(prefill, interpret, True, *arguments)
    return mixed_BTNH, (arguments, mixed_BTNH, logsumexp_BNT)


def _backward(prefill: Prefill, interpret: Any, kept: Any, gradient_BTNH: jax.Array) -> tuple[Any, ...]:
    (query_BTNH, keys_LBSF, values_LBSF, layer, start_B, length_B, sinks_N), mixed_BTNH, logsumexp_BNT = kept
    num_heads, head_dim = query_BTNH.shape[2:]
    lanes = num_heads // prefill.heads_per_kv * head_dim
    keys_BSF, values_BSF = (cache[layer, ..., :lanes] for cache in (keys_LBSF, values_LBSF))
    of_query, of_keys_BSF, of_values_BSF = attention_gradients(
        query_BTNH, keys_BSF, values_BSF, start_B, length_B, mixed_BTNH, logsumexp_BNT, gradient_BTNH,
        prefill.rule, prefill.window, prefill.tiling.block_k,
    )  # fmt: skip
    of_cache = [
        jnp.zeros_like(cache).at[layer, ..., :lanes].set(gradient.astype(cache.dtype))
        for cache, gradient in ((keys_LBSF, of_keys_BSF), (values_LBSF, of_values_BSF))
    ]
    of_sinks_N = None
    if sinks_N is not None:
        # Of padding tokens the gradient is that of zeros, whatever their log-sum-exp.
        inner_BNT = jnp.einsum("BTNH,BTNH->BNT", mixed_BTNH.astype(jnp.float32), gradient_BTNH.astype(jnp.float32))
        weights_BNT = jnp.exp2(sinks_N[:, None] - logsumexp_BNT)
        of_sinks_N = -math.log(2) * jnp.sum(jnp.where(inner_BNT == 0, 0, weights_BNT * inner_BNT), axis=(0, 2))
    return of_query.astype(query_BTNH.dtype), *of_cache, None, None, None, of_sinks_N


_attend.defvjp(_forward, _backward)
