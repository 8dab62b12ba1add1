"""Real-size uses of ring_decode: windows of published models, and StreamingLLM's sinks."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.flash_decode.cases import GEMMA_2_9B, LLAMA_2_7B, LLAMA_3_8B, MISTRAL_7B, decode_case
from pallas_kernels.ring_decode.op import ring_decode
from pallas_kernels.ring_decode.reference import reference_ring


def ring_case(
    name: str,
    heads: tuple[int, int, int],
    batch: int,
    tokens: int,
    window: int,
    slots: int,
    num_sinks: int = 0,
    **options: Any,
) -> Case:
    """Describe a step of rows that have gone around the ring many times; sinks use their own query."""
    case = decode_case("ring_decode", ring_decode, name, heads, [window + num_sinks] * batch, tokens, slots, **options)
    query, *cache, layer, _ = case.arguments
    # Rows differ in the position of the ring's oldest slot.
    starts = 10 * slots + np.arange(batch, dtype=np.int32) * (slots // batch)
    sink_query = (query,) if num_sinks else ()
    function = functools.partial(
        _call, window=window, num_sinks=num_sinks, num_kv_heads=heads[1], lane_parts=1, **options
    )
    arguments = (query, *cache, layer, starts, *sink_query)
    reference = functools.partial(_reference, window=window, num_sinks=num_sinks, **options)
    return dataclasses.replace(case, function=function, arguments=arguments, reference=reference)


def _call(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array,
    sink_query_BTNH: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    return ring_decode(query_BTNH, keys_LBSF, values_LBSF, layer, start_B, None, sink_query_BTNH, **options)


def _reference(
    query_BTNH: jax.Array,
    keys_LBSF: jax.Array,
    values_LBSF: jax.Array,
    layer: jax.Array,
    start_B: jax.Array,
    sink_query_BTNH: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    return reference_ring(query_BTNH, keys_LBSF, values_LBSF, layer, start_B, None, sink_query_BTNH, **options)


TOY_CASES = (ring_case("toy T=2 window=150 sinks=4", (4, 2, 64), 2, 2, 150, 256, 4),)

CASES = (
    ring_case("llama-3-8b B=8 T=1 window=1020 sinks=4", LLAMA_3_8B, 8, 1, 1020, 1040, 4),
    ring_case("mistral-7b B=4 T=1 window=4096", MISTRAL_7B, 4, 1, 4096, 4112),
    ring_case("mistral-7b B=1 T=8 window=4096", MISTRAL_7B, 1, 8, 4096, 4112),
    ring_case("gemma-2-9b B=4 T=1 window=4096", GEMMA_2_9B, 4, 1, 4096, 4112, softcap=50.0, scale=0.0625),
    ring_case("llama-2-7b B=1 T=1 window=2044 sinks=4", LLAMA_2_7B, 1, 1, 2044, 2064, 4),
)
