"""bfloat16 products of any number of rows: against NumPy, in any company, in any process.

They are those of the matrix unit; on a processor without one, those that are used in its place.
"""

import ctypes
import functools
import itertools
import mmap
import os
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import binding as llvm

from jaxinfer.ops.cpu_kernels import machine_code, products
from jaxinfer.ops.cpu_kernels.matrix_unit_code import matrix_module, scratch_numbers
from jaxinfer.ops.cpu_kernels.product_code import dot_module
from jaxinfer.ops.cpu_kernels.tiles import describe_vectors
from tests.ops.foreign_calls import HOST, POOLS, Calls, drawn, exact
from tests.ops.test_cpu_kernels import machine_of, parsed
from tests.ops.test_cpu_products import any_shape, check_multiply

HAS_UNIT = HOST.tiles_bfloat16
# What kernels are given as rows of bfloat16.
DTYPE = jnp.dtype("bfloat16" if HAS_UNIT else HOST.row_dtype("bfloat16"))
ROWS = 1, 2, 7, 16, 17, 33, 64, 200


@functools.cache
def calls_of(count, pool="runs at once"):
    return Calls(matrix_module(HOST, count) if HAS_UNIT else dot_module(HOST, "bfloat16", count), pool)


def multiply_each(rows_IMK, stacks, layer, outputs, calls=None):
    """Call the kernel as XLA does."""
    shapes = [(*rows_IMK.shape[:2], count) for count in outputs]
    scratch = [(scratch_numbers(*rows_IMK.shape) // 2,)] if HAS_UNIT else []
    rows_IMK = rows_IMK.astype(DTYPE, copy=False)
    arguments = [rows_IMK, np.array(layer, np.int32), *stacks]
    return (calls or calls_of(len(outputs))).call(arguments, [*shapes, *scratch])[: len(outputs)]


def multiply(rows_BCMK, weights_LBSF, layer, outputs):
    batch, groups, count, numbers = rows_BCMK.shape
    (found,) = multiply_each(rows_BCMK.reshape(-1, count, numbers), [weights_LBSF], layer, [outputs])
    return found.reshape(batch, groups, count, outputs)


multiply_by_xla = jax.jit(products.multiply, static_argnums=3)


@any_shape
@given(
    st.tuples(*[st.integers(1, 3)] * 2, st.one_of(st.integers(1, 50), st.sampled_from([64, 65])), st.integers(1, 5)),
    st.integers(1, 70),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
)
def test_products_of_any_shape(shape, outputs, spare, layer):
    *shape, steps = shape
    check_multiply(multiply, np.random.default_rng(steps), "bfloat16", *shape, 32 * steps, outputs, spare, 3, layer)


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 37])
def test_a_row_has_the_same_bits_among_any_number_of_others(outputs):
    rng = np.random.default_rng(outputs)
    # Sums of numbers of all sizes show another order of adding.
    rows_MK = drawn(rng, (max(ROWS) + 3, 288)) * 10.0 ** rng.integers(-3, 4, (max(ROWS) + 3, 288))
    rows_MK, weights_NK = rows_MK.astype(jnp.bfloat16), drawn(rng, (outputs, 288), "bfloat16")
    whole = multiply(rows_MK[None, None], weights_NK[None, None], 0, outputs)[0, 0]
    for count, first in itertools.product(ROWS, (0, 3)):
        part = multiply(rows_MK[None, None, first : first + count], weights_NK[None, None], 0, outputs)
        np.testing.assert_array_equal(part[0, 0].view(np.int32), whole[first : first + count].view(np.int32))


def test_rows_that_no_cache_holds_are_taken_in_parts():
    rng = np.random.default_rng(4)
    # More than `_CACHED` numbers in all: parts of 32 rows.
    rows_MK, weights_NK = drawn(rng, (70, 16_384), "bfloat16"), drawn(rng, (40, 16_384), "bfloat16")
    found = multiply(rows_MK[None, None], weights_NK[None, None], 0, 40)[0, 0]
    np.testing.assert_allclose(found, exact(rows_MK) @ exact(weights_NK).T, atol=1e-5 * 16_384**0.5)
    alone = multiply(rows_MK[None, None, 69:], weights_NK[None, None], 0, 40)[0, 0]
    np.testing.assert_array_equal(found[69:], alone)


