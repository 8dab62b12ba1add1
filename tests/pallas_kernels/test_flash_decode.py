"""flash_decode against its reference, in interpret mode, and compiled for TPUs."""

import functools
from dataclasses import dataclass, replace

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
    LLAMA_3_70B,
    MISTRAL_7B,
    PHI_2,
    SMOLLM2_135M,
    decode_case,
)
from pallas_kernels.flash_decode.op import flash_decode
from pallas_kernels.flash_decode.reference import reference_attention
from tests.pallas_kernels.cached_attention import (
    TOLERANCE,
    assert_no_races,
    poisoned_after,
    random_array,
    random_rows,
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
    dtype: str = "float32"
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    block_slots: int = 128
    lane_parts: int = 1
    padding: int = 0
    sinks: bool = False


# Without any option; then with all of them.
ORDINARY = (
    Layout((8, 2, 128), 1, 384),
    Layout((4, 2, 64), 3, 304, window=140, softcap=3.0, scale=0.3, padding=64, sinks=True),
    # Two heads share a group of lanes, each with its own scales.
    Layout((4, 2, 64), 2, 304, dtype="int8", padding=128),
)
LAYOUTS = (
    *ORDINARY,
    Layout((4, 4, 64), 8, 400, window=20),
    Layout((4, 2, 256), 3, 304, softcap=3.0, scale=0.3),
    Layout((9, 3, 64), 2, 272, dtype="bfloat16", padding=64),
    Layout((8, 8, 80), 1, 96, dtype="bfloat16", window=70),
    Layout((4, 4, 96), 5, 512, block_slots=256, window=130),
)
ROWS = 3
LAYERS = 2


@functools.cache
def programs(layout: Layout):
    options = {"window": layout.window, "softcap": layout.softcap, "scale": layout.scale}
    options |= {"num_kv_heads": layout.heads[1], **sinks_of(layout.heads[0], layout.sinks)}
    blocks = {"block_slots": layout.block_slots, "lane_parts": layout.lane_parts, "interpret": True}
    return (
        jax.jit(functools.partial(flash_decode, **options, **blocks)),
        jax.jit(functools.partial(reference_attention, **options)),
    )


def inputs(layout: Layout, starts: np.ndarray, seed: int):
    """Return query, keys and values of which nothing past the new tokens is a number."""
    rng = np.random.default_rng(seed)
    num_heads, kv_heads, head_dim = layout.heads
    in_bytes = layout.dtype == "int8"
    query_dtype = "float32" if in_bytes else layout.dtype
    query = random_array(rng, (len(starts), layout.tokens, num_heads, head_dim), query_dtype)
    shape = (LAYERS, len(starts), layout.slots, kv_heads * head_dim)
    lanes = ((0, 0), (0, 0), (0, 0), (0, layout.padding))
    if in_bytes:
        shape = (*shape[:3], shape[3] + layout.padding)
        held = [random_rows(rng, shape, kv_heads, head_dim) for _ in range(2)]
    else:
        held = [np.pad(random_array(rng, shape, layout.dtype), lanes) for _ in range(2)]
    return query, *(poisoned_after(buffer, starts + layout.tokens) for buffer in held)


def edges(layout: Layout) -> list[int]:
    """Return starts at which a row ends or begins with a block, or beside one, and the extremes."""
    block, last = layout.block_slots, layout.slots - layout.tokens
    near = (block * count + step - tokens for count in (1, 2) for step in (-1, 0, 1) for tokens in (0, layout.tokens))
    return sorted({0, 1, last - 1, last, *(start for start in near if 0 <= start <= last)})


@st.composite
def calls(draw, layouts: tuple[Layout, ...] = LAYOUTS) -> tuple[Layout, list[int], int]:
    layout = draw(st.sampled_from(layouts))
    start = st.one_of(st.sampled_from(edges(layout)), st.integers(0, layout.slots - layout.tokens))
    return layout, draw(st.lists(start, min_size=ROWS, max_size=ROWS)), draw(st.integers(0, 1 << 16))


@settings(derandomize=True, max_examples=8, deadline=None)
@given(calls(ORDINARY))
@example((ORDINARY[0], [0, 127, 383], 0))
@example((ORDINARY[1], [0, 126, 301], 2))
@example((ORDINARY[2], [0, 255, 302], 2))
def test_agrees_with_the_reference(call):
    """At any lengths, with slots past them poisoned."""
    check(*call)


@pytest.mark.exhaustive
@settings(derandomize=True, max_examples=3, deadline=None)
@given(calls())
@example((LAYOUTS[3], [0, 128, 392], 1))
@example((LAYOUTS[4], [0, 126, 301], 2))
@example((LAYOUTS[5], [0, 255, 270], 3))
@example((LAYOUTS[6], [0, 90, 95], 4))
@example((LAYOUTS[7], [0, 507, 254], 5))
def test_agrees_with_the_reference_in_all_layouts(call):
    check(*call)


def check(layout: Layout, starts: list[int], seed: int) -> None:
    kernel, reference = programs(layout)
    arguments = (*inputs(layout, np.array(starts), seed), np.int32(1), np.array(starts, np.int32))
    assert relative_error(kernel(*arguments), reference(*arguments)) < TOLERANCE[str(arguments[0].dtype)]


def test_starts_past_the_end_are_clipped_to_it():
    layout = LAYOUTS[0]
    arguments = inputs(layout, np.array([layout.slots] * ROWS), 0)
    kernel, _ = programs(layout)
    found = kernel(*arguments, np.int32(0), np.array([layout.slots, layout.slots + 5, 1 << 30], np.int32))
    expected = kernel(*arguments, np.int32(0), np.full(ROWS, layout.slots, np.int32))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, expected)


