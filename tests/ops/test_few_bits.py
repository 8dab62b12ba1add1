"""Weights in few bits: what their codes stand for, and products that read them as they lie."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import InvalidOption
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels.few_bits.product_code import few_bits_module, row_dtype
from jaxinfer.ops.cpu_kernels.few_bits.products import multiply_few_bits
from jaxinfer.ops.cpu_kernels.few_bits.tiles import supports
from jaxinfer.ops.few_bits.formats import FP8, GGUF_FORMATS, GROUPS, INT8, MXFP4, NORMAL, UNSIGNED, Format, int4, nf4
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.few_bits.split import check_split, pad_quantized
from jaxinfer.ops.matmul import linears
from tests.ops.foreign_calls import HOST, POOLS, SMALLER, Calls, beside_a_guard, check_products, exact

INT4S = [int4(group, is_symmetric) for group in GROUPS for is_symmetric in (False, True)]
# Of published checkpoints: zeros and other scales, and floats in groups.
ZEROS = Format(4, 128, UNSIGNED, scale_type="bfloat16", has_zeros=True)
PUBLISHED = [
    *(ZEROS, replace(ZEROS, group=32, scale_type=None), Format(8, None, has_zeros=True), Format(8, 64, has_zeros=True)),
    *(replace(ZEROS, group=None, scale_type=None), replace(FP8, group=128, scale_type="float32")),
]
FORMS = [*GGUF_FORMATS.values(), INT8, replace(INT8, group=128), *INT4S, nf4(64), FP8, *PUBLISHED]
# Each way of widening, with and without minima, and each number of runs in a group.
SOME = [*map(GGUF_FORMATS.get, ("Q4_1", "Q8_0", "Q5_K", "Q6_K")), INT8, int4(64, True), int4(128, False), FP8, ZEROS]
SOME.append(MXFP4)
NARROW = replace(SMALLER[0], dtypes=HOST.dtypes), replace(SMALLER[1], dtypes=HOST.dtypes)


def name_of(form: Format) -> str:
    kind = "-levels" if form.offset is None else ""
    ways = f"{kind}{'-minima' if form.has_minima else ''}{'-units' if form.supers else ''}"
    ways += f"{'-zeros' if form.has_zeros else ''}{f'-{form.scale_type}' if form.scale_type else ''}"
    return f"{form.bits}-{form.group or 'row'}{ways}"


def drawn(rng, form, outputs, width):
    """Return any codes at all, with scales and minima of either sign."""
    # The codes of no number are at the end of each sign's.
    most = 127 if form.levels == FP8.levels else 256

    def part(name, shape, dtype):
        if name == "scales" and form.scale_dtype == "uint8":
            return rng.integers(118, 136, shape, np.uint8)
        is_byte = np.dtype(dtype).itemsize == 1
        return (
            rng.integers(0, most, shape, np.uint8).view(dtype) if is_byte else rng.standard_normal(shape).astype(dtype)
        )

    parts = form.parts(outputs, width).items()
    return QuantizedArray.of(form, [part(name, *described) for name, described in parts])


def dense(matrix):
    """Return the weights that codes stand for, by NumPy."""
    return exact(jax.tree.map(np.asarray, matrix).dequantize() if isinstance(matrix, QuantizedArray) else matrix)


@functools.cache
def calls(vectors, form, count=1):
    return Calls(few_bits_module(vectors, form, count))


def multiply(vectors, rows_MK, *matrices):
    return calls(vectors, matrices[0].form, len(matrices)).products(vectors, rows_MK, matrices)


def check(vectors, form, rows, width, outputs):
    rng = np.random.default_rng(rows + width + outputs)
    rows_MK = rng.standard_normal((rows, width), np.float32).astype(jnp.bfloat16)
    matrix = drawn(rng, form, outputs, width)
    (found,) = multiply(vectors, rows_MK, matrix)
    weights = dense(matrix)
    check_products(found, rows_MK, weights)


any_shape = given(st.one_of(st.integers(1, 14), st.sampled_from([19, 40])), st.integers(1, 5), st.integers(1, 70))
few_examples = settings(derandomize=True, max_examples=10, deadline=None)
OTHERS = [
    pytest.param(vectors, form, marks=pytest.mark.exhaustive if index % 4 else pytest.mark.slow)
    for index, (vectors, form) in enumerate(
        [(HOST, form) for form in FORMS if form not in SOME] + [(each, form) for each in NARROW for form in SOME]
    )
]


@pytest.mark.parametrize("form", SOME, ids=name_of)
@few_examples
@any_shape
def test_rows_times_codes_of_any_shape(form, rows, groups, outputs):
    check(HOST, form, rows, groups * form.unit, outputs)


@pytest.mark.parametrize(("vectors", "form"), OTHERS, ids=lambda each: name_of(each) if each in FORMS else each.lanes)
@few_examples
@any_shape
def test_rows_times_codes_of_every_form(form, vectors, rows, groups, outputs):
    check(vectors, form, rows, groups * form.unit, outputs)


@pytest.mark.parametrize(
    ("vectors", "form"),
    [
        *((NARROW[0], form) for form in (GGUF_FORMATS["Q4_1"], INT8, MXFP4, FP8)),
        (NARROW[1], nf4(64)),
        (replace(NARROW[1], picks_by=""), MXFP4),
    ],
    ids=lambda each: name_of(each) if isinstance(each, Format) else f"{each.lanes} lanes {each.picks_by}",
)
def test_another_processors_vectors_add_the_same(form, vectors):
    for rows, width, outputs in ((1, 192, 7), (4, 64, 21), (11, 320, 5)):
        check(vectors, form, rows, width, outputs)


@pytest.mark.slow
@pytest.mark.parametrize("form", SOME, ids=name_of)
def test_a_row_has_the_same_results_among_any_number_of_others(form):
    """In any tile, widened before or in it, and among the outputs of other matrices."""
    rng = np.random.default_rng(1)
    rows_MK = rng.standard_normal((40, 512), np.float32).astype(jnp.bfloat16)
    matrices = drawn(rng, form, 23, 512), drawn(rng, form, 6, 512)
    alone = [np.concatenate([multiply(HOST, row[None], each)[0] for row in rows_MK]) for each in matrices]
    for count in (1, 2, 6, 7, 12, 13, 40):
        for found, expected in zip(multiply(HOST, rows_MK[:count], *matrices), alone):
            assert found.tobytes() == expected[:count].tobytes()
    (found,) = multiply(HOST, rows_MK[::-1], matrices[0])
    assert found.tobytes() == alone[0][::-1].tobytes()


@POOLS
def test_whatever_the_pool_does_products_are_whole_and_memory_freed(pool):
    rng = np.random.default_rng(2)
    form = GGUF_FORMATS["Q4_1"]
    kernel = Calls(few_bits_module(HOST, form, 3), pool, threads=5)
    dtype = jnp.dtype(row_dtype(HOST, form))
    for rows, outputs in itertools.product((1, 20), ((1, 5, 2), (90, 4, 300), (700, 1, 3))):
        rows_MK = rng.standard_normal((rows, 128), np.float32).astype(jnp.bfloat16).astype(dtype)
        matrices = [drawn(rng, form, count, 128) for count in outputs]
        operands = [part for matrix in matrices for part in matrix.matrix]
        found = kernel.call([rows_MK, *operands], [(rows, count) for count in outputs])
        for result, matrix in zip(found, matrices):
            np.testing.assert_allclose(result, exact(rows_MK) @ dense(matrix).T, atol=1e-3)
    kernel.finish()


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("form", [GGUF_FORMATS["Q4_1"], INT8], ids=name_of)
def test_nothing_beside_the_arrays_is_read(form, at_end):
    rng = np.random.default_rng(3)
    for rows, width, outputs in ((1, 160, 5), (14, 96, 18)):
        rows_MK = rng.standard_normal((rows, width), np.float32).astype(jnp.dtype(row_dtype(HOST, form)))
        matrix = jax.tree.map(lambda part: beside_a_guard(part, at_end), drawn(rng, form, outputs, width))
        expected = multiply(HOST, rows_MK, matrix)[0]
        found = calls(HOST, form).call([beside_a_guard(rows_MK, at_end), *matrix.matrix], [(rows, outputs)])
        assert found[0].tobytes() == expected.tobytes()


def test_xla_calls_the_kernels_and_widens_where_there_are_none():
    """Several matrices of one form in one call, others apart; the fallback has the same weights."""
    rng = np.random.default_rng(4)
    one, two = (jax.tree.map(jnp.asarray, drawn(rng, INT8, count, 64)) for count in (9, 5))
    other = jax.tree.map(jnp.asarray, drawn(rng, int4(32, False), 7, 64))
    plain = jnp.asarray(rng.standard_normal((3, 64), np.float32))
    inputs = jnp.asarray(rng.standard_normal((2, 3, 64), np.float32)).astype(jnp.bfloat16).astype(jnp.float32)
    backend = choose_backend("float32", "cpu")
    without = replace(backend, cpu_kernels=False)
    for kernels, chosen in (((one, two, other), backend), ((one, plain), backend), ((one, other, plain), without)):
        found = jax.jit(lambda x, w, b=chosen: linears(x, w, b))(inputs, [(kernel, None) for kernel in kernels])
        for result, kernel in zip(found, kernels, strict=True):
            expected = exact(inputs) @ dense(kernel).T
            np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


def test_products_take_inputs_in_the_order_of_each_kernel():
    """By kernels and by XLA, of several kernels with orders of their own, of a stack's, and of rows alone."""
    rng = np.random.default_rng(8)
    form = replace(ZEROS, group=32, is_ordered=True)
    unordered = [drawn(rng, replace(form, is_ordered=False), count, 96) for count in (9, 5)]
    orders = [rng.permutation(96).astype(np.int32) for _ in unordered]
    kernels = [replace(each, form=form, order=order[None]) for each, order in zip(unordered, orders)]
    weights = [dense(each)[:, np.argsort(order)] for each, order in zip(unordered, orders)]
    inputs = jnp.asarray(rng.standard_normal((2, 3, 96), np.float32)).astype(jnp.bfloat16).astype(jnp.float32)
    for has_kernels in (True, False):
        backend = replace(choose_backend("float32", "cpu"), cpu_kernels=has_kernels)
        products = jax.jit(lambda x, w, b=backend: linears(x, w, b))(inputs, [(kernel, None) for kernel in kernels])
        for found, expected in zip(products, weights):
            assert np.abs(exact(found) - exact(inputs) @ expected.T).max() < 2e-5 * np.abs(expected).sum(1).max()
    for kernel, expected in zip(kernels, weights):
        assert dense(kernel).tobytes() == expected.tobytes()
        assert dense(kernel.rows(jnp.array([3, 1]))).tobytes() == expected[[3, 1]].tobytes()
    stack = jax.tree.map(lambda one, other: np.stack([one[:5], other]), *kernels)
    assert dense(stack).tobytes() == np.stack([weights[0][:5], weights[1]]).tobytes()


