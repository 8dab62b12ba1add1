"""Attention of new tokens to a layer of a stacked cache in which they stand already, by Pallas kernels or by XLA."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import Backend
from pallas_kernels.flash_decode.op import flash_decode
from pallas_kernels.flash_prefill.op import flash_prefill
from pallas_kernels.tree_verify.op import MAX_NODES, tree_verify

# What a TPU holds side by side. A cache of another width lies in another order, and would be copied for a kernel.
_LANES = 128


class Seen(NamedTuple):
    """What each new token sees: all slots before ``start_B``, and of the T new ones, which follow, its ancestors.

    ``ancestors_BTT`` bool, one for all rows or one each; ``counts_B`` int32 says how many tokens of a prompt, which are
    a chain, are real (None: a draft tree, all of it real); ``mask_BTS`` bool says it all slot by slot.
    """

    start_B: Any
    ancestors_BTT: Any
    counts_B: Any
    mask_BTS: Any


def attend_to_layer(
    query_BTNH: Float[Array, "B T N H"],
    keys_LBSF: Float[Array, "L B S F"],
    values_LBSF: Float[Array, "L B S F"],
    layer: Int[Array, ""] | int,
    seen: Seen,
    scale: float,
    backend: Backend,
    *,
    softcap: float | None = None,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Attend to ``cache[layer]``, ``[B, S, K*H]``, by what the backend names; the mask knows the window already.

    Kernels read the layer where it lies, and no slots that are not seen. They do not know a mesh, and larger trees
    than `MAX_NODES` are left to XLA, which prompts are not.
    """
    num_tokens = query_BTNH.shape[1]
    is_prompt = seen.counts_B is not None and num_tokens > MAX_NODES
    serves = keys_LBSF.dtype in (jnp.bfloat16, jnp.float32) and backend.kv_shards == 1
    lies_well = keys_LBSF.shape[-1] % _LANES == 0 or backend.kernels == "interpret"
    fits = num_tokens <= MAX_NODES or is_prompt
    if backend.kernels == "xla" or not (serves and lies_well and fits):
        extent = seen.mask_BTS.shape[-1]
        held = keys_LBSF[layer, :, :extent], values_LBSF[layer, :, :extent]
        return attend(query_BTNH, *held, seen.mask_BTS, scale, backend, softcap=softcap)
    num_kv_heads = keys_LBSF.shape[-1] // query_BTNH.shape[-1]
    options: dict[str, Any] = {
        "num_kv_heads": num_kv_heads,
        "scale": scale,
        "softcap": softcap,
        "window": window,
        "interpret": backend.kernels == "interpret",
    }
    cache = keys_LBSF, values_LBSF, layer, seen.start_B
    query_BTNH = query_BTNH.astype(keys_LBSF.dtype)
    if is_prompt:
        mixed_BTNH = flash_prefill(query_BTNH, *cache, seen.counts_B, **options)
    elif num_tokens == 1:
        mixed_BTNH = flash_decode(query_BTNH, *cache, **options)
    else:
        mixed_BTNH = tree_verify(query_BTNH, *cache, seen.ancestors_BTT, **options)
    return mixed_BTNH.astype(backend.compute_dtype)
