"""The CPU's own products: against NumPy in float64, for other processors, from many threads, and in a model's step."""

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding as llvm

import jaxinfer
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.ops.attention import Sinks, attend
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels import machine_code, products
from jaxinfer.ops.cpu_kernels.handlers import column_module, dot_module
from jaxinfer.ops.cpu_kernels.tiles import describe_vectors
from jaxinfer.ops.matmul import product
from tests.toys import float32_backend, write_tiny_llama

# Processors whose instructions run on this one too: half and quarter vectors, and bfloat16 without products of pairs.
SMALLER = tuple(
    replace(machine_code.host_vectors(), lanes=lanes, rows=rows, pairs_bfloat16=False, dtypes=("float32", "bfloat16"))
    for lanes, rows in ((8, 2), (4, 2), (4, 4))
)


@pytest.fixture(params=SMALLER, ids=lambda vectors: f"{vectors.lanes}x{vectors.rows}")
def smaller_processor(request, monkeypatch):
    """Have the kernels compiled anew for a smaller processor, under names of their own."""
    vectors = request.param
    register = machine_code.register
    suffix = f"_{vectors.lanes}x{vectors.rows}"
    names = {}

    def registered(dtype):
        if dtype not in names:
            names[dtype] = f"test_{dtype}{suffix}"
            register(names[dtype], column_module(vectors) if dtype is None else dot_module(vectors, dtype))
        return names[dtype]

    monkeypatch.setattr(products, "_registered", registered)
    monkeypatch.setattr(products, "host_vectors", lambda: vectors)
    return vectors


def drawn(rng, shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def exact(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def check_multiply(rng, dtype, batch, groups, rows, numbers, outputs, spare=(0, 0), layers=1, layer=0):
    rows_BCMK = drawn(rng, (batch, groups, rows, numbers), dtype)
    weights_LBSF = drawn(rng, (layers, batch, outputs + spare[0], groups * numbers + spare[1]), dtype)
    assert products.multiplies(dtype, numbers, rows_BCMK.shape)
    found = jax.jit(products.multiply, static_argnums=3)(rows_BCMK, weights_LBSF, layer, outputs)
    parts = exact(weights_LBSF)[layer, :, :outputs, : groups * numbers].reshape(batch, outputs, groups, numbers)
    expected = np.einsum("bcmk,bnck->bcmn", exact(rows_BCMK), parts)
    np.testing.assert_allclose(found, expected, atol=1e-5 * numbers**0.5)


def check_combine(rng, batch, groups, rows, count, columns, spare=(0, 0), layers=1, layer=0):
    factors_BCMK = drawn(rng, (batch, groups, rows, count))
    lines_LBSF = drawn(rng, (layers, batch, count + spare[0], groups * columns + spare[1]))
    assert products.combines("float32", columns, factors_BCMK.shape)
    found = jax.jit(products.combine, static_argnums=3)(factors_BCMK, lines_LBSF, layer, columns)
    parts = exact(lines_LBSF)[layer, :, :count, : groups * columns].reshape(batch, count, groups, columns)
    expected = np.einsum("bcmk,bkcn->bcmn", exact(factors_BCMK), parts)
    np.testing.assert_allclose(found, expected, atol=1e-5 * count**0.5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 18), st.integers(1, 5), st.integers(1, 70)),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
)
def test_rows_times_weights_of_any_shape(dtype, shape, spare, layer):
    if dtype not in machine_code.host_vectors().dtypes:
        pytest.skip("this processor converts no halves")
    batch, groups, rows, vectors, outputs = shape
    numbers = vectors * machine_code.host_vectors().step(dtype)
    check_multiply(np.random.default_rng(rows), dtype, batch, groups, rows, numbers, outputs, spare, 3, layer)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 18), st.integers(1, 70), st.integers(1, 5)),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
)
def test_columns_added_up_of_any_shape(shape, spare, layer):
    batch, groups, rows, count, vectors = shape
    columns = vectors * machine_code.host_vectors().lanes
    check_combine(np.random.default_rng(rows), batch, groups, rows, count, columns, spare, 3, layer)


def test_smaller_processors(smaller_processor):
    rng = np.random.default_rng(0)
    for rows, outputs in itertools.product((1, 2, 3, 6, 7), (1, 4, 37)):
        for dtype in smaller_processor.dtypes:
            check_multiply(rng, dtype, 2, 3, rows, 64, outputs, (1, 8), 2, 1)
        check_combine(rng, 2, 3, rows, outputs, 24, (1, 8), 2, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_processors_of_other_makes_compile(dtype):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    targets = {
        "aarch64-linux-gnu": ("neoverse-n1", {"neon": True}),
        "arm64-apple-macosx": ("apple-m1", {"neon": True}),
        "x86_64-linux-gnu": ("haswell", {"avx": True, "avx2": True, "f16c": True}),
        "x86_64-pc-windows-msvc": ("skylake-avx512", {"avx": True, "avx512f": True, "f16c": True}),
    }
    for triple, (processor, features) in targets.items():
        vectors = describe_vectors(features)
        assert dtype in vectors.dtypes
        machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor)
        module = llvm.parse_assembly(dot_module(vectors, dtype))
        module.triple = triple
        assembly = machine.emit_assembly(module)
        registers = {16: "zmm", 8: "ymm", 4: "v0.4s" if triple.startswith("aarch64") else "v0"}[vectors.lanes]
        assert registers in assembly
        machine.emit_object(llvm.parse_assembly(column_module(vectors)))