@POOLS
def test_whatever_the_pool_does_products_are_whole_and_records_freed(pool):
    """Of three matrices with rows and columns of their own, and of layers and parts."""
    rng = np.random.default_rng(6)
    calls = Calls(matrix_module(HOST, 3) if HAS_UNIT else dot_module(HOST, "bfloat16", 3), pool, threads=5)
    for rows, outputs in itertools.product((1, 9, 33), ((1, 5, 2), (90, 4, 300), (700, 1, 3))):
        rows_IMK = drawn(rng, (4, rows, 64), "bfloat16")
        stacks = [drawn(rng, (3, 2, count + spare, 128 + 8 * spare), "bfloat16") for spare, count in enumerate(outputs)]
        found = multiply_each(rows_IMK, stacks, 2, outputs, calls)
        for result, stack_LBSF, count in zip(found, stacks, outputs):
            parts = exact(stack_LBSF[2, :, :count, :128]).reshape(2, count, 2, 64)
            expected = np.einsum("bcmk,bnck->bcmn", exact(rows_IMK).reshape(2, 2, rows, 64), parts)
            np.testing.assert_allclose(result, expected.reshape(result.shape), atol=1e-4)
    calls.finish()


@pytest.mark.skipif(os.name == "nt", reason="a thread sleeps otherwise there")
def test_rows_are_multiplied_once_they_are_packed():
    """Whichever thread packs them sleeps before, so that the others wait for it."""
    head, nap = "@pack(ptr %record, i64 %index) #0 {\nentry:\n", "call i32 @usleep(i32 20000)\n"
    slow = matrix_module(HOST).replace(head, head + nap) + "declare i32 @usleep(i32)\n"
    assert nap in slow
    calls = Calls(slow, "has threads") if HAS_UNIT else calls_of(1, "has threads")
    rng = np.random.default_rng(12)
    rows_IMK, stack = drawn(rng, (1, 20, 512), "bfloat16"), drawn(rng, (1, 1, 200, 512), "bfloat16")
    (found,) = multiply_each(rows_IMK, [stack], 0, [200], calls)
    np.testing.assert_allclose(found[0], exact(rows_IMK)[0] @ exact(stack)[0, 0].T, atol=1e-3)
    calls.finish()


