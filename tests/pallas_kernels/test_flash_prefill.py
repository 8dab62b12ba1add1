"""flash_prefill against its reference, forwards and backwards, in interpret mode, and compiled for TPUs."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_decode.cases import GPT_OSS
from pallas_kernels.flash_prefill.cases import (
    GEMMA_2_9B,
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    MISTRAL_7B,
    PHI_2,
    PHI_3_MINI,
    SMOLLM2_135M,
    prefill_case,
)
from pallas_kernels.flash_prefill.lane_windows import LaneWindows
from pallas_kernels.flash_prefill.op import attend_block, flash_prefill
from pallas_kernels.flash_prefill.reference import reference_prefill
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
    """The static facts of a call: heads N over K of size H, T tokens, S slots; ``from_zero`` is a prompt's start."""

    heads: tuple[int, int, int]
    tokens: int
    slots: int
    from_zero: bool = False
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    blocks: tuple[int, int, int] = (256, 128, 256)
    padding: int = 0
    sinks: bool = False


# A prompt and a chunk, with options and without, over the edges of blocks.
ORDINARY = (
    Layout((2, 1, 128), 300, 384, from_zero=True),
    Layout((4, 2, 64), 260, 520, window=150, softcap=5.0, scale=0.3, padding=128, sinks=True),
)
LAYOUTS = (
    *ORDINARY,
    Layout((4, 2, 128), 512, 512, from_zero=True),
    Layout((3, 1, 64), 400, 520, from_zero=True, window=150),
    Layout(
        (4, 2, 128),
        384,
        600,
        from_zero=True,
        dtype="bfloat16",
        window=300,
        softcap=5.0,
        scale=0.3,
        blocks=(512, 128, 512),
    ),
    Layout((2, 1, 256), 300, 700, softcap=5.0),
    Layout((9, 3, 64), 40, 500, dtype="bfloat16", padding=64),
    Layout((8, 8, 80), 260, 640, window=130),
    Layout((4, 4, 96), 130, 400, window=300, scale=0.2, blocks=(128, 256, 512)),
)
ROWS = 2
LAYERS = 2


def options(layout: Layout) -> dict:
    rule = {"window": layout.window, "softcap": layout.softcap, "scale": layout.scale}
    return rule | sinks_of(layout.heads[0], layout.sinks)


def kernel_options(layout: Layout, interpret=True) -> dict:
    blocks = dict(zip(("block_q", "block_k", "block_s"), layout.blocks))
    return options(layout) | blocks | {"num_kv_heads": layout.heads[1], "interpret": interpret}


@functools.cache
def programs(layout: Layout):
    return (
        jax.jit(functools.partial(flash_prefill, **kernel_options(layout))),
        jax.jit(functools.partial(reference_prefill, **options(layout))),
    )


def inputs(layout: Layout, starts: np.ndarray, lengths: np.ndarray, seed: int):
    """Return queries, and keys and values of which nothing past a row's tokens is a number."""
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, head_dim = layout.heads
    query = random_array(rng, (ROWS, layout.tokens, num_heads, head_dim), layout.dtype)
    shape = (LAYERS, ROWS, layout.slots, kv_heads * head_dim)
    return query, *(poisoned_after(random_array(rng, shape, layout.dtype), starts + lengths) for _ in range(2))


def padded(layout: Layout, cache: Any) -> Any:
    pad = np.pad if isinstance(cache, np.ndarray) else jnp.pad
    return pad(cache, ((0, 0), (0, 0), (0, 0), (0, layout.padding)))


def edges(last: int, blocks: tuple[int, ...]) -> list[int]:
    """Return the extremes up to ``last``, and what is at or beside the edge of a block."""
    near = (size * count + step for size in blocks for count in (1, 2) for step in (-1, 0, 1))
    return sorted({0, min(1, last), last, *(number for number in near if 0 <= number <= last)})


@st.composite
def calls(draw, layouts: tuple[Layout, ...] = LAYOUTS) -> tuple[Layout, list[int], list[int], int]:
    layout = draw(st.sampled_from(layouts))
    lengths = st.sampled_from(edges(layout.tokens, layout.blocks))
    starts = st.just(0) if layout.from_zero else st.sampled_from(edges(layout.slots - layout.tokens, layout.blocks))
    rows = [(draw(starts), draw(lengths)) for _ in range(ROWS)]
    return layout, [start for start, _ in rows], [length for _, length in rows], draw(st.integers(0, 1 << 16))


