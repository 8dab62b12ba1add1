"""paged_prefill against its reference, in interpret mode, and compiled for TPUs."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.flash_decode.cases import LLAMA_3_8B, LLAMA_3_70B
from pallas_kernels.paged_prefill.cases import chunk_case
from pallas_kernels.paged_prefill.op import paged_prefill
from pallas_kernels.paged_prefill.reference import reference_chunk
from tests.pallas_kernels.cached_attention import TOLERANCE, random_array, relative_error, sinks_of
from tests.pallas_kernels.tpu_programs import compile_for


@dataclass(frozen=True)
class Layout:
    """The static facts of a call: heads N over K of size H, T tokens in blocks of Q, X pages a row of Z slots."""

    heads: tuple[int, int, int]
    tokens: int
    block_q: int
    page_size: int
    row_pages: int
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    lanes: int | None = None
    sinks: bool = False

    @property
    def slots(self) -> int:
        return self.page_size * self.row_pages


# The tokens are no whole number of blocks, and more rows than are computed together.
ORDINARY = (Layout((8, 2, 64), 40, 24, 16, 18, window=70), Layout((4, 1, 128), 48, 48, 64, 3, softcap=2.0, sinks=True))
LAYOUTS = (
    *ORDINARY,
    Layout((2, 2, 64), 16, 16, 16, 1),
    Layout((8, 1, 128), 130, 64, 128, 2, dtype="bfloat16"),
    Layout((9, 3, 64), 64, 32, 32, 9, lanes=256, window=8),
    Layout((4, 4, 128), 20, 128, 64, 3, window=200),
)
ROWS = 2
POOL = 40
HOLE = -(1 << 20)


@functools.cache
def programs(layout: Layout):
    options = {"window": layout.window, "softcap": layout.softcap, "num_kv_heads": layout.heads[1]}
    options |= sinks_of(layout.heads[0], layout.sinks)
    blocks = {"block_q": layout.block_q, "block_slots": 128}
    return (
        jax.jit(functools.partial(paged_prefill, **options, **blocks, interpret=True)),
        jax.jit(functools.partial(reference_chunk, **options)),
    )


def inputs(layout: Layout, starts: list[int], lengths: list[int], seed: int):
    """Return all arguments: rows have the pages of their real tokens, and look at page 0 past them.

    Of the last real token on, and outside all windows, nothing is a number.
    """
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, head_dim = layout.heads
    lanes = layout.lanes or kv_heads * head_dim
    pools = [random_array(rng, (2, POOL, layout.page_size, lanes), layout.dtype) for _ in range(2)]
    table = 1 + rng.permutation(POOL - 1)[: ROWS * layout.row_pages].reshape(ROWS, -1).astype(np.int32)
    page = np.arange(layout.row_pages)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        oldest = 0 if layout.window is None else max(0, start - layout.window + 1)
        is_needed = (page * layout.page_size < start + length) & ((page + 1) * layout.page_size > oldest)
        table[row, ~is_needed] = 0
    for pool in pools:
        pool[..., kv_heads * head_dim :] = 0
    query = random_array(rng, (ROWS, layout.tokens, num_heads, head_dim), layout.dtype)
    return query, *pools, np.int32(1), table, np.array(starts, np.int32), np.array(lengths, np.int32)


@st.composite
def calls(draw, layouts: tuple[Layout, ...] = LAYOUTS) -> tuple[Layout, list[int], list[int], int]:
    layout = draw(st.sampled_from(layouts))
    last = layout.slots - layout.tokens
    if last < 0:
        return layout, [0] * ROWS, [1, draw(st.integers(0, layout.slots))], 0
    edges = {0, 1, last, *(at + step for at in (layout.page_size, 128) for step in (-1, 0, 1))}
    start = st.one_of(st.sampled_from(sorted(edge for edge in edges if 0 <= edge <= last)), st.integers(0, last))
    length = st.one_of(st.just(layout.tokens), st.integers(0, layout.tokens))
    starts = draw(st.lists(start, min_size=ROWS, max_size=ROWS))
    return layout, starts, [max(draw(length), 1), draw(length)], draw(st.integers(0, 1 << 16))


@settings(derandomize=True, max_examples=4, deadline=None)
@given(calls(ORDINARY))
@example((ORDINARY[0], [127, 248], [40, 25], 0))
@example((ORDINARY[1], [0, 144], [48, 0], 1))
def test_agrees_with_the_reference(call):
    """At any starts and lengths, with tables of holes."""
    check(*call)


@pytest.mark.exhaustive
@settings(derandomize=True, max_examples=8, deadline=None)
@given(calls())
@example((LAYOUTS[2], [0, 0], [16, 3], 0))
@example((LAYOUTS[3], [126, 0], [130, 129], 1))
@example((LAYOUTS[4], [200, 224], [64, 33], 2))
@example((LAYOUTS[5], [172, 120], [20, 1], 3))
def test_agrees_with_the_reference_in_all_layouts(call):
    check(*call)


def check(layout: Layout, starts: list[int], lengths: list[int], seed: int) -> None:
    kernel, reference = programs(layout)
    arguments = inputs(layout, starts, lengths, seed)
    assert relative_error(kernel(*arguments), reference(*arguments)) < TOLERANCE[layout.dtype]


@pytest.mark.exhaustive
def test_without_lengths_all_tokens_are_real_in_blocks_of_any_size():
    layout = ORDINARY[0]
    arguments = inputs(layout, [100, 200], [40, 40], 0)
    options = {"num_kv_heads": 2, "window": 70, "block_slots": 128, "interpret": True}
    found = jax.jit(functools.partial(paged_prefill, **options, block_q=40))(*arguments[:-1])
    assert relative_error(found, programs(layout)[1](*arguments)) < TOLERANCE["float32"]


def test_what_does_not_fit_is_refused_by_value():
    pool, query = jnp.zeros((1, 4, 24, 128)), jnp.zeros((1, 20, 2, 128))
    with pytest.raises(ValueError, match="paged_prefill: pages of 24 slots"):
        paged_prefill(query, pool, pool, 0, jnp.zeros((1, 3), jnp.int32), jnp.zeros(1, jnp.int32), interpret=True)


COMPILED = (
    ("v5e", LLAMA_3_8B, 128, 4096, 128),
    ("v5e", LLAMA_3_8B, 512, 16384, 128),
    ("tpu7x", LLAMA_3_70B, 256, 8192, 16),
)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=pytest.mark.exhaustive if at else pytest.mark.slow) for at, each in enumerate(COMPILED)],
    ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}",
)
def test_compiles_without_a_copy_of_the_pages(case):
    """Besides the pool, less is needed than a layer of it and four times the queries would take."""
    chip, heads, tokens, slots, page_size = case
    described = chunk_case("", heads, tokens, slots, page_size)
    needed, _ = compile_for(chip, described.function, described.arguments)
    query, pool = described.arguments[:2]
    assert needed < 0.5 * 2 * np.prod(pool.shape[1:]) + 4 * 2 * np.prod(query.shape)