def test_the_scale_is_that_of_the_head_unless_given():
    """The reference has the scale of the head itself; what else is given, the layout with all options shows."""
    layout = LAYOUTS[0]
    arguments = (*inputs(layout, np.array([300] * ROWS), 0), np.int32(1), np.full(ROWS, 300, np.int32))
    default, given = (programs(replace(layout, scale=scale)) for scale in (None, 128**-0.5))
    assert relative_error(default[0](*arguments), given[1](*arguments)) < TOLERANCE["float32"]
    assert relative_error(default[1](*arguments), given[1](*arguments)) < 1e-6


def test_heads_split_over_cores_give_the_same():
    layout = LAYOUTS[0]
    arguments = (*inputs(layout, np.array([100, 0, 254]), 0), np.int32(1), np.array([100, 0, 254], np.int32))
    whole, split = (programs(replace(layout, lane_parts=parts))[0](*arguments) for parts in (1, 2))
    assert relative_error(split, whole) < 1e-6


@pytest.mark.slow
def test_no_two_accesses_race():
    """Memory that nothing has been written to is not a number, and copies are checked to be waited for."""
    layout = Layout((4, 2, 64), 2, 272, window=140)
    starts = np.array([0, 127, 270])
    arguments = (*inputs(layout, starts, 0), np.int32(1), starts.astype(np.int32))
    options = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    kernel = functools.partial(flash_decode, window=140, block_slots=128, lane_parts=1, interpret=options)
    try:
        found = jax.jit(kernel)(*arguments)
        expected = jax.jit(functools.partial(reference_attention, window=140))(*arguments)
        assert relative_error(found, expected) < TOLERANCE["float32"]
        assert_no_races()
    finally:
        pltpu.reset_tpu_interpret_mode_state()