@settings(derandomize=True, max_examples=5, deadline=None)
@given(calls(ORDINARY))
@example((ORDINARY[0], [0, 0], [300, 257], 0))
@example((ORDINARY[1], [260, 127], [260, 130], 3))
def test_agrees_with_the_reference(call):
    """At any starts and lengths, with slots past them poisoned; tokens past a length give zeros."""
    check(*call)


@pytest.mark.exhaustive
@settings(derandomize=True, max_examples=8, deadline=None)
@given(calls())
@example((LAYOUTS[2], [0, 0], [512, 257], 0))
@example((LAYOUTS[3], [0, 0], [1, 400], 1))
@example((LAYOUTS[4], [0, 0], [384, 129], 2))
@example((LAYOUTS[5], [400, 127], [300, 130], 3))
@example((LAYOUTS[6], [460, 0], [40, 1], 4))
@example((LAYOUTS[7], [380, 255], [260, 0], 5))
@example((LAYOUTS[8], [270, 1], [130, 129], 6))
def test_agrees_with_the_reference_in_all_layouts(call):
    check(*call)


def check(layout: Layout, starts: list[int], lengths: list[int], seed: int) -> None:
    kernel, reference = programs(layout)
    query, *cache = inputs(layout, np.array(starts), np.array(lengths), seed)
    where = (np.int32(1), None if layout.from_zero else np.array(starts, np.int32), np.array(lengths, np.int32))
    found = kernel(query, *(padded(layout, buffer) for buffer in cache), *where)
    expected = reference(query, *cache, *where)
    assert found.dtype == query.dtype
    for row, length in enumerate(lengths):
        assert not np.any(np.asarray(found[row])[length:])
    if any(lengths):
        assert relative_error(found, expected) < TOLERANCE[layout.dtype]


@pytest.mark.slow
def test_a_prompt_is_a_chunk_from_slot_zero():
    layout = ORDINARY[0]
    lengths = np.array([300, 130], np.int32)
    arguments = (*inputs(layout, np.zeros(ROWS, int), lengths, 0), np.int32(0))
    kernel, _ = programs(layout)
    known = kernel(*arguments, None, lengths)
    assert relative_error(kernel(*arguments, np.zeros(ROWS, np.int32), lengths), known) < 1e-6


def test_starts_and_lengths_are_clipped_to_the_cache():
    layout = ORDINARY[1]
    query, *cache = inputs(layout, np.zeros(ROWS, int), np.full(ROWS, layout.slots), 0)
    arguments = query, *(padded(layout, buffer) for buffer in cache), np.int32(0)
    kernel, _ = programs(layout)
    found = kernel(*arguments, np.array([-3, 400], np.int32), np.array([400, 400], np.int32))
    expected = kernel(*arguments, np.array([0, 400], np.int32), np.array([260, 120], np.int32))
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found).all()


DIFFERENTIATED = (
    Layout((4, 2, 128), 256, 256, from_zero=True, blocks=(128, 128, 128)),
    Layout((4, 2, 64), 130, 300, window=100, softcap=4.0, scale=0.3, blocks=(128, 128, 256), padding=128, sinks=True),
    Layout((8, 8, 80), 140, 200, from_zero=True, window=90, dtype="bfloat16", blocks=(128, 128, 128)),
)


