"""tree_verify against its reference, in interpret mode, and compiled for TPUs."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_decode.cases import (
    GEMMA_2_9B,
    GPT_OSS,
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    SMOLLM2_135M,
    decode_case,
)
from pallas_kernels.flash_decode.reference import reference_attention
from pallas_kernels.random_inputs import random_trees
from pallas_kernels.tree_verify.op import tree_verify
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
    """The static facts of a call: heads N over K of size H, M nodes, S slots."""

    heads: tuple[int, int, int]
    nodes: int
    slots: int
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


# Several blocks of rows, and trees over two blocks with a window shorter than their paths.
ORDINARY = (Layout((4, 1, 64), 64, 272, softcap=2.0), Layout((2, 2, 64), 40, 304, window=5, sinks=True))
# The third has several blocks of rows, the fourth a window shorter than its paths, the fifth trees over two blocks.
LAYOUTS = (
    ORDINARY[0],
    Layout((4, 2, 128), 16, 384),
    Layout((8, 2, 64), 64, 272, softcap=2.0),
    Layout((2, 2, 64), 40, 384, window=5),
    Layout((4, 1, 128), 128, 400, dtype="bfloat16"),
    Layout((6, 2, 96), 3, 256, dtype="bfloat16", window=128),
)
ROWS = 2


@functools.cache
def programs(layout: Layout):
    options = {"window": layout.window, "softcap": layout.softcap, **sinks_of(layout.heads[0], layout.sinks)}
    return (
        jax.jit(functools.partial(tree_verify, **options, block_slots=128, lane_parts=1, interpret=True)),
        jax.jit(functools.partial(reference_attention, **options)),
    )


def inputs(layout: Layout, starts: list[int], seed: int):
    """Return all arguments, in an order of slots of which nothing past the nodes is a number."""
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, head_dim = layout.heads
    query = random_array(rng, (ROWS, layout.nodes, num_heads, head_dim), layout.dtype)
    shape = (2, ROWS, layout.slots, kv_heads * head_dim)
    held = (random_array(rng, shape, layout.dtype) for _ in range(2))
    trees = np.asarray(random_trees(rng, ROWS, layout.nodes))
    ends = np.array(starts) + layout.nodes
    return query, *(poisoned_after(buffer, ends) for buffer in held), np.int32(1), np.array(starts, np.int32), trees


@st.composite
def calls(draw, layouts: tuple[Layout, ...] = LAYOUTS) -> tuple[Layout, list[int], int]:
    layout = draw(st.sampled_from(layouts))
    last = layout.slots - layout.nodes
    edges = {0, 1, 127 - layout.nodes, 128 - layout.nodes, 129 - layout.nodes, 127, 128, last - 1, last}
    start = st.one_of(st.sampled_from(sorted(edge for edge in edges if 0 <= edge <= last)), st.integers(0, last))
    return layout, draw(st.lists(start, min_size=ROWS, max_size=ROWS)), draw(st.integers(0, 1 << 16))


@settings(derandomize=True, max_examples=6, deadline=None)
@given(calls(ORDINARY))
@example((ORDINARY[0], [208, 64], 1))
@example((ORDINARY[1], [100, 264], 2))
def test_agrees_with_the_reference(call):
    """For any trees at any lengths, with slots past them poisoned."""
    check(*call)


@pytest.mark.exhaustive
@settings(derandomize=True, max_examples=8, deadline=None)
@given(calls())
@example((LAYOUTS[1], [0, 120], 0))
@example((LAYOUTS[2], [208, 64], 1))
@example((LAYOUTS[3], [100, 344], 2))
@example((LAYOUTS[4], [0, 200], 3))
@example((LAYOUTS[5], [253, 127], 4))
def test_agrees_with_the_reference_in_all_layouts(call):
    check(*call)


def check(layout: Layout, starts: list[int], seed: int) -> None:
    kernel, reference = programs(layout)
    arguments = inputs(layout, starts, seed)
    assert relative_error(kernel(*arguments), reference(*arguments)) < TOLERANCE[layout.dtype]


@pytest.mark.slow
def test_no_tree_is_a_chain_and_one_tree_serves_all_rows():
    layout = LAYOUTS[0]
    *arguments, trees = inputs(layout, [100, 200], 0)
    kernel, _ = programs(layout)
    chain = np.tri(layout.nodes, dtype=bool)[None]
    found = kernel(*arguments, chain)
    assert relative_error(kernel(*arguments), found) < 1e-6
    assert relative_error(kernel(*arguments, np.repeat(chain, ROWS, axis=0)), found) < 1e-6
    assert relative_error(kernel(*arguments, trees), found) > 1e-2


@pytest.mark.slow
def test_no_two_accesses_race():
    """Memory that nothing has been written to is not a number, and copies are checked to be waited for."""
    layout = Layout((2, 2, 64), 24, 272)
    arguments = inputs(layout, [110, 248], 0)
    options = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    try:
        found = jax.jit(functools.partial(tree_verify, block_slots=128, lane_parts=1, interpret=options))(*arguments)
        assert relative_error(found, jax.jit(reference_attention)(*arguments)) < TOLERANCE["float32"]
        assert_no_races()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_what_does_not_fit_is_refused_by_value():
    cache = jnp.zeros((1, 1, 256, 128))
    for nodes, tree, reason in ((129, 129, "1 to 128 nodes, not 129"), (4, 5, r"ancestors \(1, 5, 5\)")):
        with pytest.raises(ValueError, match=reason):
            tree_verify(
                jnp.zeros((1, nodes, 2, 64)),
                cache,
                cache,
                0,
                jnp.zeros(1, jnp.int32),
                jnp.ones((1, tree, tree), bool),
            )


# A pairwise cover of chips, head layouts, slots and numbers of nodes.
COMPILED = (
    ("v5e", LLAMA_3_8B, 8192, 64, {}, "bfloat16"),
    ("v5e", LLAMA_3_70B, 2048, 128, {}, "bfloat16"),
    ("v6e", LLAMA_2_7B, 8192, 26, {}, "bfloat16"),
    ("v6e", SMOLLM2_135M, 2048, 16, {}, "float32"),
    ("v5p", GEMMA_2_9B, 32768, 64, {"window": 4096, "softcap": 50.0}, "bfloat16"),
    ("tpu7x", LLAMA_3_8B, 8192, 64, {}, "bfloat16"),
    ("tpu7x", LLAMA_3_8B, 32768, 128, {}, "bfloat16"),
    ("v5e", GPT_OSS, 8192, 128, sinks_of(64, True), "bfloat16"),
)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "case",
    first_is_ordinary(COMPILED, pytest.mark.exhaustive),
    ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[3]}",
)
def test_compiles_without_a_copy_of_the_cache(case):
    """Besides the cache, less is needed than a layer's slice of it would take."""
    chip, heads, slots, nodes, options, dtype = case
    described = decode_case(
        "tree_verify", tree_verify, "", heads, [slots - nodes] * 4, nodes, slots, ancestors=True, dtype=dtype, **options
    )
    needed, _ = compile_for(chip, described.function, described.arguments)
    layer_bytes = np.prod(described.arguments[1].shape[1:]) * jnp.dtype(dtype).itemsize
    query_bytes = np.prod(described.arguments[0].shape) * jnp.dtype(dtype).itemsize
    assert needed < 0.2 * layer_bytes + 8 * query_bytes + (1 << 20)
