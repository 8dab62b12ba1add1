"""Weights in panels are those by rows: products have their bits, or, for drafts, are those of rows that are rounded."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels.few_bits.grouped_tiles import has_grouped_tiles, numbers_of
from jaxinfer.ops.cpu_kernels.few_bits.product_code import few_bits_module
from jaxinfer.ops.cpu_kernels.panels.products import drafts_by_panels, module_of, multiplies_panels, multiply_panels
from jaxinfer.ops.cpu_kernels.rounded_rows.product_code import rounded_module
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.few_bits.formats import FP8, GGUF_FORMATS, INT8, MXFP4, UNSIGNED, Format, int4, nf4
from jaxinfer.ops.few_bits.panels import in_panels, lies_in_panels
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.matmul import linear, linears, product
from jaxinfer.ops.stacked_products import multiply_stacked
from tests.ops.foreign_calls import HOST, POOLS, SMALLER, Calls, beside_a_guard, check_products, exact
from tests.ops.rounded_in_groups import rounded_in_groups
from tests.ops.test_rounded_rows import padded

UNSHIFTED, K_QUANT = int4(64, True), GGUF_FORMATS["Q4_K"]
ZEROS = Format(4, 32, UNSIGNED, scale_type="bfloat16", has_zeros=True)
# What drafts multiply, and what else has products in panels: each kind of levels, scales, minima and groups.
DRAFTING = (int4(32, False), UNSHIFTED, int4(128, False), INT8, GGUF_FORMATS["Q8_0"], K_QUANT, ZEROS)
BYTES = INT8, GGUF_FORMATS["Q8_0"], Format(8, 64, has_zeros=True), Format(8, None, has_zeros=True)
EXACT = (int4(32, False), UNSHIFTED, K_QUANT, ZEROS, MXFP4, nf4(128), GGUF_FORMATS["Q4_0"], *BYTES)
FORMS = tuple(dict.fromkeys((*DRAFTING, *EXACT, replace(ZEROS, is_ordered=True))))
# With products of rows in int8 by rows too.
ROUNDED = (int4(32, False), UNSHIFTED, int4(128, False), INT8, GGUF_FORMATS["Q8_0"])
# Compiling these takes seconds.
SLOW = (MXFP4, nf4(128), GGUF_FORMATS["Q4_0"], int4(128, False), Format(8, 64, has_zeros=True))
# A matrix has whole units of the largest form.
UNIT = 256

# With instructions that add four products of bytes, where there are such, or two, and without.
WITHOUT = replace(HOST, dots_bytes=0, pairs_bytes=False)
PAIRS = replace(HOST, dots_bytes=0)
NARROW = replace(SMALLER[0], dtypes=HOST.dtypes)
HOW_BYTES = "host", "pairs", "no bytes"
few_examples = settings(derandomize=True, max_examples=8, deadline=None)
any_shape = given(st.one_of(st.integers(1, 9), st.sampled_from([17, 40])), st.integers(1, 3), st.integers(1, 50))


def name_of(form: Format) -> str:
    shift = "-minima" if form.has_minima else "-zeros" if form.has_zeros else ""
    return f"{form.bits}-{form.group or 'row'}{shift}-{form.scale_dtype}{'-ordered' if form.is_ordered else ''}"


def some(forms):
    return [pytest.param(form, id=name_of(form), marks=[pytest.mark.slow] * (form in SLOW)) for form in forms]


def drawn(rng, form, outputs, width):
    """Return any codes at all, with scales and minima of either sign, as NumPy's arrays: nothing is compiled."""

    def part(name, shape, dtype):
        if name == "order":
            return rng.permutation(width)[None].astype(dtype)
        if name == "scales" and form.scale_dtype == "uint8":
            return rng.integers(118, 136, shape, np.uint8)
        if np.dtype(dtype).itemsize == 1:
            return rng.integers(0, 256, shape, np.uint8).view(dtype)
        return rng.standard_normal(shape).astype(dtype)

    parts = form.parts(outputs, width).items()
    return QuantizedArray.of(form, [part(name, *described) for name, described in parts])


def on_device(array):
    return jax.tree.map(jnp.asarray, array)


@functools.cache
def calls(module, *arguments):
    return Calls(module(*arguments))