def test_levels_that_are_no_bfloat16_are_rounded_to_the_nearest():
    """As rows are; what the array stands for is exact."""
    form = Format(4, 32, NORMAL, scale_type="float32")
    codes = np.arange(32).reshape(1, 32) % 16
    packed = (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8)
    matrix = QuantizedArray(packed, np.ones((1, 1), np.float32), None, form)
    assert dense(matrix)[0].tolist() == [NORMAL[code] for code in codes[0]]
    if supports(HOST, form):
        found = multiply(HOST, np.eye(16, 32, dtype=np.float32).astype(jnp.bfloat16), matrix)[0]
        assert found[:, 0].tolist() == np.array(NORMAL, np.float32).astype(jnp.bfloat16).astype(np.float32).tolist()


def test_products_have_the_derivatives_of_the_weights_that_codes_stand_for():
    rng = np.random.default_rng(5)
    matrix = jax.tree.map(jnp.asarray, drawn(rng, int4(32, False), 4, 32))
    rows_MK = jnp.asarray(rng.standard_normal((2, 32), np.float32))
    slope = jax.grad(lambda rows: multiply_few_bits(rows, matrix.form, (matrix.matrix,))[0].sum())(rows_MK)
    expected = np.broadcast_to(dense(matrix).sum(0), (2, 32))
    np.testing.assert_allclose(slope, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", [INT8, int4(32, True), int4(64, False)], ids=name_of)
def test_weights_are_rounded_to_the_nearest_level(form):
    """Half a step away at the most, whatever their size and sign; groups of equal weights are exact."""
    rng = np.random.default_rng(6)
    weights = rng.standard_normal((2, 6, 128), np.float32) * np.exp(rng.standard_normal((2, 6, 1))).astype(np.float32)
    weights[0, 0], weights[1, 1, :64] = 0, 0.5
    found = round_to_nearest(jnp.asarray(weights), form)
    assert found.shape == weights.shape
    steps = np.repeat(np.abs(exact(found.scales)), 128 // found.scales.shape[-1], axis=-1)
    error = np.abs(exact(found.dequantize()) - weights)
    # Of symmetric levels the largest is 7, and -8 stands for the weight farthest from zero: its opposite is a step off.
    most = 1.01 if form.offset == 8 else 0.51
    assert (error <= most * steps + 2**-11 * np.abs(weights)).all()
    assert (error <= 0.51 * steps + 2**-11 * np.abs(weights)).mean() > 0.95
    assert not error[0, 0].any()
    on_host = jax.tree.map(np.asarray, found).dequantize()
    assert on_host.tobytes() == np.asarray(found.dequantize()).tobytes()
    again = jax.tree.map(lambda part: part[1], found)
    assert again.dequantize().tobytes() == found.dequantize()[1].tobytes()


def test_scales_that_are_exponents_are_powers_of_two_by_numpy_by_xla_and_in_products():
    """From the least, which float32 holds without a whole mantissa, to the largest whose weights are finite."""
    exponents = np.array([[0], [1], [2], [126], [127], [128], [252]], np.uint8)
    # Of each run the first four weights are 1, 6, -0.5 and -0.
    codes = np.zeros((7, 16), np.uint8)
    codes[:, :4] = [2, 7, 9, 8]
    matrix = QuantizedArray.of(MXFP4, [codes, exponents])
    expected = np.ldexp([1.0, 6.0, -0.5, 0.0], exponents.astype(np.int32) - 127)
    found = dense(matrix)
    assert (found[:, :4] == expected).all()
    assert not found[:, 4:].any()
    assert (np.asarray(jax.tree.map(jnp.asarray, matrix).dequantize())[2:] == found[2:]).all()
    rows = np.eye(4, 32, dtype=np.float32).astype(jnp.bfloat16)
    # A processor may take numbers below its least whole one for zero.
    assert (multiply(HOST, rows, matrix)[0].T[1:, :2] == expected[1:, :2]).all()


def test_a_powers_exponent_is_that_of_the_largest_weight():
    """The largest of a group is from four to eight of its units, of which six is the largest level."""
    weights = np.random.default_rng(9).standard_normal((4, 6, 64), np.float32)
    weights[0, 0], weights[1, 1, :32] = 0, [0.0, -4.0, *[1.0] * 30]
    found = jax.tree.map(np.asarray, round_to_nearest(jnp.asarray(weights), MXFP4))
    most = np.abs(weights.reshape(4, 6, 2, 32)).max(-1)
    units = np.ldexp(np.float32(1), found.scales.astype(np.int32) - 127)
    ratios = (most / units)[most > 0]
    assert ratios.min() >= 4
    assert ratios.max() < 8
    levels = np.array(MXFP4.levels, np.float32)
    within = weights.reshape(4, 6, 2, 32) / units[..., None]
    nearest = np.abs(np.clip(within, -6, 6)[..., None] - levels).min(-1) + np.maximum(np.abs(within) - 6, 0)
    error = np.abs(found.dequantize().reshape(within.shape) / units[..., None] - within)
    np.testing.assert_allclose(error, nearest, atol=1e-6)
    for wrong in (np.inf, -np.inf, np.nan):
        weights[2, 3, 5] = wrong
        scales = np.asarray(round_to_nearest(jnp.asarray(weights), MXFP4).float_scales())
        assert not np.isfinite(scales[2, 3, 0])
        assert np.isfinite(scales).sum() == scales.size - 1


@pytest.mark.parametrize("form", [nf4(64), FP8], ids=name_of)
def test_weights_are_rounded_to_the_nearest_of_uneven_levels(form):
    """Levels themselves are exact, of either sign, and what lies between goes to the nearest."""
    levels = np.unique(np.array(form.levels, np.float32))
    between = np.linspace(levels[0], levels[-1], 4 * 64 - 2 * len(levels[:32]), dtype=np.float32)
    # Each group has the largest level, and so the scale of the levels themselves.
    weights = np.resize(np.concatenate([levels, between]), 512).reshape(8, 64)
    weights[:, 0] = levels[-1]
    found = jax.tree.map(np.asarray, round_to_nearest(jnp.asarray(3 * weights.reshape(1, -1)), form))
    nearest = np.abs(weights.reshape(-1, 1) - levels).min(axis=1)
    np.testing.assert_allclose(np.abs(found.dequantize()[0] / 3 - weights.ravel()), nearest, atol=1e-5 * levels[-1])


def test_processors_without_float16_or_lookups_are_told_apart():
    uneven, by_words = (INT8, MXFP4, nf4(64), FP8), replace(nf4(64), scale_type="float32")
    assert all(supports(vectors, form) for vectors in (HOST, *NARROW) for form in uneven)
    without_lookups, old = replace(NARROW[1], picks_by=""), replace(SMALLER[1], dtypes=("float32", "bfloat16", "int8"))
    assert [supports(without_lookups, form) for form in uneven] == [True, True, False, True]
    assert [supports(old, form) for form in uneven] == [True, True, False, False]
    assert supports(old, by_words)
    assert not any(supports(old, form) for form in INT4S)


def test_what_does_not_split_is_mended_by_smaller_groups_only_where_they_help():
    mesh = jax.sharding.AbstractMesh((4,), ("tensor",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tensor"))
    few, smaller = (
        "use fewer devices on tensor$",
        "use int8 without groups, a smaller group, or fewer devices on tensor$",
    )
    for form, width, mend in ((INT8, 64, few), (int4(64, False), 128, smaller), (int4(64, False), 64, few)):
        array = round_to_nearest(jnp.ones((2, width)), form)
        with pytest.raises(InvalidOption, match=f"over 4 devices in whole groups of {form.unit}: {mend}"):
            check_split(array, sharding, "kernel")
    for form, mend in ((INT8, few), (int4(64, False), smaller)):
        array, source = round_to_nearest(jnp.ones((2, 64)), form), np.arange(96 if form.unit > 32 else 80)
        with pytest.raises(InvalidOption, match=mend):
            pad_quantized(array, [None, np.where(source < 64, source, -1)])
