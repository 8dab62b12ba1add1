"""Products with weights of 8 and 4 bits."""

from functools import cache

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
from tests.pallas_kernels.cached_attention import assert_no_races

WIDTH, CHANNELS = 512, 300


@cache
def draw_weights(seed: int, group: int, layers: int = 0, width: int = WIDTH, channels: int = CHANNELS):
    """Return random weights and scales: int8 for group 0, else int4; stacked where there are layers."""
    noise = jax.random.normal(jax.random.key(seed), (max(layers, 1), width, channels))
    made = [quantize_int4(matrix, group) if group else quantize_int8(matrix) for matrix in noise]
    weights, scales = (jnp.stack(parts) for parts in zip(*made))
    return (weights, scales) if layers else (weights[0], scales[0])


def draw_activations(seed: int, rows: int, dtype: str, width: int = WIDTH):
    """Return random activations and, of int8 ones, their scales; their mean is not zero."""
    noise = jax.random.normal(jax.random.key(seed + 1), (rows, width)) + 0.5
    if dtype == "bfloat16":
        return noise.astype(jnp.bfloat16), None
    return jnp.clip(jnp.round(noise * 40), -128, 127).astype(jnp.int8), jnp.linspace(0.5, 2.0, rows)


def relative_error(found: jax.Array, exact: jax.Array) -> float:
    """Return the largest difference over the largest value; a value that is none fails it."""
    return float(jnp.abs(found.astype(jnp.float32) - exact).max() / jnp.abs(exact).max())


@settings(derandomize=True, max_examples=14, deadline=None)
@given(
    seed=st.integers(0, 2),
    group=st.sampled_from((0, *GROUPS)),
    rows=st.sampled_from((1, 7, 8, 17)),
    activations=st.sampled_from(("bfloat16", "int8")),
    out_dtype=st.sampled_from(("float32", "bfloat16")),
    block_k=st.sampled_from((128, 256, 512)),
    layers=st.sampled_from((0, 3)),
)
def test_products_are_those_of_the_dequantised_weights(seed, group, rows, activations, out_dtype, block_k, layers):
    """The last block of channels is cut, and that of the rows adds up over steps."""
    weights, scales = draw_weights(seed, group, layers)
    x, row_scales = draw_activations(seed, rows, activations)
    layer = jnp.int32(seed % layers) if layers else None
    found = quant_matmul(
        x, weights, scales, layer=layer, activation_scales_M=row_scales, out_dtype=out_dtype, block_k=block_k,
        block_f=256, interpret=True,
    )  # fmt: skip
    exact = quant_matmul_reference(x, weights, scales, layer=layer, activation_scales_M=row_scales)
    assert found.shape == (rows, CHANNELS)
    assert found.dtype == jnp.dtype(out_dtype)
    assert relative_error(found, exact) < (1e-5 if out_dtype == "float32" else 5e-3)


@pytest.mark.parametrize("group", [0, 64])
def test_steps_do_not_race_and_read_nothing_that_was_not_written(group):
    """Outputs and scratch start as not-a-number; a copy that another thread still reads or writes is an error."""
    weights, scales = draw_weights(3, group, layers=2, width=256, channels=256)
    x, _ = draw_activations(3, 8, "bfloat16", width=256)
    pltpu.reset_tpu_interpret_mode_state()
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    found = quant_matmul(x, weights, scales, layer=1, block_k=128, block_f=128, out_dtype=jnp.float32, interpret=mode)
    exact = quant_matmul_reference(x, weights, scales, layer=1)
    assert relative_error(found, exact) < 1e-5
    assert_no_races()
    pltpu.reset_tpu_interpret_mode_state()


def test_more_rows_than_fit_are_taken_in_parts():
    weights, scales = draw_weights(5, 128)
    x, _ = draw_activations(5, 530, "bfloat16")
    found = quant_matmul(x, weights, scales, block_k=512, block_f=512, out_dtype=jnp.float32, interpret=True)
    assert relative_error(found, quant_matmul_reference(x, weights, scales)) < 1e-5


def test_a_row_does_not_see_the_others():
    weights, scales = draw_weights(7, 32)
    x, _ = draw_activations(7, 5, "bfloat16")
    blocks = {"block_k": 256, "block_f": 128, "out_dtype": jnp.float32, "interpret": True}
    together = quant_matmul(x, weights, scales, **blocks)
    other = quant_matmul(x.at[0].set(1000), weights, scales, **blocks)
    np.testing.assert_array_equal(together[1:], other[1:])
    assert relative_error(other[:1], together[:1]) > 1


@pytest.mark.parametrize("group", GROUPS)
def test_rounding_stays_within_half_a_step(group):
    exact = jax.random.normal(jax.random.key(0), (256, 8)) * jnp.logspace(-3, 3, 8)
    for weights, scales in (quantize_int4(exact, group), quantize_int8(exact)):
        per_row = jnp.repeat(scales, group, axis=0) if scales.ndim == 2 else scales[None]
        assert (jnp.abs(weights.astype(jnp.float32) * per_row - exact) <= 0.5001 * per_row).all()


BAD = {
    "rows": ({"x": jnp.ones((2, 384), jnp.bfloat16)}, "weights of 512 rows do not fit activations of 384"),
    "width": ({"x": jnp.ones((2, 100), jnp.bfloat16), "weights": jnp.ones((100, 8), jnp.int8)}, "no multiple of 128"),
    "empty": ({"x": jnp.ones((0, 512), jnp.bfloat16)}, "x has 0 rows"),
    "dtype": ({"x": jnp.ones((2, 512), jnp.float32)}, "activations are float32, not bfloat16 or int8"),
    "row scales": ({"x": jnp.ones((2, 512), jnp.int8)}, "need activation_scales_M"),
    "scales": ({"scales": jnp.ones((7,))}, r"scales of int8 weights \(512, 300\) are \(7,\)"),
    "groups": ({"weights": jnp.ones((512, 300), jnp.int4), "scales": jnp.ones((32, 300))}, "groups of 32, 64 or 128"),
    "layers": ({"layer": 1}, r"must be \[M, D\] and \[L, D, F\]"),
    "weights": ({"weights": jnp.ones((512, 300), jnp.uint8)}, "weights are uint8, not int8 or int4"),
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


@pytest.fixture(scope="module")
def v5e():
    with Compiler("v5e") as compiler:
        yield compiler


@pytest.mark.tpu_compile
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("rows", [1, 16])
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
        ("v6e", make_case(1, LLAMA_3_8B_UP, 64)),
        ("v6e", make_case(512, LLAMA_2_7B_DOWN)),
        ("v5p", make_case(16, LLAMA_2_7B_DOWN, 128)),
        ("v5p", make_case(16, LLAMA_2_7B_UP, activations="int8")),
        ("tpu7x", make_case(8, LLAMA_3_8B_UP, 32)),
        ("tpu7x", make_case(64, LLAMA_2_7B_UP, activations="int8")),
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
