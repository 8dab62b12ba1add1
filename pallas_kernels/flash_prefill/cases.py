"""Real-size uses of flash_prefill: prompts and chunks of prompts on the head layouts of published models."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Blocks, Case, Rival
from pallas_kernels.flash_prefill.op import flash_prefill, prefill_shape
from pallas_kernels.flash_prefill.reference import reference_prefill
from pallas_kernels.flash_prefill.rivals import prompt_rivals
from pallas_kernels.head_groups import LANES

# Query heads, key/value heads and head size.
EIGHT_HEADS = (8, 8, 128)
LLAMA_2_7B = (32, 32, 128)
LLAMA_3_8B = (32, 8, 128)
LLAMA_3_70B = (64, 8, 128)
GEMMA_2_9B = (16, 8, 256)
MISTRAL_7B = (32, 8, 128)
SMOLLM2_135M = (9, 3, 64)
PHI_2 = (32, 32, 80)
PHI_3_MINI = (32, 32, 96)

BLOCKS: tuple[Blocks, ...] = tuple(
    {"block_q": block_q, "block_k": block_k, "block_s": 2048}
    for block_q, block_k in ((256, 256), (256, 512), (512, 256), (512, 512), (1024, 256), (1024, 512), (1024, 1024))
)
LAYERS = 4


def prefill_rows(
    query_BTI: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array | None = None,
    *,
    num_heads: int,
    **options: Any,
) -> jax.Array:
    """Run flash_prefill on queries in a projection's layout, and return its output in the same: ``[B, T, N*H]``."""
    query_BTNH = query_BTI.reshape(*query_BTI.shape[:2], num_heads, -1)
    mixed_BTNH = flash_prefill(query_BTNH, keys_LBSF, values_LBSF, layer, start_B, **options)
    return mixed_BTNH.reshape(query_BTI.shape)


def reference_rows(
    query_BTI: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    **rule: Any,
) -> jax.Array:
    """Run the reference on 128 tokens at a time: the scores of all tokens would not fit a chip."""
    batch, tokens, width = query_BTI.shape
    lanes = num_kv_heads * (width // num_heads)
    keys, values = (cache[layer][None, ..., :lanes] for cache in (keys_LBSF, values_LBSF))
    first_B = jnp.zeros(batch, jnp.int32) if start_B is None else start_B
    count = min(tokens, 128)

    def attend(part: jax.Array) -> jax.Array:
        query_BTI_part = jax.lax.dynamic_slice_in_dim(query_BTI, part * count, count, 1)
        query_BTNH = query_BTI_part.reshape(batch, count, num_heads, -1)
        return reference_prefill(query_BTNH, keys, values, 0, first_B + part * count, **rule)

    mixed_XBTNH = jax.lax.map(attend, jnp.arange(tokens // count))
    return jnp.moveaxis(mixed_XBTNH, 0, 1).reshape(query_BTI.shape)


def prefill_case(
    name: str,
    heads: tuple[int, int, int],
    tokens: int,
    slots: int,
    *,
    batch: int = 1,
    start: int | None = None,
    layers: int = LAYERS,
    dtype: Any = jnp.bfloat16,
    rivals: tuple[Rival, ...] = (),
    **options: Any,
) -> Case:
    """Describe prompts from slot 0, or chunks of prompts from slot ``start``; all their tokens are real."""
    num_heads, kv_heads, head_dim = heads
    query = jax.ShapeDtypeStruct((batch, tokens, num_heads, head_dim), dtype)
    cache = jax.ShapeDtypeStruct((layers, batch, slots, -(-kv_heads * head_dim // LANES) * LANES), dtype)
    rows = jax.ShapeDtypeStruct((batch, tokens, num_heads * head_dim), dtype)
    starts = () if start is None else (np.full(batch, start, np.int32),)
    window = options.get("window")
    own = (start or 0) + np.arange(tokens)
    first = np.maximum(own + 1 - (window or slots), 0)
    itemsize = jnp.dtype(dtype).itemsize
    of_heads = {"num_heads": num_heads, "num_kv_heads": kv_heads}
    return Case(
        "flash_prefill",
        name,
        functools.partial(prefill_rows, **of_heads, **options),
        (rows, cache, cache, np.int32(layers - 1).reshape(()), *starts),
        BLOCKS,
        prefill_shape(query, cache, kv_heads, start is None, window),
        mxu_flops=4 * batch * num_heads * head_dim * int(np.sum(own + 1 - first)),
        floor_bytes=itemsize * batch * head_dim * 2 * (tokens * num_heads + int(own[-1] + 1 - first[0]) * kv_heads),
        rivals=rivals,
        reference=functools.partial(reference_rows, **of_heads, **options),
        lanes=kv_heads * head_dim,
    )


TOY_CASES = (prefill_case("toy T=256 from 128 window=200", (4, 2, 64), 256, 512, start=128, window=200),)

CASES = (
    prefill_case("N=8 T=2048", EIGHT_HEADS, 2048, 2048, layers=1, rivals=prompt_rivals(1, 2048, *EIGHT_HEADS)),
    prefill_case("llama-3-8b T=2048", LLAMA_3_8B, 2048, 2048, rivals=prompt_rivals(1, 2048, *LLAMA_3_8B)),
    prefill_case("llama-2-7b T=2048", LLAMA_2_7B, 2048, 2048, rivals=prompt_rivals(1, 2048, *LLAMA_2_7B)),
    prefill_case("llama-3-8b T=8192", LLAMA_3_8B, 8192, 8192, rivals=prompt_rivals(1, 8192, *LLAMA_3_8B)),
    prefill_case("llama-3-70b T=512 from 7680", LLAMA_3_70B, 512, 8192, start=7680),
    prefill_case("gemma-2-9b T=8192 window=4096", GEMMA_2_9B, 8192, 8192, window=4096, softcap=50.0, scale=0.0625),
    prefill_case("mistral-7b T=2048 from 30720 window=4096", MISTRAL_7B, 2048, 32768, start=30720, window=4096),
    prefill_case("smollm2-135m T=2048", SMOLLM2_135M, 2048, 2048),
    prefill_case("phi-2 T=2048", PHI_2, 2048, 2048),
    prefill_case("N=8 T=2048 float32", EIGHT_HEADS, 2048, 2048, layers=1, dtype=jnp.float32),
)  # fmt: skip
