"""Products with weights of 8 and 4 bits."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import CHIPS
from pallas_kernels.measure import case_floor
from pallas_kernels.quant_matmul import quant_matmul, quantize_int4, quantize_int8
from pallas_kernels.quant_matmul.cases import (
    CASES,
    LLAMA_2_7B_DOWN,
    LLAMA_2_7B_UP,
    LLAMA_3_8B_UP,
    make_case,
)
from pallas_kernels.quant_matmul.op import GROUPS
from pallas_kernels.quant_matmul.reference import quant_matmul_reference
from pallas_kernels.schedule import Compiler
from pallas_kernels.tuning import read_table
from tests.pallas_kernels.cached_attention import assert_no_races, relative_error

WIDTH, CHANNELS = 512, 300


@cache
def draw_weights(seed: int, group: int, layers: int = 0, width: int = WIDTH, channels: int = CHANNELS):
    """Return random weights and scales: int8 for group 0, else int4; stacked where there are layers."""
    noise = np.random.default_rng(seed).normal(size=(max(layers, 1), width, channels)).astype(np.float32)
    quantize = partial(quantize_int4, group=group) if group else quantize_int8
    weights, scales = jax.jit(lambda noise: jax.tree.map(lambda *parts: jnp.stack(parts), *map(quantize, noise)))(noise)
    return (weights, scales) if layers else (weights[0], scales[0])


def draw_activations(seed: int, rows: int, dtype: str, width: int = WIDTH):
    """Return random activations and, of int8 ones, their scales; their mean is not zero."""
    noise = np.random.default_rng(seed + 1).normal(size=(rows, width)) + 0.5
    if dtype == "bfloat16":
        return noise.astype(jnp.bfloat16), None
    return np.clip(np.round(noise * 40), -128, 127).astype(np.int8), np.linspace(0.5, 2.0, rows, dtype=np.float32)


def product(x, weights, scales, activation_scales=None, layer=None, **options):
    """Multiply in one compiled program; so does `exact_product`, by what defines correct."""
    return jax.jit(
        lambda x, weights, scales, rows, layer: quant_matmul(
            x, weights, scales, activation_scales_M=rows, layer=layer, **options
        )
    )(x, weights, scales, activation_scales, layer)


def exact_product(x, weights, scales, activation_scales=None, layer=None):
    return jax.jit(
        lambda x, weights, scales, rows, layer: quant_matmul_reference(
            x, weights, scales, activation_scales_M=rows, layer=layer
        )
    )(x, weights, scales, activation_scales, layer)


# Each of the groups, activations, results and numbers of layers, with a block of rows that is cut and not.
@pytest.mark.parametrize(
    ("group", "rows", "activations", "out_dtype", "block_k", "layers"),
    [
        (0, 17, "int8", "float32", 128, 3),
        (0, 7, "bfloat16", "bfloat16", 512, 0),
        (32, 8, "bfloat16", "float32", 256, 3),
        (64, 1, "int8", "bfloat16", 512, 0),
        (128, 17, "bfloat16", "float32", 128, 0),
    ],
)
def test_products_are_those_of_the_dequantised_weights(group, rows, activations, out_dtype, block_k, layers):
    check(1, group, rows, activations, out_dtype, block_k, layers)


@pytest.mark.parametrize(
    ("group", "offset", "has_minima", "rows"),
    [(64, 0, True, 9), (32, 8, True, 17), pytest.param(128, 8, False, 3, marks=pytest.mark.exhaustive)],
)
def test_codes_have_an_offset_and_groups_a_minimum_in_float16(group, offset, has_minima, rows):
    """As weights are stored for CPUs; float16 has no exponent for the smallest scales. Many rows: scaled weights."""
    rng = np.random.default_rng(group)
    codes = jnp.asarray(rng.integers(0, 16, (2, WIDTH, CHANNELS)), jnp.uint4)
    scales, minima = (rng.normal(size=(2, WIDTH // group, CHANNELS)).astype(np.float16) for _ in range(2))
    scales[:, 1], minima[:, 1] = 3e-6, 0
    x, _ = draw_activations(2, rows, "bfloat16")
    given = x, codes, scales.view(np.int16), minima.view(np.int16) if has_minima else None
    options = {"offset": offset, "layer": 1, "out_dtype": jnp.float32}
    multiply = jax.jit(
        lambda x, w, s, m: quant_matmul(x, w, s, minima=m, **options, block_k=256, block_f=256, interpret=True)
    )
    exact = jax.jit(lambda x, w, s, m: quant_matmul_reference(x, w, s, minima=m, **options))
    limit = 2e-5 if rows <= 16 else 5e-3
    assert relative_error(multiply(*given), exact(*given)) < limit
    x *= np.repeat(np.arange(WIDTH // group) == 1, group)
    assert relative_error(multiply(*given), exact(*given)) < limit


@pytest.mark.slow
@settings(derandomize=True, max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2),
    group=st.sampled_from((0, *GROUPS)),
    rows=st.sampled_from((1, 7, 8, 17)),
    activations=st.sampled_from(("bfloat16", "int8")),
    out_dtype=st.sampled_from(("float32", "bfloat16")),
    block_k=st.sampled_from((128, 256, 512)),
    layers=st.sampled_from((0, 3)),
)
def test_products_of_any_kind(seed, group, rows, activations, out_dtype, block_k, layers):
    check(seed, group, rows, activations, out_dtype, block_k, layers)


def check(seed, group, rows, activations, out_dtype, block_k, layers):
    """The last block of channels is cut, and that of the rows adds up over steps."""
    weights, scales = draw_weights(seed, group, layers)
    x, row_scales = draw_activations(seed, rows, activations)
    arguments = x, weights, scales, row_scales, np.int32(seed % layers) if layers else None
    found = product(*arguments, out_dtype=out_dtype, block_k=block_k, block_f=256, interpret=True)
    exact = exact_product(*arguments)
    assert found.shape == (rows, CHANNELS)
    assert found.dtype == jnp.dtype(out_dtype)
    assert relative_error(found, exact) < (1e-5 if out_dtype == "float32" else 5e-3)


@pytest.mark.parametrize("group", [pytest.param(0, marks=pytest.mark.exhaustive), 64])
def test_steps_do_not_race_and_read_nothing_that_was_not_written(group):
    """Outputs and scratch start as not-a-number; a copy that another thread still reads or writes is an error."""
    weights, scales = draw_weights(3, group, layers=2, width=256, channels=256)
    x, _ = draw_activations(3, 8, "bfloat16", width=256)
    pltpu.reset_tpu_interpret_mode_state()
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    arguments = x, weights, scales, None, np.int32(1)
    found = product(*arguments, block_k=128, block_f=128, out_dtype=jnp.float32, interpret=mode)
    assert relative_error(found, exact_product(*arguments)) < 1e-5
    assert_no_races()
    pltpu.reset_tpu_interpret_mode_state()


def test_more_rows_than_fit_are_taken_in_parts():
    weights, scales = draw_weights(1, 128)
    x, _ = draw_activations(5, 530, "bfloat16")
    found = product(x, weights, scales, block_k=512, block_f=512, out_dtype=jnp.float32, interpret=True)
    assert relative_error(found, exact_product(x, weights, scales)) < 1e-5


def test_a_row_does_not_see_the_others():
    weights, scales = draw_weights(1, 32)
    x, _ = draw_activations(7, 5, "bfloat16")
    multiply = jax.jit(partial(quant_matmul, block_k=256, block_f=128, out_dtype=jnp.float32, interpret=True))
    together = np.asarray(multiply(x, weights, scales))
    x[0] = 1000
    other = np.asarray(multiply(x, weights, scales))
    np.testing.assert_array_equal(together[1:], other[1:])
    assert relative_error(other[:1], together[:1]) > 1


@pytest.mark.parametrize("group", GROUPS)
def test_rounding_stays_within_half_a_step(group):
    exact = (np.random.default_rng(0).normal(size=(256, 8)) * np.logspace(-3, 3, 8)).astype(np.float32)
    both = jax.jit(lambda exact: (quantize_int4(exact, group), quantize_int8(exact)))(exact)
    for weights, scales in jax.tree.map(np.asarray, both):
        per_row = np.repeat(scales, group, axis=0) if scales.ndim == 2 else scales[None]
        assert (np.abs(weights.astype(np.float32) * per_row - exact) <= 0.5001 * per_row).all()


BAD = {
    "rows": ({"x": jnp.ones((2, 384), jnp.bfloat16)}, "weights of 512 rows do not fit activations of 384"),
    "width": ({"x": jnp.ones((2, 100), jnp.bfloat16), "weights": jnp.ones((100, 8), jnp.int8)}, "no multiple of 128"),
    "empty": ({"x": jnp.ones((0, 512), jnp.bfloat16)}, "x has 0 rows"),
    "dtype": ({"x": jnp.ones((2, 512), jnp.float32)}, "activations are float32, not bfloat16 or int8"),
    "row scales": ({"x": jnp.ones((2, 512), jnp.int8)}, "need activation_scales_M"),
    "scales": ({"scales": jnp.ones((7,))}, r"scales of int8 weights \(512, 300\) are \(7,\)"),
    "groups": ({"weights": jnp.ones((512, 300), jnp.int4), "scales": jnp.ones((32, 300))}, "groups of 32, 64 or 128"),
    "layers": ({"layer": 1}, r"must be \[M, D\] and \[L, D, F\]"),
    "weights": ({"weights": jnp.ones((512, 300), jnp.uint8)}, "weights are uint8, not int8, int4 or uint4"),
    "minima": ({"minima": jnp.ones((300,))}, "int8 weights have no minima"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_together_is_refused_in_one_line(changed, message):
    weights, scales = draw_weights(0, 0)
    arguments = {"x": jnp.ones((2, 512), jnp.bfloat16), "weights": weights, "scales": scales} | changed
    x = arguments.pop("x")
    with pytest.raises(ValueError, match=message) as caught:
        quant_matmul(x, arguments.pop("weights"), arguments.pop("scales"), **arguments)
    assert "\n" not in str(caught.value)


def test_the_cases_are_tuned():
    shapes = set(read_table("quant_matmul")["v5e"])
    assert len(shapes) > 10
    assert {tuple(sorted(case.shape)) for case in CASES} == {("D", "F", "rows", "weights")}


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("rows", "group"),
    [(16, 128), pytest.param(1, 0, marks=pytest.mark.slow)],
)
def test_decode_on_v5e_is_bound_by_reading_the_weights_once(v5e, rows, group):
    """Bytes at most 1.1 times the weights; computing takes less than reading, in four bits too."""
    case = make_case(rows, LLAMA_2_7B_UP, group)
    schedule = v5e.schedule(case.function, case.arguments)
    weight_bytes = 4096 * 11008 * (4 if group else 8) // 8
    assert weight_bytes <= schedule.hbm_bytes <= 1.1 * weight_bytes + 4 * 32 * 11008 * bool(group)
    assert schedule.cycles / 1.5e9 < case_floor(case, CHIPS["v5e"]).hbm_seconds
    assert schedule.cycles > 0.05 * schedule.memory_seconds * 1.5e9


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("chip", "case"),
    [
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("v6e", make_case(1, LLAMA_3_8B_UP, 64)),
                ("v5p", make_case(16, LLAMA_2_7B_DOWN, 128)),
                ("tpu7x", make_case(64, LLAMA_2_7B_UP, activations="int8")),
            )
        ),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ("v6e", make_case(512, LLAMA_2_7B_DOWN)),
                ("v5p", make_case(16, LLAMA_2_7B_UP, activations="int8")),
                ("tpu7x", make_case(8, LLAMA_3_8B_UP, 32)),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_real_sizes_compile_for_every_chip(chip, case):
    with Compiler(chip) as compiler:
        schedule = compiler.schedule(case.function, case.arguments)
    assert any(operation.name.startswith("quant_matmul") for operation in schedule.operations)
    assert schedule.hbm_bytes < 1.3 * case.floor_bytes


def of_a_layer(x, weights, scales, layer):
    """Multiply with one layer of stacked weights."""
    return quant_matmul(x, weights, scales, layer=layer)


@pytest.mark.tpu_compile
def test_a_layer_of_stacked_weights_is_read_where_it_lies(v5e):
    arguments = [
        jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 4096, 11008), jnp.int4),
        jax.ShapeDtypeStruct((8, 32, 11008), jnp.float32),
        np.int32(5).reshape(()),
    ]
    schedule = v5e.schedule(of_a_layer, arguments)
    assert schedule.hbm_bytes < 1.1 * (4096 * 11008 // 2 + 4 * 32 * 11008)
    assert schedule.temporary_bytes < 2 << 20
