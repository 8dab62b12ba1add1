"""Products with weights in panels are those of rows rounded in groups, whatever the shapes; panels hold the weights."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels.panels.panel_code import panel_module
from jaxinfer.ops.cpu_kernels.panels.products import multiplies_panels, multiply_panels
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.few_bits.formats import GGUF_FORMATS, INT8, Format, int4, nf4
from jaxinfer.ops.few_bits.panels import in_panels, lies_in_panels
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.matmul import linears, product
from tests.ops.foreign_calls import HOST, POOLS, Calls, beside_a_guard, check_products, exact
from tests.ops.rounded_in_groups import rounded_in_groups

FORMS = (int4(32, False), int4(64, True), int4(128, False), INT8, GGUF_FORMATS["Q8_0"], GGUF_FORMATS["Q4_0"])
DTYPES = ("bfloat16", "float32")

# With instructions for bytes, where there are such, and without.
PROCESSORS = [pytest.param(HOST, id="host"), pytest.param(replace(HOST, dots_bytes=False), id="no bytes")]


def name_of(form: Format) -> str:
    return f"{form.bits}-{form.group or 'row'}{'-minima' if form.has_minima else ''}"


def drawn(rng, form, outputs, width):
    """Return any codes at all, with scales and minima of either sign, as NumPy's arrays: nothing is compiled."""
    parts = form.parts(outputs, width).values()
    return QuantizedArray.of(
        form,
        [
            rng.integers(0, 256, shape, np.uint8).view(dtype)
            if np.dtype(dtype).itemsize == 1
            else rng.standard_normal(shape).astype(dtype)
            for shape, dtype in parts
        ],
    )


def multiply(rows_MK, form, *arrays, vectors=HOST):
    """Return the products with matrices that lie by rows, through the handler."""
    calls = Calls(panel_module(vectors, form, rows_MK.dtype.name, len(arrays)))
    operands = [part for array in arrays for part in in_panels(array).matrix]
    return calls.call([rows_MK, *operands], [(len(rows_MK), array.shape[0]) for array in arrays])


