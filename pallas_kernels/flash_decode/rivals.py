"""JAX's own kernels for decoding, which read pages; here every row's pages are consecutive."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_kernel

from pallas_kernels.case import Rival

PAGE_SIZE = 128
VMEM_LIMIT_BYTES = 64 << 20


def jax_paged(
    query_BNH: jax.Array,
    key_pages_KPZH: jax.Array,
    value_pages_KPZH: jax.Array,
    lengths_B: jax.Array,
    table_BP: jax.Array,
    *,
    pages_per_compute_block: int,
) -> jax.Array:
    """Run JAX's paged attention, for one token per row."""
    return paged_attention_kernel.paged_attention(
        query_BNH,
        key_pages_KPZH,
        value_pages_KPZH,
        lengths_B,
        table_BP,
        pages_per_compute_block=pages_per_compute_block,
    )


def jax_ragged(
    query_XNH: jax.Array,
    pages_PZKH: jax.Array,
    lengths_B: jax.Array,
    table_BP: jax.Array,
    ends_B: jax.Array,
    *,
    num_kv_pages_per_block: int,
    num_queries_per_block: int = 8,
) -> jax.Array:
    """Run JAX's ragged paged attention: X tokens of all rows, each the last of its row; keys and values interleaved."""
    return ragged_kernel.ragged_paged_attention(
        query_XNH,
        pages_PZKH,
        lengths_B,
        table_BP,
        ends_B,
        jnp.array([lengths_B.shape[0]], jnp.int32),
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=VMEM_LIMIT_BYTES,
    )


def paged_rivals(
    batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, slots: int, length: int
) -> tuple[Rival, ...]:
    """Return JAX's kernels for rows of ``length`` tokens, the last ``tokens`` of them new, at blocks up to 1024.

    Of several new tokens the ragged kernel computes as many together as are fastest: all, or half of them, 128 at most.
    """
    most = max(8, min(128, 1 << (tokens.bit_length() - 1)))
    dtype = jnp.bfloat16
    pages = slots // PAGE_SIZE
    table = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    lengths = np.full(batch, length, np.int32)
    ragged = Rival(
        "jax ragged paged attention",
        jax_ragged,
        tuple(
            {"num_kv_pages_per_block": count, "num_queries_per_block": queries}
            for count in (2, 4, 8)
            for queries in sorted({max(8, most // 2), most})
        ),
        (
            jax.ShapeDtypeStruct((batch * tokens, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch * pages, PAGE_SIZE, 2 * kv_heads, head_dim), dtype),
            lengths,
            table,
            np.arange(batch + 1, dtype=np.int32) * tokens,
        ),
    )
    if tokens > 1:
        return (ragged,)
    held = jax.ShapeDtypeStruct((kv_heads, batch * pages, PAGE_SIZE, head_dim), dtype)
    query = jax.ShapeDtypeStruct((batch, heads, head_dim), dtype)
    paged = Rival(
        "jax paged attention",
        jax_paged,
        tuple({"pages_per_compute_block": count} for count in (1, 2, 4, 8)),
        (query, held, held, lengths, table),
    )
    return paged, ragged