def multiply(kind, rows_MK, *arrays, vectors=HOST):
    """Return the products with matrices that lie by rows, through the handler."""
    own = calls(module_of, vectors, arrays[0].form, kind, rows_MK.dtype.name, len(arrays))
    operands = [part for array in arrays for part in in_panels(array).matrix]
    return own.call([rows_MK, *operands], [(len(rows_MK), array.shape[0]) for array in arrays])


@pytest.mark.parametrize("form", FORMS, ids=name_of)
@pytest.mark.parametrize(("outputs", "width"), [(37, UNIT)])
def test_panels_hold_the_weights(form, outputs, width):
    array = drawn(np.random.default_rng(0), form, outputs, width)
    on_host = in_panels(array)
    panels, weights = on_device(on_host), array.dequantize()
    assert (panels.shape, panels.ndim) == (array.shape, 2)
    for found in (on_host.by_rows(), panels.by_rows(), panels.rows(jnp.arange(outputs))):
        for one, other in zip(found.matrix, array.matrix, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    if not form.is_ordered:  # tables are not
        ids = jnp.asarray([[outputs - 1, 0], [outputs // 2, 0]])
        rows = jax.jit(lambda panels, ids: embed(panels, ids, choose_backend("float32", "cpu")))(panels, ids)
        np.testing.assert_array_equal(rows, weights[np.asarray(ids)])


@pytest.mark.parametrize("form", some(DRAFTING))
@few_examples
@any_shape
def test_drafts_are_products_of_rows_rounded_in_groups(form, rows, units, outputs):
    dtype = ("bfloat16", "float32")[DRAFTING.index(form) % 2]
    rng, width = np.random.default_rng((rows, units, outputs)), UNIT * units
    # Each group is as large as it likes; some are zeros.
    shape = rows, width // 32
    sizes = np.repeat(np.exp(3 * rng.standard_normal(shape)) * (rng.random(shape) < 0.8), 32, 1)
    rows_MK = (rng.standard_normal((rows, width)) * sizes).astype(np.float32).astype(jnp.dtype(dtype))
    array = drawn(rng, form, outputs, width)
    (found,) = multiply("drafting", rows_MK, array)
    check_products(found, rounded_in_groups(rows_MK), exact(array.dequantize()))


@pytest.mark.parametrize("form", some(EXACT))
@few_examples
@any_shape
def test_products_have_the_bits_of_those_by_rows(form, rows, units, outputs):
    assert has_grouped_tiles(HOST, form) == multiplies_panels(form, UNIT)
    check_bits_of_rows(HOST, form, rows, units, outputs)


@pytest.mark.parametrize(
    "form",
    [int4(32, False), nf4(32), *(pytest.param(form, marks=pytest.mark.slow) for form in (UNSHIFTED, INT8))],
    ids=name_of,
)
def test_another_processors_vectors_have_the_bits_of_those_by_rows(form):
    for rows, units, outputs in ((1, 1, 37), (5, 2, 16), (13, 1, 3)):
        check_bits_of_rows(NARROW, form, rows, units, outputs)


@pytest.mark.parametrize("form", [INT8, int4(32, False), nf4(64)], ids=name_of)
@pytest.mark.parametrize("vectors", [HOST, NARROW], ids=lambda each: f"{each.lanes} lanes")
def test_a_row_has_the_same_bits_among_so_many_that_codes_are_widened_first(form, vectors):
    many = numbers_of(vectors, form).many or 40
    rng, width = np.random.default_rng(many), 2 * UNIT
    rows_MK, array = rng.standard_normal((many + 5, width)).astype(jnp.bfloat16), drawn(rng, form, 21, width)
    (found,) = multiply("exact", rows_MK, array, vectors=vectors)
    check_products(found, rows_MK, exact(array.dequantize()))
    for first, past in ((0, many - 1), (0, many), (4, 5), (many, many + 5)):
        (some_rows,) = multiply("exact", rows_MK[first:past], array, vectors=vectors)
        assert some_rows.tobytes() == found[first:past].tobytes()
    (by_rows,) = calls(few_bits_module, vectors, form).products(vectors, rows_MK, [array])
    assert by_rows.tobytes() == found.tobytes()


def check_bits_of_rows(vectors, form, rows, units, outputs):
    if has_grouped_tiles(vectors, form):
        rng = np.random.default_rng((rows, units, outputs))
        rows_MK = rng.standard_normal((rows, UNIT * units), np.float32).astype(jnp.bfloat16)
        array = drawn(rng, form, outputs, UNIT * units)
        (found,) = multiply("exact", rows_MK, array, vectors=vectors)
        (expected,) = calls(few_bits_module, vectors, form).products(vectors, rows_MK, [array])
        assert found.tobytes() == expected.tobytes()
        check_products(found, rows_MK, exact(array.dequantize()))


@pytest.mark.parametrize(
    "vectors", [HOST, *(pytest.param(each, marks=pytest.mark.slow) for each in (PAIRS, WITHOUT))], ids=HOW_BYTES
)
@pytest.mark.parametrize("form", some(ROUNDED))
@few_examples
@any_shape
def test_products_of_rows_in_int8_have_the_bits_of_those_by_rows(form, vectors, rows, units, outputs):
    rng = np.random.default_rng((rows, units, outputs))
    rows_MK = rng.standard_normal((rows, UNIT * units), np.float32)
    rows_MK[2::3] = 0
    array = drawn(rng, form, outputs, UNIT * units)
    (found,) = multiply("rounded", rows_MK, array, vectors=vectors)
    scales_M1 = np.abs(rows_MK).max(axis=1, keepdims=True) * np.float32(1 / 127)
    codes_MK = np.rint(rows_MK / np.where(scales_M1 == 0, 1, scales_M1)).astype(np.int8)
    given_rows = padded(codes_MK, scales_M1, form.group)
    (expected,) = calls(rounded_module, HOST, form).call([*given_rows, *array.matrix], [(rows, outputs)])
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("vectors", [HOST, PAIRS, WITHOUT], ids=HOW_BYTES)
@pytest.mark.parametrize("kind", ["drafting", "rounded"])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_processor(kind, vectors):
    rng, form = np.random.default_rng(1), UNSHIFTED
    rows_MK, array = rng.standard_normal((21, 256)).astype(jnp.bfloat16), drawn(rng, form, 40, 256)
    (together,) = multiply(kind, rows_MK, array)
    for row in (0, 7, 20):
        (alone,) = multiply(kind, rows_MK[row : row + 1], array, vectors=vectors)
        assert alone.tobytes() == together[row].tobytes()


@pytest.mark.parametrize("form", [replace(ZEROS, is_ordered=True), MXFP4, INT8], ids=name_of)
def test_stacks_hold_their_matrices_and_one_is_multiplied_where_it_lies(form):
    rng, width = np.random.default_rng(6), 128
    first, second = ([drawn(rng, form, outputs, width) for _ in range(3)] for outputs in (24, 32))
    stacks = [jax.tree.map(lambda *parts: np.stack(parts), *arrays) for arrays in (first, second)]
    panels = [on_device(in_panels(stack)) for stack in stacks]
    for stack, own in zip(stacks, panels):
        assert (own.shape, own.ndim) == (stack.shape, 3)
        for one, other in zip(own.by_rows().matrix, stack.matrix, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    if not has_grouped_tiles(HOST, form):
        return
    rows = jnp.asarray(rng.standard_normal((5, width)), jnp.bfloat16)
    backend = choose_backend("float32", "cpu")
    multiply_at = jax.jit(lambda place: multiply_stacked(rows, panels, place, backend))
    for place in range(3):
        for found, arrays in zip(multiply_at(place), (first, second)):
            np.testing.assert_array_equal(found, product(rows, on_device(arrays[place]), backend))
    mixed = multiply_stacked(rows, [panels[0], on_device(stacks[1])], jnp.int32(1), backend)
    for found, expected in zip(mixed, multiply_at(1)):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="do not fit"):
        multiply_panels(rows, panels[0])


@POOLS
def test_whatever_the_pool_does_products_are_whole_and_memory_freed(pool):
    rng, form = np.random.default_rng(2), int4(32, False)
    kernel = Calls(module_of(HOST, form, "drafting", "float32", 3), pool, threads=5)
    for rows, outputs in itertools.product((1, 20), ((1, 5, 2), (90, 4, 300))):
        rows_MK = rng.standard_normal((rows, 128), np.float32)
        arrays = [drawn(rng, form, count, 128) for count in outputs]
        operands = [part for array in arrays for part in in_panels(array).matrix]
        for found, array in zip(kernel.call([rows_MK, *operands], [(rows, count) for count in outputs]), arrays):
            check_products(found, rounded_in_groups(rows_MK), exact(array.dequantize()))
    kernel.finish()


# Integers with zeros multiply rows as they are alone.
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("drafting", int4(32, False)),
        ("rounded", int4(32, False)),
        ("rounded", INT8),
        *[("exact", form) for form in (int4(32, False), Format(8, None, has_zeros=True))],
    ],
)
@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_beside_the_arrays_is_read(at_end, kind, form):
    rng = np.random.default_rng(3)
    for rows, width, outputs in ((1, 160, 5), (14, 96, 18), (3, 32, 33)):
        rows_MK = rng.standard_normal((rows, width), np.float32).astype(jnp.bfloat16)
        array = drawn(rng, form, outputs, width)
        guarded = [beside_a_guard(part, at_end) for part in (rows_MK, *in_panels(array).matrix)]
        (found,) = calls(module_of, HOST, form, kind, "bfloat16", 1).call(guarded, [(rows, outputs)])
        assert found.tobytes() == multiply(kind, rows_MK, array)[0].tobytes()


def test_linear_layers_multiply_panels_one_by_one_and_several_at_once():
    rng, form = np.random.default_rng(4), int4(32, False)
    backend = choose_backend("float32", "cpu")
    inputs = jnp.asarray(rng.standard_normal((2, 3, 128)), jnp.float32)
    arrays = [drawn(rng, form, outputs, 128) for outputs in (24, 7)]
    panels = [on_device(replace(in_panels(array), drafts=True)) for array in arrays]
    bias, rounded = jnp.arange(7.0), rounded_in_groups(np.asarray(inputs).reshape(6, 128))
    first, second = jax.jit(lambda x: linears(x, [(panels[0], None), (panels[1], bias)], backend))(inputs)
    check_products(np.asarray(first).reshape(6, -1), rounded, exact(arrays[0].dequantize()))
    np.testing.assert_array_equal(second, product(inputs, panels[1], backend) + bias)
    # Of two kinds each goes its own way.
    array = on_device(arrays[1])
    mixed = linears(inputs, [(panels[0], None), (array, None)], backend)
    np.testing.assert_array_equal(mixed[0], first)
    np.testing.assert_array_equal(mixed[1], product(inputs, array, backend))


@pytest.mark.parametrize("activations", [None, "int8"])
def test_linear_layers_and_their_derivatives_are_those_by_rows(activations):
    rng, form = np.random.default_rng(5), replace(UNSHIFTED, is_ordered=activations is None)
    backend = replace(choose_backend("float32", "cpu"), activations=activations)
    array = drawn(rng, form, 24, 128)
    kernels = {"rows": on_device(array)}
    if multiplies_panels(replace(form, is_ordered=False), 128):
        kernels["panels"] = on_device(in_panels(array))
    inputs = jnp.asarray(rng.standard_normal((5, 128)), jnp.float32)
    results = {
        name: jax.jit(jax.value_and_grad(lambda x: (linear(x, kernel, None, backend) ** 2).sum()))(inputs)  # noqa: B023
        for name, kernel in kernels.items()
    }
    for found in results.values():
        np.testing.assert_array_equal(found[0], results["rows"][0])
        np.testing.assert_allclose(found[1], results["rows"][1], rtol=1e-5)
    slopes = (inputs.astype(jnp.bfloat16).astype(jnp.float32) @ array.dequantize().T) @ array.dequantize() * 2
    np.testing.assert_allclose(found[1], slopes, atol=0.05 * np.abs(slopes).max())


def test_what_does_not_lie_in_panels_is_told_apart():
    assert {drafts_by_panels(form, UNIT) for form in DRAFTING} == {HOST.dots_bytes > 0 or HOST.pairs_bytes}
    assert all(lies_in_panels(form, UNIT) for form in FORMS)
    assert not any(drafts_by_panels(form, UNIT) for form in (nf4(64), MXFP4, Format(8, None, has_zeros=True)))
    assert not any(multiplies_panels(form, UNIT) for form in (FP8, Format(8, 16), Format(4, None, UNSIGNED)))
    assert not any(lies_in_panels(GGUF_FORMATS[name], UNIT) for name in ("Q6_K", "Q5_0"))
    assert not lies_in_panels(UNSHIFTED, 96)
    panels = in_panels(drawn(np.random.default_rng(5), int4(32, False), 20, 64))
    for rows, outputs in ((jnp.ones((2, 96)), 20), (jnp.ones((2, 64)), 33), (jnp.ones((0, 64)), 20)):
        with pytest.raises(ValueError, match="do not fit"):
            multiply_panels(rows, replace(panels, num_outputs=outputs))
