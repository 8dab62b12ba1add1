"""Real-size uses of paged_decode: head layouts of published models, pages of all sizes, rows in bytes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.byte_rows import SCALE_BYTES
from pallas_kernels.case import Blocks, Case, Rival
from pallas_kernels.flash_decode.cases import GEMMA_2_9B, LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, MISTRAL_7B
from pallas_kernels.flash_decode.rivals import paged_rivals
from pallas_kernels.head_groups import LANES
from pallas_kernels.paged_decode.op import paged_decode, paged_shape
from pallas_kernels.paged_decode.reference import reference_paged


def verify_pages(
    query_BTNH: jax.Array,
    key_pages_LPZF: jax.Array,
    value_pages_LPZF: jax.Array,
    layer: jax.Array,
    table_BX: jax.Array,
    start_B: jax.Array,
    ancestors_BTT: jax.Array,
    *,
    function: Callable[..., jax.Array],
    **options: Any,
) -> jax.Array:
    """Run paged_decode, or its reference, on trees."""
    pages = key_pages_LPZF, value_pages_LPZF, layer, table_BX, start_B
    return function(query_BTNH, *pages, ancestors_BTT=ancestors_BTT, **options)


BLOCKS: tuple[Blocks, ...] = tuple({"block_slots": slots} for slots in (256, 512, 1024))
LAYERS = 2


def paged_case(
    name: str,
    heads: tuple[int, int, int],
    batch: int,
    tokens: int,
    slots: int,
    page_size: int,
    dtype: str = "bfloat16",
    rivals: tuple[Rival, ...] = (),
    ancestors: bool = False,
    **options: Any,
) -> Case:
    """Describe a step of full rows whose pages are scattered over a pool that is one eighth larger.

    The new tokens are a chain, or trees with ``ancestors``.
    """
    num_heads, kv_heads, head_dim = heads
    pages = batch * slots // page_size
    in_bytes = dtype == "int8"
    lanes = kv_heads * (head_dim + SCALE_BYTES if in_bytes else head_dim)
    if in_bytes:
        options["num_kv_heads"] = kv_heads
        lanes = -(-lanes // LANES) * LANES
    pool = jax.ShapeDtypeStruct((LAYERS, pages + pages // 8, page_size, lanes), dtype)
    query = jax.ShapeDtypeStruct((batch, tokens, num_heads, head_dim), jnp.bfloat16)
    table = np.random.default_rng(0).permutation(pool.shape[1])[:pages].astype(np.int32).reshape(batch, -1)
    seen = batch * min(slots, (options.get("window") or slots) + tokens - 1)
    slot_bytes = kv_heads * (head_dim * jnp.dtype(dtype).itemsize + (SCALE_BYTES if in_bytes else 0))
    trees = (jax.ShapeDtypeStruct((batch, tokens, tokens), jnp.bool_),) if ancestors else ()
    function, reference = (
        functools.partial(verify_pages, function=each, **options) if ancestors else functools.partial(each, **options)
        for each in (paged_decode, reference_paged)
    )
    start_B = np.full(batch, slots - tokens, np.int32)
    return Case(
        "paged_decode",
        name,
        function,
        (query, pool, pool, np.int32(1).reshape(()), table, start_B, *trees),
        BLOCKS,
        paged_shape(query, pool, kv_heads),
        mxu_flops=4 * tokens * num_heads * head_dim * seen,
        floor_bytes=2 * seen * slot_bytes + 4 * batch * tokens * num_heads * head_dim,
        rivals=rivals,
        reference=reference,
        byte_heads=(kv_heads, head_dim) if in_bytes else None,
    )


TOY_CASES = (
    paged_case("toy T=2 Z=32 int8", (4, 2, 64), 2, 2, 256, 32, "int8"),
    paged_case("toy tree T=9 Z=32", (4, 2, 64), 2, 9, 256, 32, "float32", ancestors=True),
)

CASES = (
    paged_case("llama-3-8b B=8 T=1 S=2048 Z=16", LLAMA_3_8B, 8, 1, 2048, 16),
    paged_case("llama-3-8b B=8 T=1 S=2048 Z=64", LLAMA_3_8B, 8, 1, 2048, 64),
    paged_case("llama-3-8b B=8 T=1 S=2048 Z=128", LLAMA_3_8B, 8, 1, 2048, 128,
               rivals=paged_rivals(8, 1, *LLAMA_3_8B, 2048, 2048)),
    paged_case("llama-3-8b B=8 tree T=16 S=2048 Z=128", LLAMA_3_8B, 8, 16, 2048, 128, ancestors=True,
               rivals=paged_rivals(8, 16, *LLAMA_3_8B, 2048, 2048)),
    paged_case("llama-3-8b B=8 tree T=64 S=2048 Z=128", LLAMA_3_8B, 8, 64, 2048, 128, ancestors=True,
               rivals=paged_rivals(8, 64, *LLAMA_3_8B, 2048, 2048)),
    paged_case("llama-2-7b B=8 tree T=64 S=2048 Z=64", LLAMA_2_7B, 8, 64, 2048, 64, ancestors=True),
    paged_case("llama-3-70b B=4 T=8 S=8192 Z=64", LLAMA_3_70B, 4, 8, 8192, 64),
    paged_case("mistral-7b B=4 T=1 S=8192 Z=32 window=4096", MISTRAL_7B, 4, 1, 8192, 32, window=4096),
    paged_case("llama-3-8b B=8 T=1 S=2048 Z=32 int8", LLAMA_3_8B, 8, 1, 2048, 32, "int8"),
    paged_case("llama-3-8b B=8 T=1 S=2048 Z=128 int8", LLAMA_3_8B, 8, 1, 2048, 128, "int8"),
    paged_case("llama-2-7b B=2 T=4 S=2048 Z=64 int8", LLAMA_2_7B, 2, 4, 2048, 64, "int8"),
    paged_case("gemma-2-9b B=2 T=1 S=8192 Z=64", GEMMA_2_9B, 2, 1, 8192, 64, softcap=50.0, scale=0.0625),
)  # fmt: skip
