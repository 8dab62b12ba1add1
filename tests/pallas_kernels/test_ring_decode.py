"""ring_decode against its reference, in interpret mode, and compiled for TPUs."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_decode.cases import GEMMA_2_9B, GPT_OSS, LLAMA_2_7B, LLAMA_3_70B, MISTRAL_7B
from pallas_kernels.random_inputs import random_trees
from pallas_kernels.ring_decode.cases import ring_case
from pallas_kernels.ring_decode.op import ring_decode
from pallas_kernels.ring_decode.reference import reference_ring
from tests.pallas_kernels.cached_attention import (
    TOLERANCE,
    assert_no_races,
    poisoned_after,
    random_array,
    relative_error,
    sinks_of,
)
from tests.pallas_kernels.tpu_programs import compile_for, first_is_ordinary


@dataclass(frozen=True)
class Layout:
    """The static facts of a call: heads N over K of size H, T tokens, S slots."""

    heads: tuple[int, int, int]
    tokens: int
    slots: int
    window: int
    num_sinks: int = 0
    dtype: str = "float32"
    softcap: float | None = None
    sinks: bool = False


ORDINARY = (
    Layout((4, 2, 64), 1, 144, window=140),
    Layout((4, 1, 64), 8, 272, window=100, num_sinks=20, softcap=3.0, sinks=True),
)
LAYOUTS = (
    *ORDINARY,
    Layout((4, 2, 128), 1, 400, window=390),
    Layout((4, 4, 64), 8, 272, window=100, num_sinks=4),
    Layout((4, 1, 128), 24, 300, window=30, num_sinks=20, softcap=3.0),
    Layout((6, 2, 96), 3, 272, window=264, num_sinks=4, dtype="bfloat16"),
    Layout((2, 2, 64), 2, 80, window=60, num_sinks=1),
)
ROWS = 3


def options_of(layout: Layout) -> dict:
    rule = {"window": layout.window, "num_sinks": layout.num_sinks, "softcap": layout.softcap}
    return rule | sinks_of(layout.heads[0], layout.sinks)


@functools.cache
def programs(layout: Layout):
    options = options_of(layout)
    return (
        jax.jit(functools.partial(ring_decode, **options, block_slots=128, lane_parts=1, interpret=True)),
        jax.jit(functools.partial(reference_ring, **options)),
    )


def inputs(layout: Layout, starts: list[int], seed: int):
    """Return all arguments; slots that no token has been written to are not a number."""
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, head_dim = layout.heads
    query, sink_query = (random_array(rng, (ROWS, layout.tokens, num_heads, head_dim), layout.dtype) for _ in range(2))
    shape = (2, ROWS, layout.slots, kv_heads * head_dim)
    held = (random_array(rng, shape, layout.dtype) for _ in range(2))
    ends = np.minimum(np.array(starts) + layout.tokens, layout.slots)
    trees = np.asarray(random_trees(rng, ROWS, layout.tokens))
    keys, values = (poisoned_after(buffer, ends) for buffer in held)
    tail = (sink_query,) if layout.num_sinks else ()
    return query, keys, values, np.int32(1), np.array(starts, np.int32), trees, *tail


@st.composite
def calls(draw, layouts: tuple[Layout, ...] = LAYOUTS) -> tuple[Layout, list[int], int]:
    layout = draw(st.sampled_from(layouts))
    slots, tokens = layout.slots, layout.tokens
    near = [layout.num_sinks, layout.window, slots - tokens, slots, 2 * slots - layout.num_sinks, 128, slots + 128]
    edges = sorted({0, 1, *(at + step for at in near for step in (-1, 0, 1) if at + step >= 0)})
    start = st.one_of(st.sampled_from(edges), st.integers(0, 5 * slots))
    return layout, draw(st.lists(start, min_size=ROWS, max_size=ROWS)), draw(st.integers(0, 1 << 16))


@settings(derandomize=True, max_examples=8, deadline=None)
@given(calls(ORDINARY))
@example((ORDINARY[0], [0, 144, 1000], 0))
@example((ORDINARY[1], [10, 280, 777], 2))
def test_agrees_with_the_reference(call):
    """At any place around the ring, of chains and of trees; slots not written to are poisoned."""
    check(*call)


@pytest.mark.exhaustive
@settings(derandomize=True, max_examples=8, deadline=None)
@given(calls())
@example((LAYOUTS[2], [0, 400, 1000], 0))
@example((LAYOUTS[3], [0, 3, 2005], 1))
@example((LAYOUTS[4], [10, 280, 777], 2))
@example((LAYOUTS[5], [2, 269, 539], 3))
@example((LAYOUTS[6], [0, 79, 158], 4))
def test_agrees_with_the_reference_in_all_layouts(call):
    check(*call)


def check(layout: Layout, starts: list[int], seed: int) -> None:
    kernel, reference = programs(layout)
    arguments = inputs(layout, starts, seed)
    assert relative_error(kernel(*arguments), reference(*arguments)) < TOLERANCE[layout.dtype]


@pytest.mark.slow
def test_sinks_meet_their_own_query():
    layout = ORDINARY[1]
    kernel, _ = programs(layout)
    *arguments, sink_query = inputs(layout, [500, 600, 700], 0)
    assert relative_error(kernel(*arguments, sink_query), kernel(*arguments, arguments[0])) > 1e-2
    assert relative_error(kernel(*arguments, arguments[0]), kernel(*arguments)) < 1e-6


@pytest.mark.slow
def test_no_two_accesses_race():
    layout = ORDINARY[1]
    arguments = inputs(layout, [3, 268, 2005], 0)
    options = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    kernel = functools.partial(ring_decode, **options_of(layout), block_slots=128, lane_parts=1, interpret=options)
    try:
        found = jax.jit(kernel)(*arguments)
        assert relative_error(found, programs(layout)[1](*arguments)) < TOLERANCE["float32"]
        assert_no_races()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


REFUSED = {
    "tokens": ({"window": 100, "num_sinks": 4}, 40, "128 slots less 4 sinks do not hold window=100 and 40 new tokens"),
    "sinks": ({"window": 2, "num_sinks": 129}, 1, "0 to 128 sinks, not 129"),
    "query": ({"window": 100, "sink_query_BTNH": jnp.zeros((1, 2, 2, 64))}, 2, "num_sinks=0"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_value(case):
    options, tokens, reason = case
    cache = jnp.zeros((1, 1, 128, 128))
    with pytest.raises(ValueError, match=reason):
        ring_decode(jnp.zeros((1, tokens, 2, 64)), cache, cache, 0, jnp.zeros(1, jnp.int32), **options)


# A pairwise cover of chips, head layouts and windows.
COMPILED = (
    ("v5e", LLAMA_2_7B, 1, 2044, 2064, 4, {}),
    ("v6e", MISTRAL_7B, 8, 4096, 4112, 0, {}),
    ("v5p", LLAMA_3_70B, 4, 1020, 1040, 4, {}),
    ("tpu7x", GEMMA_2_9B, 1, 4096, 4112, 0, {"softcap": 50.0}),
    ("v5e", GPT_OSS, 1, 128, 144, 0, sinks_of(64, True)),
)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("case", first_is_ordinary(COMPILED), ids=lambda case: f"{case[0]}-{case[1]}-{case[4]}")
def test_compiles_without_a_copy_of_the_cache(case):
    """Besides the cache, less is needed than a layer's slice of it would take."""
    chip, heads, tokens, window, slots, sinks, options = case
    described = ring_case("", heads, 4, tokens, window, slots, sinks, **options)
    needed, _ = compile_for(chip, described.function, described.arguments)
    assert needed < 0.2 * np.prod(described.arguments[1].shape[1:]) * 2 + (1 << 20)
