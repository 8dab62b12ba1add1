"""Real-size uses of flash_decode: head layouts of published models, long caches, equal and mixed row lengths."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Blocks, Case, Rival
from pallas_kernels.flash_decode.op import decode_shape, flash_decode
from pallas_kernels.flash_decode.reference import reference_attention
from pallas_kernels.flash_decode.rivals import paged_rivals
from pallas_kernels.head_groups import LANES

# Query heads, key/value heads and head size.
LLAMA_2_7B = (32, 32, 128)
LLAMA_3_8B = (32, 8, 128)
LLAMA_3_70B = (64, 8, 128)
GEMMA_2_9B = (16, 8, 256)
MISTRAL_7B = (32, 8, 128)
GPT_OSS = (64, 8, 64)
SMOLLM2_135M = (9, 3, 64)
PHI_2 = (32, 32, 80)

BLOCKS: tuple[Blocks, ...] = tuple({"block_slots": slots} for slots in (256, 512, 1024))
LAYERS = 4


def decode_case(
    kernel: str,
    function: Callable[..., jax.Array],
    name: str,
    heads: tuple[int, int, int],
    starts: Sequence[int],
    tokens: int,
    slots: int,
    *,
    ancestors: bool = False,
    dtype: Any = jnp.bfloat16,
    rivals: tuple[Rival, ...] = (),
    **options: Any,
) -> Case:
    """Describe one step of rows that hold ``starts`` tokens; bytes and operations count visible slots only."""
    num_heads, kv_heads, head_dim = heads
    batch = len(starts)
    query = jax.ShapeDtypeStruct((batch, tokens, num_heads, head_dim), dtype)
    cache = jax.ShapeDtypeStruct((LAYERS, batch, slots, -(-kv_heads * head_dim // LANES) * LANES), dtype)
    tree = (jax.ShapeDtypeStruct((batch, tokens, tokens), jnp.bool_),) if ancestors else ()
    arguments = (query, cache, cache, np.int32(LAYERS - 2).reshape(()), np.array(starts, np.int32), *tree)
    window = options.get("window") or slots
    seen = sum(min(start, window - 1) + tokens for start in starts)
    itemsize = jnp.dtype(dtype).itemsize
    rule = {name: options[name] for name in ("scale", "softcap", "window") if name in options}
    return Case(
        kernel,
        name,
        functools.partial(function, **{"num_kv_heads": kv_heads, "lane_parts": 1, **options}),
        arguments,
        BLOCKS,
        decode_shape(query, cache, kv_heads),
        mxu_flops=4 * tokens * num_heads * head_dim * seen,
        floor_bytes=itemsize * (2 * seen * kv_heads * head_dim + 2 * batch * tokens * num_heads * head_dim),
        rivals=rivals,
        reference=functools.partial(reference_attention, num_kv_heads=kv_heads, **rule),
        lanes=kv_heads * head_dim,
    )


TOY_CASES = (
    decode_case("flash_decode", flash_decode, "toy T=2", (3, 3, 64), [0, 190], 2, 256, window=100, softcap=20.0),
)

CASES = (
    decode_case("flash_decode", flash_decode, "llama-3-8b B=8 T=1 S=2048", LLAMA_3_8B, [2047] * 8, 1, 2048,
                rivals=paged_rivals(8, 1, *LLAMA_3_8B, 2048, 2048)),
    decode_case("flash_decode", flash_decode, "llama-3-8b B=8 T=8 S=2048", LLAMA_3_8B, [2040] * 8, 8, 2048,
                rivals=paged_rivals(8, 8, *LLAMA_3_8B, 2048, 2048)),
    decode_case("flash_decode", flash_decode, "llama-3-8b B=8 T=1 S=2048 ragged", LLAMA_3_8B,
                [0, 127, 128, 511, 512, 1000, 1500, 2047], 1, 2048),
    decode_case("flash_decode", flash_decode, "llama-2-7b B=4 T=1 S=2048", LLAMA_2_7B, [2047] * 4, 1, 2048),
    decode_case("flash_decode", flash_decode, "llama-3-70b B=4 T=4 S=8192", LLAMA_3_70B, [8188] * 4, 4, 8192),
    decode_case("flash_decode", flash_decode, "gemma-2-9b B=4 T=1 S=8192 window=4096", GEMMA_2_9B, [8191] * 4, 1, 8192,
                window=4096, softcap=50.0, scale=0.0625),
    decode_case("flash_decode", flash_decode, "mistral-7b B=1 T=1 S=32768 window=4096", MISTRAL_7B, [32767], 1, 32768,
                window=4096),
    decode_case("flash_decode", flash_decode, "llama-3-8b B=1 T=1 S=32768", LLAMA_3_8B, [32767], 1, 32768),
    decode_case("flash_decode", flash_decode, "smollm2-135m B=1 T=4 S=2048", SMOLLM2_135M, [2044], 4, 2048),
    decode_case("flash_decode", flash_decode, "phi-2 B=1 T=1 S=2048", PHI_2, [2047], 1, 2048),
)  # fmt: skip
