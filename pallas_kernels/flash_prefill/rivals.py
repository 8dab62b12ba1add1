"""JAX's own kernels for a prompt's causal attention, at the block sizes to compare with."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from pallas_kernels.case import Rival

_BLOCKS = tuple({"block": size} for size in (128, 256, 512, 1024))


def attend_with_flash(query_BNTH: jax.Array, keys_BNTH: jax.Array, values_BNTH: jax.Array, *, block: int) -> jax.Array:
    """Run JAX's flash attention, which needs as many key/value heads as query heads."""
    sizes = BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)
    scale = query_BNTH.shape[-1] ** -0.5
    return flash_attention(query_BNTH, keys_BNTH, values_BNTH, causal=True, sm_scale=scale, block_sizes=sizes)


def attend_with_splash(query_BNTH: jax.Array, keys_BKTH: jax.Array, values_BKTH: jax.Array, *, block: int) -> jax.Array:
    """Run JAX's splash attention on scaled queries."""
    num_heads, tokens = query_BNTH.shape[1:3]
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((tokens, tokens))] * num_heads)
    sizes = splash_attention_kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    attend = splash_attention_kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    mixed: Any = jax.vmap(attend)(query_BNTH, keys_BKTH, values_BKTH)
    return mixed


def prompt_rivals(batch: int, tokens: int, num_heads: int, kv_heads: int, head_dim: int) -> tuple[Rival, ...]:
    """Return flash and splash attention for a prompt from slot 0, with arguments in their layouts."""
    query, keys = (
        jax.ShapeDtypeStruct((batch, heads, tokens, head_dim), jnp.bfloat16) for heads in (num_heads, kv_heads)
    )
    return (
        Rival("flash", attend_with_flash, _BLOCKS, (query, query, query)),
        Rival("splash", attend_with_splash, _BLOCKS, (query, keys, keys)),
    )