@pytest.mark.parametrize(
    ("distance", "window"),
    [(128, 200), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((0, None), (384, None)))],
)
def test_a_block_far_behind_sees_all_that_a_window_leaves(distance, window):
    """Blocks of 128 and 384 tokens; means and log-sum-exp, or so low a sum that it counts for nothing."""
    rng = np.random.default_rng(5)
    query, keys, values = (
        rng.normal(size=(2, tokens, heads, 64)).astype(np.float32) for tokens, heads in ((128, 4), (384, 2), (384, 2))
    )
    flat = [held.reshape(2, 384, -1) for held in (keys, values)]
    attend = jax.jit(functools.partial(attend_block, num_kv_heads=2, window=window, interpret=True))
    # With a window also from where some queries see nothing, and all.
    for far in (distance, *((384, 768) if window else ())):
        found, sums = map(np.asarray, attend(query, *flat, np.int32(far)))
        scores = np.einsum("btkgh,bskh->bkgts", query.reshape(2, 128, 2, 2, 64), keys, dtype=np.float64) / 8
        ahead = far + np.arange(128)[:, None] - np.arange(384)
        sees = (ahead >= 0) & (ahead < (window or 10**6))
        is_seen = sees.any(axis=1)
        weights = np.where(sees, np.exp(scores), 0)
        expected_sums = np.moveaxis(np.log(weights[..., is_seen, :].sum(axis=-1)).reshape(2, 4, -1), 1, 2)
        np.testing.assert_allclose(sums[:, is_seen], expected_sums, atol=1e-5)
        assert (sums[:, ~is_seen] < -1e6).all()
        means = weights[..., is_seen, :] / weights[..., is_seen, :].sum(axis=-1, keepdims=True)
        expected = np.einsum("bkgts,bskh->btkgh", means, values).reshape(2, -1, 4, 64)
        np.testing.assert_allclose(found[:, is_seen], expected, atol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [DIFFERENTIATED[1], *(pytest.param(DIFFERENTIATED[at], marks=pytest.mark.exhaustive) for at in (0, 2))],
    ids=str,
)
def test_gradients_are_those_of_the_reference(layout):
    """In queries, keys, values and sinks, under a random cotangent, with a row that is not full and poison past it."""
    starts = np.zeros(ROWS, int) if layout.from_zero else np.array([37, 128])
    lengths = np.array([layout.tokens, layout.tokens - 3])
    arguments = inputs(layout, starts, lengths, 0)
    where = (np.int32(1), None if layout.from_zero else starts.astype(np.int32), lengths.astype(np.int32))
    cotangent = random_array(np.random.default_rng(1), arguments[0].shape, "float32")
    kernel, reference = programs(layout)

    sinks = sinks_of(layout.heads[0], layout.sinks)

    def gradients(function, padding):
        def total(query, keys, values, sinks):
            return jnp.sum(function(query, padding(keys), padding(values), *where, **sinks) * cotangent)

        return jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(*arguments, sinks))

    expected_gradients = gradients(reference, lambda buffer: buffer)
    for found, expected in zip(gradients(kernel, functools.partial(padded, layout)), expected_gradients):
        assert found.dtype == expected.dtype
        assert np.any(expected)
        assert relative_error(found, expected) < TOLERANCE[layout.dtype]


@pytest.mark.slow
def test_no_two_accesses_race():
    """Memory that nothing has been written to is not a number, and copies are checked to be waited for."""
    layout = Layout((2, 1, 128), 256, 500, window=140, blocks=(128, 128, 256))
    starts, lengths = np.array([0, 127]), np.array([130, 256])
    arguments = (*inputs(layout, starts, lengths, 0), np.int32(1), starts.astype(np.int32), lengths.astype(np.int32))
    interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    try:
        found = jax.jit(functools.partial(flash_prefill, **kernel_options(layout, interpret)))(*arguments)
        assert relative_error(found, programs(layout)[1](*arguments)) < TOLERANCE["float32"]
        assert_no_races()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    "layout", [(8, 80, 640), (4, 96, 384), (2, 64, 128), (3, 64, 256), (1, 80, 128), (4, 192, 768)]
)
def test_every_head_lies_inside_its_window(layout):
    num_kv_heads, head_dim, lanes = layout
    windows = LaneWindows(head_dim, lanes)
    for head in range(num_kv_heads):
        blocks = [int(windows.block_index(jnp.int32(head), part)) for part in range(windows.parts)]
        first, last = blocks[0] * windows.block_lanes, (blocks[-1] + 1) * windows.block_lanes
        assert blocks == list(range(blocks[0], blocks[0] + windows.parts))
        assert 0 <= first <= head * head_dim
        assert (head + 1) * head_dim <= last <= lanes