@pytest.mark.parametrize("form", FORMS, ids=name_of)
@pytest.mark.parametrize(("outputs", "width"), [(37, 128)])
def test_panels_hold_the_weights(form, outputs, width):
    array = drawn(np.random.default_rng(0), form, outputs, width)
    panels = jax.tree.map(jnp.asarray, in_panels(array))
    array = jax.tree.map(jnp.asarray, array)
    assert (panels.shape, panels.ndim) == (array.shape, 2)
    np.testing.assert_array_equal(panels.dequantize(), array.dequantize())
    ids = jnp.asarray([[outputs - 1, 0], [outputs // 2, 0]])
    np.testing.assert_array_equal(panels.rows(ids).dequantize(), array.dequantize()[ids])
    backend = choose_backend("float32", "cpu")
    np.testing.assert_array_equal(embed(panels, ids, backend), embed(array, ids, backend))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=name_of)
@settings(derandomize=True, max_examples=8, deadline=None)
@given(st.one_of(st.integers(1, 9), st.sampled_from([17, 40])), st.integers(1, 3), st.integers(1, 50))
def test_products_are_those_of_rows_rounded_in_groups(form, dtype, rows, units, outputs):
    rng = np.random.default_rng((rows, units, outputs))
    # Each group is as large as it likes; some are zeros.
    sizes = np.repeat(np.exp(3 * rng.standard_normal((rows, 4 * units))) * (rng.random((rows, 4 * units)) < 0.8), 32, 1)
    rows_MK = (rng.standard_normal((rows, 128 * units)) * sizes).astype(np.float32).astype(jnp.dtype(dtype))
    array = drawn(rng, form, outputs, 128 * units)
    (found,) = multiply(rows_MK, form, array)
    check_products(found, rounded_in_groups(rows_MK), exact(array.dequantize()))


@pytest.mark.parametrize("vectors", PROCESSORS)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_processor(vectors):
    rng, form = np.random.default_rng(1), FORMS[0]
    rows_MK, array = rng.standard_normal((21, 256)).astype(jnp.bfloat16), drawn(rng, form, 40, 256)
    (together,) = multiply(rows_MK, form, array)
    for row in range(21):
        (alone,) = multiply(rows_MK[row : row + 1], form, array, vectors=vectors)
        assert alone.tobytes() == together[row].tobytes()


@POOLS
def test_whatever_the_pool_does_products_are_whole_and_memory_freed(pool):
    rng, form = np.random.default_rng(2), FORMS[0]
    kernel = Calls(panel_module(HOST, form, "float32", 3), pool, threads=5)
    for rows, outputs in itertools.product((1, 20), ((1, 5, 2), (90, 4, 300))):
        rows_MK = rng.standard_normal((rows, 128), np.float32)
        arrays = [drawn(rng, form, count, 128) for count in outputs]
        operands = [part for array in arrays for part in in_panels(array).matrix]
        for found, array in zip(kernel.call([rows_MK, *operands], [(rows, count) for count in outputs]), arrays):
            check_products(found, rounded_in_groups(rows_MK), exact(array.dequantize()))
    kernel.finish()


@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_beside_the_arrays_is_read(at_end):
    rng, form = np.random.default_rng(3), FORMS[0]
    for rows, width, outputs in ((1, 160, 5), (14, 96, 18)):
        rows_MK, array = rng.standard_normal((rows, width), np.float32), drawn(rng, form, outputs, width)
        guarded = [beside_a_guard(part, at_end) for part in (rows_MK, *in_panels(array).matrix)]
        (found,) = Calls(panel_module(HOST, form, "float32", 1)).call(guarded, [(rows, outputs)])
        assert found.tobytes() == multiply(rows_MK, form, array)[0].tobytes()


def test_linear_layers_multiply_panels_one_by_one_and_several_at_once():
    rng, form = np.random.default_rng(4), FORMS[0]
    backend = choose_backend("float32", "cpu")
    inputs = jnp.asarray(rng.standard_normal((2, 3, 128)), jnp.float32)
    arrays = [drawn(rng, form, outputs, 128) for outputs in (24, 7)]
    panels, bias = [jax.tree.map(jnp.asarray, in_panels(array)) for array in arrays], jnp.arange(7.0)
    rounded = rounded_in_groups(np.asarray(inputs).reshape(6, 128))
    first, second = jax.jit(lambda x: linears(x, [(panels[0], None), (panels[1], bias)], backend))(inputs)
    check_products(np.asarray(first).reshape(6, -1), rounded, exact(arrays[0].dequantize()))
    np.testing.assert_array_equal(second, product(inputs, panels[1], backend) + bias)
    # Of two kinds each goes its own way.
    arrays = [jax.tree.map(jnp.asarray, array) for array in arrays]
    mixed = linears(inputs, [(panels[0], None), (arrays[1], None)], backend)
    np.testing.assert_array_equal(mixed[0], first)
    np.testing.assert_array_equal(mixed[1], product(inputs, arrays[1], backend))


def test_what_does_not_lie_in_panels_is_told_apart():
    assert {multiplies_panels(form, 128) for form in FORMS} == {HOST.dots_bytes}
    assert all(lies_in_panels(form, 128) for form in FORMS)
    others = nf4(64), GGUF_FORMATS["Q4_K"], GGUF_FORMATS["Q6_K"], GGUF_FORMATS["Q5_0"], Format(8, None, has_zeros=True)
    assert not any(lies_in_panels(form, 256) for form in others)
    assert not lies_in_panels(int4(64, True), 96)
    panels = in_panels(drawn(np.random.default_rng(5), FORMS[0], 20, 64))
    for rows, outputs in ((jnp.ones((2, 96)), 20), (jnp.ones((2, 64)), 33), (jnp.ones((0, 64)), 20)):
        with pytest.raises(ValueError, match="do not fit"):
            multiply_panels(rows, panels.form, (panels.matrix,), (outputs,))
