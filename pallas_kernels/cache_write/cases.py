"""Real-size writes: a token, a draft tree or a chunk of a prompt per row, to caches of published models."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cache_write.op import cache_write, write_shape
from pallas_kernels.cache_write.reference import reference_write
from pallas_kernels.case import Blocks, Case

BLOCKS: tuple[Blocks, ...] = tuple({"block_slots": slots} for slots in (16, 32, 64))
LAYERS = 4
# The width of a slot: K * H.
LLAMA_2_7B, LLAMA_3_8B = 4096, 1024


def write_case(
    name: str, width: int, batch: int, tokens: int, slots: int, dtype: Any = jnp.bfloat16, **options: Any
) -> Case:
    """Describe a write whose starts are anywhere in a tile; in a ring, tokens go around its end."""
    cache = jax.ShapeDtypeStruct((LAYERS, batch, slots, width), dtype)
    new = jax.ShapeDtypeStruct((batch, tokens, width), dtype)
    last = 2 * slots if "num_sinks" in options else slots - tokens
    starts = np.linspace(last // 2, last, batch, dtype=np.int32)
    return Case(
        "cache_write",
        name,
        functools.partial(cache_write, **options),
        (cache, cache, new, new, np.int32(LAYERS - 2).reshape(()), starts),
        BLOCKS,
        write_shape(cache, new),
        mxu_flops=0,
        # New tokens are read and written, both keys and values.
        floor_bytes=4 * batch * tokens * width * jnp.dtype(dtype).itemsize,
        reference=functools.partial(reference_write, **options),
        donated=(0, 1),
    )


TOY_CASES = (write_case("toy T=20 ring sinks=4", 128, 2, 20, 256, num_sinks=4),)

CASES = (
    write_case("llama-3-8b B=8 T=1", LLAMA_3_8B, 8, 1, 2048),
    write_case("llama-3-8b B=8 T=64", LLAMA_3_8B, 8, 64, 2048),
    write_case("llama-2-7b B=1 T=64", LLAMA_2_7B, 1, 64, 2048),
    write_case("llama-2-7b B=1 T=512", LLAMA_2_7B, 1, 512, 2048),
    write_case("llama-3-8b B=4 T=16 ring of 1040 sinks=4", LLAMA_3_8B, 4, 16, 1040, num_sinks=4),
)