REFUSED = {
    "rank": (((1, 64, 256), (1, 1, 128, 256), {}), r"queries \(1, 64, 256\) must be"),
    "heads": (((1, 64, 3, 64), (1, 1, 128, 128), {}), "3 heads of 64 cannot share 2"),
    "lanes": (((1, 64, 4, 64), (1, 1, 128, 192), {"num_kv_heads": 4}), "cannot share 4 in slots of 192"),
    "rows": (((2, 64, 2, 64), (1, 1, 128, 128), {}), "2 rows of 64 tokens do not fit"),
    "slots": (((1, 200, 2, 64), (1, 1, 128, 128), {}), "1 rows of 200 tokens do not fit"),
    "window": (((1, 64, 2, 64), (1, 1, 128, 128), {"window": 0}), "window=0"),
    "softcap": (((1, 64, 2, 64), (1, 1, 128, 128), {"softcap": 0.0}), "softcap=0.0"),
    "scale": (((1, 64, 2, 64), (1, 1, 128, 128), {"scale": -1.0}), "scale=-1.0"),
    "block": (((1, 64, 2, 64), (1, 1, 128, 128), {"block_k": 200}), "block_k=200"),
    "starts": (((1, 64, 2, 64), (1, 1, 128, 128), {"start_B": jnp.zeros(2, jnp.int32)}), r"starts \(2,\)"),
    "lengths": (((1, 64, 2, 64), (1, 1, 128, 128), {"length_B": jnp.zeros(2, jnp.int32)}), r"lengths \(2,\)"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_value(case):
    (query, cache, given_options), reason = case
    blocks = {"block_q": 128, "block_k": 128, "block_s": 128}
    with pytest.raises(ValueError, match=reason):
        flash_prefill(
            *(jnp.zeros(shape) for shape in (query, cache, cache)),
            **(blocks | given_options),
            interpret=True,
        )


def test_dtypes_that_do_not_go_together_are_refused():
    cache = jnp.zeros((1, 1, 128, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="queries are float32, the cache bfloat16"):
        flash_prefill(jnp.zeros((1, 64, 2, 64)), cache, cache, interpret=True)


# A pairwise cover of chips, head layouts, slots, starts and dtypes; the first has all options.
COMPILED = (
    ("v5e", GEMMA_2_9B, 8192, 8192, {"window": 4096, "softcap": 50.0, "scale": 0.0625}, "bfloat16"),
    ("v5e", LLAMA_2_7B, 2048, 2048, {}, "bfloat16"),
    ("v5e", PHI_2, 512, 2048, {"start": 1000}, "bfloat16"),
    ("v6e", MISTRAL_7B, 2048, 32768, {"start": 30720, "window": 4096}, "bfloat16"),
    ("v6e", LLAMA_3_70B, 2048, 2048, {}, "float32"),
    ("v6e", PHI_3_MINI, 2000, 2048, {}, "bfloat16"),
    ("v5p", LLAMA_3_70B, 512, 8192, {"start": 7000}, "bfloat16"),
    ("v5p", SMOLLM2_135M, 2048, 32768, {}, "bfloat16"),
    ("tpu7x", LLAMA_3_8B, 8192, 8192, {}, "bfloat16"),
    ("tpu7x", GEMMA_2_9B, 512, 32768, {"start": 32000, "softcap": 50.0}, "float32"),
    ("tpu7x", LLAMA_2_7B, 40, 2048, {"start": 100}, "bfloat16"),
    ("v5e", GPT_OSS, 2048, 8192, {"start": 3000, "window": 128, **sinks_of(64, True)}, "bfloat16"),
)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "case",
    first_is_ordinary(COMPILED, pytest.mark.exhaustive),
    ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[3]}-{case[5]}",
)
def test_compiles_without_a_copy_of_the_cache(case):
    """The whole stacked cache goes in, and what is needed besides is the output, and room to move narrow heads."""
    chip, heads, tokens, slots, given_options, dtype = case
    described = prefill_case("", heads, tokens, slots, dtype=dtype, layers=16, **given_options)
    needed, _ = compile_for(chip, described.function, described.arguments)
    lanes = heads[0] * LaneWindows(heads[2], described.arguments[1].shape[3]).width
    rows = -(-tokens // 128) * 128
    copies = 1 if heads[2] % 128 == 0 and rows == tokens else 6
    assert needed < copies * rows * lanes * jnp.dtype(dtype).itemsize + (1 << 20)