def test_a_row_has_the_same_results_among_any_others():
    rng = np.random.default_rng(1)
    rows_MK, weights_NK = drawn(rng, (37, 576), "bfloat16"), drawn(rng, (50, 576), "bfloat16")
    factors_MK, lines_KN = drawn(rng, (37, 91)), drawn(rng, (91, 96))

    @jax.jit
    def both(rows, factors):
        return (
            products.multiply(rows[None, None], weights_NK[None, None], 0, 50)[0, 0],
            products.combine(factors[None, None], lines_KN[None, None], 0, 96)[0, 0],
        )

    whole = both(rows_MK, factors_MK)
    for first, count in ((0, 1), (5, 1), (3, 2), (30, 7), (2, 16)):
        for part, all_rows in zip(both(rows_MK[first : first + count], factors_MK[first : first + count]), whole):
            np.testing.assert_array_equal(part, all_rows[first : first + count])


def test_calls_from_many_threads_at_once():
    rng = np.random.default_rng(2)
    weights_NK = drawn(rng, (300, 512))
    multiply = jax.jit(lambda rows: products.multiply(rows[None, None], weights_NK[None, None], 0, 300))
    inputs = [drawn(rng, (count % 5 + 1, 512)) for count in range(60)]
    expected = [multiply(rows) for rows in inputs]
    with ThreadPoolExecutor(12) as pool:
        for _ in range(5):
            for found, alone in zip(pool.map(multiply, inputs), expected):
                np.testing.assert_array_equal(found, alone)


def test_gradients_are_those_of_xla():
    rng = np.random.default_rng(3)
    rows, weights = drawn(rng, (2, 3, 4, 32)), drawn(rng, (2, 2, 7, 100))
    factors, lines = drawn(rng, (2, 3, 4, 7)), drawn(rng, (2, 2, 9, 100))

    def own(rows, weights, factors, lines):
        first, second = products.multiply(rows, weights, 1, 6), products.combine(factors, lines, 1, 32)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.cos(second))

    def plain(rows, weights, factors, lines):
        first = jnp.einsum("bcmk,bnck->bcmn", rows, weights[1, :, :6, :96].reshape(2, 6, 3, 32), precision="highest")
        second = jnp.einsum("bcmk,bkcn->bcmn", factors, lines[1, :, :7, :96].reshape(2, 7, 3, 32), precision="highest")
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.cos(second))

    arguments = rows, weights, factors, lines
    for found, expected in zip(jax.grad(own, (0, 1, 2, 3))(*arguments), jax.grad(plain, (0, 1, 2, 3))(*arguments)):
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.any(expected)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_is_that_of_xla(softcap, with_sinks):
    rng = np.random.default_rng(4)
    own = float32_backend()
    query, keys, values = drawn(rng, (2, 3, 6, 64)), drawn(rng, (2, 40, 128)), drawn(rng, (2, 40, 128))
    sinks = Sinks(drawn(rng, (2, 3, 6, 64)), 4) if with_sinks else None
    mask = jnp.asarray(rng.random((2, 3, 40)) < 0.5)
    by_both = [
        attend(query, keys, values, mask, 0.125, backend, softcap, sinks)
        for backend in (own, replace(own, kernel_rows=0))
    ]
    np.testing.assert_allclose(*by_both, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_reads_weights_and_cache_where_they_lie(tmp_path, dtype):
    """No product is left to XLA, and nothing as large as a layer's weights, keys or values is copied for a call."""
    sizes = {"model_dim": 128, "ffn_dim": 256, "head_dim": 32, "layer_pattern": (LayerKind(Rope(10000.0, 32)),)}
    lm = jaxinfer.load(write_tiny_llama(tmp_path, **sizes), dtype=dtype)
    lm.generate([[5, 6, 7]], max_new_tokens=200)
    text = next(each.as_text() for name, each in lm.programs._compiled.items() if name[0][0] == "decode")
    calls = re.findall(r"custom-call\(%\S+, %(\S+), %\S+\), custom_call_target=\"jaxinfer_", text)
    assert len(calls) == 2 * (7 + 2) + 1
    assert not [weights for weights in calls if re.match(r"(copy|slice|transpose|convert|reshape)", weights)]
    assert " dot(" not in text
    assert "__ynn" not in text


def test_products_of_other_shapes_and_dtypes_are_left_to_xla():
    backend = float32_backend()
    rng = np.random.default_rng(5)

    def is_own(rows, weights):
        text = jax.jit(lambda x, w: product(x, w, backend)).lower(rows, weights).as_text()
        return "jaxinfer_multiply" in text

    rows, weights = drawn(rng, (3, 64)), drawn(rng, (10, 64))
    assert is_own(rows, weights)
    assert not is_own(drawn(rng, (products.MAX_ROWS + 1, 64)), weights)
    assert not is_own(drawn(rng, (3, 60)), drawn(rng, (10, 60)))


def test_without_llvm_all_is_left_to_xla(monkeypatch):
    assert choose_backend("float32", "cpu").kernel_rows == products.MAX_ROWS
    assert choose_backend("float32", "cpu", scan_layers=True).kernel_rows == 0
    assert choose_backend("bfloat16", "tpu").kernel_rows == 0
    monkeypatch.setattr(machine_code, "host_vectors", lambda: None)
    without = choose_backend("bfloat16", "cpu")
    assert without.kernel_rows == 0
    assert without.min_matmul_rows == 4
    assert choose_backend("float32", "cpu").transposed_kernels