def at_a_border(array):
    """Return a copy that ends where no page may be read."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    refused = ctypes.CDLL(None).mprotect(ctypes.c_void_p(pages.ctypes.data + size), mmap.PAGESIZE, 0)
    assert refused == 0
    copy = pages[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.skipif(os.name == "nt", reason="pages are protected otherwise there")
def test_nothing_is_read_past_the_end():
    rng = np.random.default_rng(9)
    for rows, outputs in itertools.product((1, 5, 18), (1, 15, 17, 49)):
        rows_IMK = at_a_border(drawn(rng, (1, rows, 64), "bfloat16").astype(DTYPE))
        stack = at_a_border(drawn(rng, (1, 1, outputs, 64), "bfloat16"))
        (found,) = multiply_each(rows_IMK, [stack], 0, [outputs])
        np.testing.assert_allclose(found[0], exact(rows_IMK)[0] @ exact(stack)[0, 0].T, atol=1e-4)


def test_calls_from_many_threads_at_once_and_beside_products_of_xla():
    """XLA's own products configure the unit too."""
    rng = np.random.default_rng(2)
    weights_NK = drawn(rng, (300, 512), "bfloat16")

    @jax.jit
    def both(rows_MK):
        own = products.multiply(rows_MK[None, None], jnp.asarray(weights_NK)[None, None], 0, 300)[0, 0]
        by_xla = jax.lax.dot_general(rows_MK, weights_NK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return own, by_xla

    inputs = [drawn(rng, ((1, 3, 20, 90)[count % 4], 512), "bfloat16") for count in range(40)]
    expected = [both(rows) for rows in inputs]
    for own, by_xla in expected:
        np.testing.assert_allclose(own, by_xla, atol=1e-3)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for found, alone in zip(pool.map(both, inputs), expected):
                np.testing.assert_array_equal(found[0], alone[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forked processes there")
def test_a_forked_process_has_the_unit_too():
    rng = np.random.default_rng(10)
    rows_IMK, stack = drawn(rng, (1, 20, 64), "bfloat16"), drawn(rng, (1, 1, 40, 64), "bfloat16")
    (expected,) = multiply_each(rows_IMK, [stack], 0, [40])
    with warnings.catch_warnings():
        # The child does nothing of JAX's.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(not np.array_equal(multiply_each(rows_IMK, [stack], 0, [40])[0], expected))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


_FRESH = """
import pickle, sys
import jax, numpy as np
from jaxinfer.ops.cpu_kernels import machine_code
target, objects, operands, shapes = pickle.load(sys.stdin.buffer)
machine_code.load_objects(objects)
results = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(*each) for each in shapes])(*operands)
sys.stdout.buffer.write(np.asarray(results[0]).tobytes())
"""


@pytest.mark.slow
def test_a_fresh_process_is_given_the_code():
    rng = np.random.default_rng(11)
    rows_MK, weights_NK = drawn(rng, (20, 64), "bfloat16"), drawn(rng, (40, 64), "bfloat16")
    expected = np.asarray(multiply_by_xla(rows_MK[None, None], weights_NK[None, None], 0, 40))
    objects = machine_code.compiled_objects()
    (target,) = (each for each in objects if each.startswith(_name(HOST)))
    shapes = [((1, 20, 40), "float32"), *([((scratch_numbers(1, 20, 64),), "bfloat16")] if HAS_UNIT else [])]
    operands = rows_MK[None].astype(DTYPE), np.int32(0), weights_NK[None, None]
    given_to = pickle.dumps((target, {target: objects[target]}, operands, shapes))
    run = subprocess.run(
        [sys.executable, "-c", _FRESH], input=given_to, capture_output=True, check=True, env=_on_a_cpu(), timeout=120
    )
    np.testing.assert_array_equal(np.frombuffer(run.stdout, np.float32), expected.ravel())


def _on_a_cpu():
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _name(vectors):
    where = machine_code.IN_TILES if vectors.tiles_bfloat16 else ""
    pairs = "_pairs" if vectors.pairs_bfloat16 else ""
    source = machine_code._source_digest()
    return f"jaxinfer_multiply_by_1{where}_bfloat16_{vectors.lanes}x{vectors.rows}{pairs}_{source}"


def test_the_length_of_rows_alone_chooses_the_unit():
    def target(rows, numbers):
        rows_MK, weights_NK = jnp.zeros((rows, numbers), jnp.bfloat16), jnp.zeros((5, numbers), jnp.bfloat16)
        text = multiply_by_xla.lower(rows_MK[None, None], weights_NK[None, None], 0, 5).as_text()
        return text.partition("@jaxinfer_")[2].partition("(")[0].strip('"')

    for rows in (1, 16, 17, 200):
        assert f"jaxinfer_{target(rows, 64)}" == _name(HOST)
        assert f"jaxinfer_{target(rows, 80)}" == _name(replace(HOST, tiles_bfloat16=False))


_FEATURES = {"avx": True, "avx512f": True, "avx512bf16": True, "f16c": True, "amx-tile": True, "amx-bf16": True}


def test_processors_with_the_unit_have_code():
    triple = "x86_64-unknown-linux-gnu"
    vectors = describe_vectors(triple, _FEATURES)
    assert vectors.tiles("bfloat16", 64)
    assert not any(vectors.tiles(dtype, 64) for dtype in ("float32", "float16", "int8"))
    for missing in ("amx-tile", "amx-bf16"):
        assert not describe_vectors(triple, _FEATURES | {missing: False}).tiles("bfloat16", 64)
    machine = machine_of(triple, "sapphirerapids", _FEATURES)
    for count in (1, 3):
        text = machine.emit_assembly(parsed(matrix_module(vectors, count), triple))
        # Tiles of sums: four, two and two, and one; and that of a single row.
        assert text.count("tdpbf16ps") == 10
        for instruction in ("ldtilecfg", "tilerelease", "tileloadd", "tilestored"):
            assert instruction in text
    content = machine.emit_object(parsed(matrix_module(vectors), triple))
    assert b"handler" in content
    assert llvm.ObjectFileRef.from_data(content)


def test_a_process_that_may_not_use_the_unit_does_without(monkeypatch):
    described = describe_vectors("x86_64-unknown-linux-gnu", _FEATURES)
    monkeypatch.setattr(machine_code, "describe_vectors", lambda *_: described)
    for may in (False, True):
        monkeypatch.setattr(machine_code, "_may_use_tiles", lambda may=may: may)
        found = machine_code.host_vectors.__wrapped__()
        assert found == replace(described, tiles_bfloat16=may)
    monkeypatch.setattr(machine_code, "host_vectors", lambda: replace(described, tiles_bfloat16=False))
    with pytest.raises(ValueError, match="no matrix unit"):
        machine_code.load_objects({_name(described): b""})
