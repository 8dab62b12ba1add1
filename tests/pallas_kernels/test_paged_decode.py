"""paged_decode against its reference, in interpret mode, and compiled for TPUs."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_decode.cases import GEMMA_2_9B, GPT_OSS, LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, MISTRAL_7B
from pallas_kernels.paged_decode.cases import paged_case
from pallas_kernels.paged_decode.op import paged_decode
from pallas_kernels.paged_decode.reference import reference_paged
from pallas_kernels.random_inputs import random_trees
from tests.pallas_kernels.cached_attention import (
    TOLERANCE,
    assert_no_races,
    random_array,
    random_rows,
    relative_error,
    sinks_of,
)
from tests.pallas_kernels.tpu_programs import compile_for, first_is_ordinary


@dataclass(frozen=True)
class Layout:
    """The static facts of a call: heads N over K of size H, T tokens, X pages a row of Z slots.

    ``is_tree`` draws a tree for each row; ``lanes`` are those of a slot, None for the heads' alone.
    """

    heads: tuple[int, int, int]
    tokens: int
    page_size: int
    row_pages: int
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    is_tree: bool = False
    lanes: int | None = None
    sinks: bool = False

    @property
    def slots(self) -> int:
        return self.page_size * self.row_pages


ORDINARY = (
    Layout((4, 2, 64), 2, 16, 18, window=70),
    # Two heads share a group of lanes, each with its own scales.
    Layout((2, 2, 64), 3, 32, 9, dtype="int8", softcap=3.0),
    # Trees over two blocks of rows and of slots, with a window shorter than their paths.
    Layout((8, 2, 128), 40, 64, 5, window=5, is_tree=True, sinks=True),
)
LAYOUTS = (
    *ORDINARY,
    Layout((2, 2, 128), 3, 32, 9, dtype="int8", softcap=3.0),
    Layout((4, 2, 128), 1, 16, 20),
    Layout((4, 4, 64), 8, 64, 5, dtype="int8", window=70),
    Layout((6, 2, 96), 2, 128, 3, dtype="bfloat16", window=200),
    Layout((8, 1, 64), 16, 64, 1, is_tree=True),
    Layout((4, 4, 128), 128, 128, 2, dtype="bfloat16", is_tree=True),
    Layout((9, 3, 64), 24, 16, 20, softcap=2.0, is_tree=True, lanes=256),
    Layout((4, 2, 64), 16, 32, 6, dtype="int8", window=40, is_tree=True),
    # Words of two heads: one block of rows, two whose masks are the same, and three that cut words in two.
    Layout((16, 2, 128), 8, 64, 5, dtype="bfloat16", sinks=True),
    Layout((16, 4, 128), 64, 64, 5, dtype="bfloat16", is_tree=True, window=9),
    Layout((16, 2, 128), 40, 32, 9, dtype="int8", is_tree=True, sinks=True),
)
ROWS = 3
POOL = 48
HOLE = -(1 << 20)


def options_of(layout: Layout) -> dict:
    rule = {"window": layout.window, "softcap": layout.softcap, "num_kv_heads": layout.heads[1]}
    return rule | sinks_of(layout.heads[0], layout.sinks)


@functools.cache
def programs(layout: Layout):
    """Return functions of a tree, None for a chain, and the arguments."""
    options = options_of(layout)
    kernel = functools.partial(paged_decode, **options, block_slots=128, interpret=True)
    return (
        jax.jit(lambda trees, *arguments: kernel(*arguments, ancestors_BTT=trees)),
        jax.jit(lambda trees, *arguments: reference_paged(*arguments, ancestors_BTT=trees, **options)),
    )


def trees_of(layout: Layout, seed: int):
    return np.asarray(random_trees(np.random.default_rng(seed), ROWS, layout.tokens)) if layout.is_tree else None


def inputs(layout: Layout, starts: list[int], seed: int):
    """Return all arguments: tables name pages more than once, and nothing that may not be looked at."""
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, head_dim = layout.heads
    in_bytes = layout.dtype == "int8"
    lanes = 128 * -(-kv_heads * (head_dim + 2) // 128) if in_bytes else layout.lanes or kv_heads * head_dim
    pool_shape = (2, POOL, layout.page_size, lanes)
    table = rng.integers(0, POOL, (ROWS, layout.row_pages)).astype(np.int32)
    page = np.arange(layout.row_pages)
    for row, start in enumerate(starts):
        oldest = 0 if layout.window is None else max(0, start - layout.window + 1)
        needed = (page * layout.page_size < start + layout.tokens) & ((page + 1) * layout.page_size > oldest)
        table[row, ~needed] = HOLE
    # A hole is clipped to page 0, which no row has: whoever looks at it finds what is not a number.
    table[table == 0] = 1
    if in_bytes:
        pools = [random_rows(rng, pool_shape, kv_heads, head_dim) for _ in range(2)]
        for pool in pools:
            pool[:, 0] = -1
    else:
        pools = [random_array(rng, pool_shape, layout.dtype) for _ in range(2)]
        for pool in pools:
            pool[:, 0] = np.nan
            pool[..., kv_heads * head_dim :] = 0
    dtype = "float32" if layout.dtype == "int8" else layout.dtype
    query = random_array(rng, (ROWS, layout.tokens, num_heads, head_dim), dtype)
    return query, *pools, np.int32(1), table, np.array(starts, np.int32)


@st.composite
def calls(draw, layouts: tuple[Layout, ...] = LAYOUTS) -> tuple[Layout, list[int], int]:
    layout = draw(st.sampled_from(layouts))
    last = layout.slots - layout.tokens
    near = (layout.page_size, 128 - layout.tokens, 128, layout.window or 256)
    edges = {0, 1, max(last - 1, 0), last, *(at + step for at in near for step in (-1, 0, 1))}
    start = st.one_of(st.sampled_from(sorted(edge for edge in edges if 0 <= edge <= last)), st.integers(0, last))
    return layout, draw(st.lists(start, min_size=ROWS, max_size=ROWS)), draw(st.integers(0, 1 << 16))


@settings(derandomize=True, max_examples=6, deadline=None)
@given(calls(ORDINARY))
@example((ORDINARY[0], [0, 127, 286], 0))
@example((ORDINARY[1], [0, 125, 285], 2))
@example((ORDINARY[2], [100, 0, 280], 4))
def test_agrees_with_the_reference(call):
    """At any lengths, with tables of holes and repeats."""
    check(*call)


@pytest.mark.exhaustive
@settings(derandomize=True, max_examples=8, deadline=None)
@given(calls())
@example((LAYOUTS[4], [0, 127, 319], 0))
@example((LAYOUTS[5], [0, 120, 312], 1))
@example((LAYOUTS[6], [0, 255, 382], 3))
@example((LAYOUTS[7], [0, 47, 48], 4))
@example((LAYOUTS[8], [0, 127, 128], 5))
@example((LAYOUTS[9], [103, 104, 296], 6))
@example((LAYOUTS[10], [30, 120, 176], 7))
@example((LAYOUTS[11], [0, 120, 312], 8))
@example((LAYOUTS[12], [64, 0, 256], 9))
@example((LAYOUTS[13], [100, 0, 248], 10))
def test_agrees_with_the_reference_in_all_layouts(call):
    check(*call)


def check(layout: Layout, starts: list[int], seed: int) -> None:
    kernel, reference = programs(layout)
    arguments = trees_of(layout, seed), *inputs(layout, starts, seed)
    assert relative_error(kernel(*arguments), reference(*arguments)) < TOLERANCE[str(arguments[1].dtype)]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(ORDINARY[0], marks=pytest.mark.exhaustive), pytest.param(ORDINARY[1], marks=pytest.mark.slow)],
    ids=["float32", "int8"],
)
def test_no_two_accesses_race(layout):
    """Memory that nothing has been copied to is not a number, and copies are checked to be waited for."""
    arguments = inputs(layout, [0, 127, 250], 0)
    options = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    kernel = functools.partial(paged_decode, **options_of(layout), block_slots=128, interpret=options)
    try:
        found = jax.jit(kernel)(*arguments)
        assert relative_error(found, programs(layout)[1](None, *arguments)) < TOLERANCE["float32"]
        assert_no_races()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


REFUSED = {
    "tokens": ({"tokens": 129}, "1 to 128 new tokens, not 129"),
    "tree": ({"trees": (2, 1, 1)}, r"ancestors \(2, 1, 1\) of 1 rows"),
    "page": ({"page_size": 24}, "pages of 24 slots"),
    "scales": ({"dtype": "int8"}, "rows of 128 bytes do not hold 1 heads of 128"),
    "rows": ({"rows": 2}, r"table \(2, 3\) and starts \(1,\) are not of 1 rows"),
    "window": ({"window": 0}, "window=0"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_value(case):
    changed, reason = case
    facts = {"tokens": 1, "page_size": 32, "dtype": "float32", "rows": 1, "window": None, "trees": None} | changed
    pool = jnp.zeros((1, 4, facts["page_size"], 128), facts["dtype"])
    query, table = jnp.zeros((1, facts["tokens"], 2, 128)), jnp.zeros((facts["rows"], 3), jnp.int32)
    options = {"window": facts["window"], "ancestors_BTT": facts["trees"] and jnp.ones(facts["trees"], bool)}
    with pytest.raises(ValueError, match=reason):
        paged_decode(query, pool, pool, 0, table, jnp.zeros(1, jnp.int32), **options, interpret=True)


# A pairwise cover of chips, head layouts, page sizes and dtypes.
COMPILED = (
    ("v5e", LLAMA_3_8B, 8, 8192, 16, "int8", {}),
    ("v5e", LLAMA_2_7B, 1, 2048, 16, "bfloat16", {}),
    ("v6e", LLAMA_3_70B, 4, 2048, 128, "int8", {}),
    ("v6e", GEMMA_2_9B, 1, 32768, 64, "float32", {"softcap": 50.0}),
    ("v5p", MISTRAL_7B, 1, 32768, 32, "bfloat16", {"window": 4096}),
    ("tpu7x", GEMMA_2_9B, 8, 8192, 32, "int8", {}),
    ("tpu7x", LLAMA_2_7B, 2, 2048, 128, "bfloat16", {}),
    ("v5e", GPT_OSS, 16, 8192, 64, "bfloat16", sinks_of(64, True)),
)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "case",
    first_is_ordinary(COMPILED),
    ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}-{case[4]}-{case[5]}",
)
def test_compiles_without_a_copy_of_the_pages(case):
    """Besides the pool, less is needed than a layer of it would take."""
    chip, heads, tokens, slots, page_size, dtype, options = case
    described = paged_case("", heads, 2, tokens, slots, page_size, dtype, **options)
    needed, _ = compile_for(chip, described.function, described.arguments)
    pool = described.arguments[1]
    assert needed < 0.5 * np.prod(pool.shape[1:]) * jnp.dtype(dtype).itemsize + (1 << 20)