REFUSED = {
    "tokens": (((1, 9, 4, 64), (1, 1, 128, 256), {}), "1 to 8 new tokens, not 9"),
    "heads": (((1, 1, 3, 64), (1, 1, 128, 128), {}), "3 heads of 64"),
    "rows": (((2, 1, 2, 64), (1, 1, 128, 128), {}), "2 rows of queries, 1 of cache"),
    "window": (((1, 1, 2, 64), (1, 1, 128, 128), {"window": 0}), "window=0"),
    "softcap": (((1, 1, 2, 64), (1, 1, 128, 128), {"softcap": 0.0}), "softcap=0.0"),
    "block": (((1, 1, 2, 64), (1, 1, 512, 128), {"block_slots": 200}), "block_slots=200"),
    "parts": (((1, 1, 2, 64), (1, 1, 128, 128), {"lane_parts": 2}), "lane_parts=2"),
    "sinks": (((1, 1, 2, 64), (1, 1, 128, 128), sinks_of(3, True)), r"sink logits \(3,\) are not .* of 2 heads"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_value(case):
    (query, cache, options), reason = case
    arguments = (
        jnp.zeros(query),
        jnp.zeros(cache),
        jnp.zeros(cache),
        0,
        jnp.zeros(query[0], jnp.int32),
    )
    with pytest.raises(ValueError, match=reason):
        flash_decode(*arguments, **({"block_slots": 128, "lane_parts": 1} | options), interpret=True)


# A pairwise cover of chips, head layouts, slots and options; the first has all options.
COMPILED = (
    ("v5e", GEMMA_2_9B, 8192, 8, {"window": 4096, "softcap": 50.0, "scale": 0.0625}, "bfloat16"),
    ("v5e", LLAMA_2_7B, 2048, 1, {}, "bfloat16"),
    ("v5e", SMOLLM2_135M, 32768, 4, {}, "bfloat16"),
    ("v6e", MISTRAL_7B, 32768, 1, {"window": 4096}, "bfloat16"),
    ("v6e", LLAMA_3_70B, 2048, 8, {}, "float32"),
    ("v5p", LLAMA_3_70B, 8192, 4, {"lane_parts": 2}, "bfloat16"),
    ("v5p", PHI_2, 2064, 2, {}, "bfloat16"),
    ("tpu7x", LLAMA_2_7B, 8192, 8, {}, "bfloat16"),
    ("tpu7x", GEMMA_2_9B, 32768, 1, {"softcap": 50.0}, "float32"),
    ("v5e", GPT_OSS, 8192, 1, sinks_of(64, True), "bfloat16"),
)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    "case", first_is_ordinary(COMPILED), ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[5]}"
)
def test_compiles_without_a_copy_of_the_cache(case):
    """The whole stacked cache goes in, and a layer's slice of it is larger than all that is needed besides."""
    chip, heads, slots, tokens, options, dtype = case
    described = decode_case(
        "flash_decode", flash_decode, "", heads, [slots - tokens] * 4, tokens, slots, dtype=dtype, **options
    )
    needed, _ = compile_for(chip, described.function, described.arguments)
    layer_bytes = np.prod(described.arguments[1].shape[1:]) * jnp.dtype(dtype).itemsize
    assert needed < 0.2 * layer_bytes + (1 << 20)


def test_keys_that_are_values_too_are_read_once():
    """As in latent attention; the kernel's operands are one array fewer, and the result is the same."""
    rng = np.random.default_rng(0)
    cache = jnp.asarray(rng.normal(size=(1, 2, 256, 128)), jnp.float32)
    query, starts = jnp.asarray(rng.normal(size=(2, 1, 4, 128)), jnp.float32), jnp.array([7, 200])

    def once(query, cache):
        return flash_decode(query, cache, cache, 0, starts, interpret=True)

    def twice(query, keys, values):
        return flash_decode(query, keys, values, 0, starts, interpret=True)

    found, expected = jax.jit(once)(query, cache), jax.jit(twice)(query, cache, cache)
    np.testing.assert_array_equal(found, expected)
    traced = [jax.make_jaxpr(once)(query, cache), jax.make_jaxpr(twice)(query, cache, cache)]
    counts = [
        len(equation.invars) for each in traced for equation in each.eqns if equation.primitive.name == "pallas_call"
    ]
    assert len(counts) == 2
    assert counts[0] == counts[1] - 1
