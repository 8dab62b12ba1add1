"""Real-size uses of paged_prefill: chunks of prompts on the head layouts of published models."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Blocks, Case, Rival
from pallas_kernels.flash_decode.cases import GEMMA_2_9B, LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B
from pallas_kernels.flash_decode.rivals import paged_rivals
from pallas_kernels.paged_decode.op import paged_shape
from pallas_kernels.paged_prefill.op import paged_prefill
from pallas_kernels.paged_prefill.reference import reference_chunk

BLOCKS: tuple[Blocks, ...] = tuple(
    {"block_q": tokens, "block_slots": slots} for tokens in (128, 256, 512) for slots in (256, 512, 1024)
)
LAYERS = 2


def chunk_case(
    name: str,
    heads: tuple[int, int, int],
    tokens: int,
    slots: int,
    page_size: int,
    batch: int = 1,
    dtype: Any = jnp.bfloat16,
    rivals: tuple[Rival, ...] = (),
    **options: Any,
) -> Case:
    """Describe the last chunk of full rows, whose pages are scattered over a pool that is one eighth larger."""
    num_heads, kv_heads, head_dim = heads
    pages = batch * slots // page_size
    pool = jax.ShapeDtypeStruct((LAYERS, pages + pages // 8, page_size, kv_heads * head_dim), dtype)
    query = jax.ShapeDtypeStruct((batch, tokens, num_heads, head_dim), dtype)
    table = np.random.default_rng(0).permutation(pool.shape[1])[:pages].astype(np.int32).reshape(batch, -1)
    own = slots - tokens + np.arange(tokens)
    first = np.maximum(own + 1 - (options.get("window") or slots), 0)
    read = batch * int(slots - first[0]) * kv_heads
    return Case(
        "paged_prefill",
        name,
        functools.partial(paged_prefill, **options),
        (query, pool, pool, np.int32(1).reshape(()), table, np.full(batch, slots - tokens, np.int32)),
        BLOCKS,
        paged_shape(query, pool),
        mxu_flops=4 * batch * num_heads * head_dim * int(np.sum(own + 1 - first)),
        floor_bytes=2 * jnp.dtype(dtype).itemsize * head_dim * (read + batch * tokens * num_heads),
        rivals=rivals,
        reference=functools.partial(reference_chunk, **options),
    )


TOY_CASES = (chunk_case("toy T=48 Z=32", (4, 2, 64), 48, 256, 32, batch=2, dtype=jnp.float32, window=100),)

CASES = (
    chunk_case("llama-3-8b T=512 S=2048 Z=128", LLAMA_3_8B, 512, 2048, 128,
               rivals=paged_rivals(1, 512, *LLAMA_3_8B, 2048, 2048)),
    chunk_case("llama-2-7b T=512 S=2048 Z=128", LLAMA_2_7B, 512, 2048, 128,
               rivals=paged_rivals(1, 512, *LLAMA_2_7B, 2048, 2048)),
    chunk_case("llama-3-8b T=128 S=2048 Z=64", LLAMA_3_8B, 128, 2048, 64),
    chunk_case("llama-3-70b T=512 S=8192 Z=64", LLAMA_3_70B, 512, 8192, 64),
    chunk_case("gemma-2-9b T=512 S=8192 Z=64 window=4096", GEMMA_2_9B, 512, 8192, 64, window=4096, softcap=50.0,
               scale=0.0625),
)  # fmt: skip
