"""The CPU's own products and attention: against NumPy, for other processors, from many threads, in a model's step."""

import ctypes
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from llvmlite import binding as llvm

import jaxinfer
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.ops.attention import Sinks, attend
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels import machine_code, products
from jaxinfer.ops.cpu_kernels.attention import attend_to_seen, attends
from jaxinfer.ops.cpu_kernels.attention_code import CHUNK, attention_module, scratch_numbers
from jaxinfer.ops.cpu_kernels.product_code import column_module, dot_module
from jaxinfer.ops.cpu_kernels.tiles import describe_vectors
from jaxinfer.ops.matmul import product
from tests.toys import float32_backend, write_tiny_llama

HOST = machine_code.host_vectors()
assert HOST is not None, "the tests need llvmlite"
# Processors whose instructions run on this one too: half and quarter vectors, and bfloat16 without products of pairs.
SMALLER = tuple(
    replace(HOST, lanes=lanes, rows=rows, pairs_bfloat16=False, dtypes=("float32", "bfloat16"))
    for lanes, rows in ((8, 2), (4, 2), (4, 4))
)


@pytest.fixture(params=SMALLER, ids=lambda vectors: f"{vectors.lanes}x{vectors.rows}")
def smaller_processor(request, monkeypatch):
    """Have the kernels compiled anew for a smaller processor."""
    for module in (machine_code, products):
        monkeypatch.setattr(module, "host_vectors", lambda: request.param)
    return request.param


def drawn(rng, shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def exact(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def check_multiply(rng, dtype, batch, groups, rows, numbers, outputs, spare=(0, 0), layers=1, layer=0):
    rows_BCMK = drawn(rng, (batch, groups, rows, numbers), dtype)
    weights_LBSF = drawn(rng, (layers, batch, outputs + spare[0], groups * numbers + spare[1]), dtype)
    assert products.multiplies(dtype, numbers)
    found = jax.jit(products.multiply, static_argnums=3)(rows_BCMK, weights_LBSF, layer, outputs)
    parts = exact(weights_LBSF)[layer, :, :outputs, : groups * numbers].reshape(batch, outputs, groups, numbers)
    expected = np.einsum("bcmk,bnck->bcmn", exact(rows_BCMK), parts)
    np.testing.assert_allclose(found, expected, atol=1e-5 * numbers**0.5)


def check_combine(rng, batch, groups, rows, count, columns, spare=(0, 0), layers=1, layer=0):
    factors_BCMK = drawn(rng, (batch, groups, rows, count))
    lines_LBSF = drawn(rng, (layers, batch, count + spare[0], groups * columns + spare[1]))
    assert products.combines("float32", columns)
    found = jax.jit(products.combine, static_argnums=3)(factors_BCMK, lines_LBSF, layer, columns)
    parts = exact(lines_LBSF)[layer, :, :count, : groups * columns].reshape(batch, count, groups, columns)
    expected = np.einsum("bcmk,bkcn->bcmn", exact(factors_BCMK), parts)
    np.testing.assert_allclose(found, expected, atol=1e-5 * count**0.5)


def check_attention(rng, batch, heads, group, tokens, numbers, extent, spare=(0, 0), layers=1, layer=0):
    query = drawn(rng, (batch, heads, group, tokens, numbers))
    shape = layers, batch, extent + spare[0], heads * numbers + spare[1]
    keys, values = drawn(rng, shape), drawn(rng, shape)
    mask = rng.random((batch, tokens, extent)) < 0.6
    for row in mask:
        first, last = sorted(rng.integers(0, extent, 2))
        row[:, :first] = row[:, last + 1 :] = False
        row[:, first] = True
    assert attends("float32", numbers)
    found = jax.jit(attend_to_seen)(query, keys, values, layer, mask)
    of_slots = [
        exact(stack)[layer, :, :extent, : heads * numbers].reshape(batch, extent, heads, numbers)
        for stack in (keys, values)
    ]
    scores = np.einsum("bcrth,bsch->bcrts", exact(query), of_slots[0])
    scores = np.where(mask[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bcrts,bsch->bcrth", weights / weights.sum(-1, keepdims=True), of_slots[1])
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 18), st.integers(1, 5), st.integers(1, 70)),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
)
def test_rows_times_weights_of_any_shape(dtype, shape, spare, layer):
    if dtype not in HOST.dtypes:
        pytest.skip("this processor converts no halves")
    batch, groups, rows, vectors, outputs = shape
    numbers = vectors * HOST.lanes
    check_multiply(np.random.default_rng(rows), dtype, batch, groups, rows, numbers, outputs, spare, 3, layer)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 18), st.integers(1, 70), st.integers(1, 5)),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
)
def test_columns_added_up_of_any_shape(shape, spare, layer):
    batch, groups, rows, count, vectors = shape
    columns = vectors * HOST.lanes
    check_combine(np.random.default_rng(rows), batch, groups, rows, count, columns, spare, 3, layer)


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 9), st.integers(1, 5), st.integers(1, 3 * CHUNK + 1)),
    st.tuples(st.integers(0, 5), st.integers(0, 40)),
    st.integers(0, 2),
)
def test_attention_of_any_shape(shape, spare, layer):
    batch, heads, group, tokens, vectors, extent = shape
    rng = np.random.default_rng(extent)
    check_attention(rng, batch, heads, group, tokens, vectors * HOST.lanes, extent, spare, 3, layer)


def test_smaller_processors(smaller_processor):
    rng = np.random.default_rng(0)
    for rows, outputs in itertools.product((1, 2, 3, 6, 7), (1, 4, 37)):
        for dtype in smaller_processor.dtypes:
            check_multiply(rng, dtype, 2, 3, rows, 64, outputs, (1, 8), 2, 1)
        check_combine(rng, 2, 3, rows, outputs, 24, (1, 8), 2, 1)
        check_attention(rng, 2, 3, 2, rows, 24, 5 * outputs, (1, 8), 2, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("triple", "processor", "features", "register"),
    [
        ("aarch64-unknown-linux-gnu", "neoverse-n1", {}, "v0.4s"),
        ("arm64-apple-macosx", "apple-m1", {}, "v0"),
        ("x86_64-unknown-linux-gnu", "haswell", {"avx": True, "avx2": True, "f16c": True}, "ymm0"),
        ("x86_64-pc-windows-msvc", "skylake-avx512", {"avx": True, "avx512f": True, "f16c": True}, "zmm0"),
        ("x86_64-unknown-linux-gnu", "x86-64", {"f16c": True}, "xmm0"),
    ],
)
def test_processors_of_other_makes_have_code(triple, processor, features, register, dtype):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    vectors = describe_vectors(triple, features)
    assert dtype in vectors.dtypes
    enabled = ",".join(f"+{feature}" for feature in features)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=enabled)
    for assembly in (dot_module(vectors, dtype), column_module(vectors), attention_module(vectors)):
        module = llvm.parse_assembly(assembly)
        module.triple = triple
        assert register in machine.emit_assembly(module)
        assert machine.emit_object(module)


def test_a_processor_of_an_unknown_make_has_none():
    assert describe_vectors("riscv64-unknown-linux-gnu", {}) is None
    assert describe_vectors("x86_64-unknown-linux-gnu", {}).lanes == 4
    assert "float16" not in describe_vectors("x86_64-unknown-linux-gnu", {}).dtypes


class Calls:
    """XLA's side of a handler: its interface, whose pool answers as told, and a count of what is allocated."""

    def __init__(self, assembly, pool, threads):
        self.pool, self.threads = pool, threads
        self.records, self.errors, self.late, self.running = set(), 0, [], []
        assembly = assembly.replace("@malloc", "@test_malloc").replace("@free", "@test_free")
        library = ctypes.CDLL(None)
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.argtypes = [ctypes.c_void_p]

        def allocate(size):
            record = library.malloc(size)
            self.records.add(record)
            return record

        def free(record):
            self.records.remove(record)
            library.free(record)

        def schedule(request):
            if self.pool == "refuses":
                return self.error()
            task, record = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(request[3]), request[4]
            if self.pool == "runs at once":
                task(record)
            elif self.pool == "is late":
                self.late.append((task, record))
            else:
                self.running.append(threading.Thread(target=task, args=(record,)))
                self.running[-1].start()
            return None

        def count(request):
            if self.pool == "is missing":
                return self.error()
            ctypes.c_int64.from_address(request[3]).value = self.threads
            return None

        def destroy(request):
            assert request[2] == 0xBAD
            self.errors -= 1

        function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))
        self.kept = [function(each) for each in (destroy, schedule, count)]
        self.kept.append(ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(allocate))
        self.kept.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(free))
        places = [ctypes.cast(each, ctypes.c_void_p).value for each in self.kept]
        llvm.add_symbol("test_malloc", places[3])
        llvm.add_symbol("test_free", places[4])
        self.interface = (ctypes.c_int64 * 24)()
        for word, place in zip((8, 17, 18), places):
            self.interface[word] = place
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features().flatten()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features, jit=True
        )
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(assembly), machine)
        self.engine.finalize_object()
        address = self.engine.get_function_address("handler")
        self.handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)

    def error(self):
        self.errors += 1
        return 0xBAD

    def call(self, arguments, shapes):
        """Call the handler; results of these shapes hold NaN before."""
        results = [np.full(shape, np.nan, np.float32) for shape in shapes]
        arrays = [*arguments, *results]
        lengths = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
        buffers = [
            (ctypes.c_int64 * 6)(48, 0, 0, array.ctypes.data, array.ndim, ctypes.addressof(length))
            for array, length in zip(arrays, lengths)
        ]
        places = [ctypes.addressof(buffer) for buffer in buffers]
        operands = (ctypes.c_int64 * len(arguments))(*places[: len(arguments)])
        found = (ctypes.c_int64 * len(results))(*places[len(arguments) :])
        frame = (ctypes.c_int64 * 24)()
        frame[2], frame[9], frame[14] = (ctypes.addressof(each) for each in (self.interface, operands, found))
        assert self.handler(ctypes.addressof(frame)) is None
        return results

    def finish(self):
        """Run what the pool still has, and see that nothing is left behind."""
        for task, record in self.late:
            task(record)
        for thread in self.running:
            thread.join()
        assert self.errors == 0
        assert not self.records
        assert (len(self.late) > 0) == (self.pool == "is late")
        assert (len(self.running) > 0) == (self.pool == "has threads")


POOLS = pytest.mark.parametrize("pool", ["is missing", "refuses", "runs at once", "is late", "has threads"])


@POOLS
def test_whatever_the_pool_does_products_are_whole_and_records_freed(pool):
    """Of three matrices with rows and columns of their own, and of layers and parts."""
    rng = np.random.default_rng(6)
    calls = Calls(dot_module(HOST, "float32", 3), pool, threads=5)
    for rows, outputs in itertools.product((1, 4, 9), ((1, 5, 2), (90, 4, 300), (700, 1, 3))):
        rows_IMK = rng.standard_normal((4, rows, 64), dtype=np.float32)
        stacks = [
            rng.standard_normal((3, 2, count + spare, 128 + 8 * spare), dtype=np.float32)
            for spare, count in enumerate(outputs)
        ]
        found = calls.call([rows_IMK, np.array(2, np.int32), *stacks], [(4, rows, count) for count in outputs])
        for result, stack_LBSF, count in zip(found, stacks, outputs):
            parts = stack_LBSF[2, :, :count, :128].reshape(2, count, 2, 64)
            expected = np.einsum("bcmk,bnck->bcmn", rows_IMK.reshape(2, 2, rows, 64), parts)
            np.testing.assert_allclose(result, expected.reshape(result.shape), atol=1e-4)
    calls.finish()


@POOLS
def test_whatever_the_pool_does_attention_is_whole_and_records_freed(pool):
    rng = np.random.default_rng(12)
    calls = Calls(attention_module(HOST), pool, threads=5)
    for tokens, slots in itertools.product((1, 6), (CHUNK, 5 * CHUNK)):
        query_IXH = rng.standard_normal((4, 2 * tokens, 32), dtype=np.float32)
        keys, values = rng.standard_normal((2, 3, 2, slots, 72), dtype=np.float32)
        hidden_BTP = np.zeros((2, tokens, slots), np.float32)
        hidden_BTP[:, :, 100:] = np.finfo(np.float32).min
        hidden_BTP[1, :, :slots] = 0
        ranges = np.array([[0, 100], [0, slots]], np.int32)
        shapes = query_IXH.shape, (4 * slots // CHUNK, scratch_numbers(2 * tokens, 32))
        arguments = query_IXH, np.array(1, np.int32), keys, values, hidden_BTP, ranges
        found = calls.call(arguments, shapes)[0].reshape(2, 2, 2 * tokens, 32)
        for row, (_, last) in enumerate(ranges):
            of_slots = [stack[1, row, :last, :64].reshape(last, 2, 32) for stack in (keys, values)]
            scores = np.einsum("cxh,sch->cxs", query_IXH.reshape(2, 2, -1, 32)[row], of_slots[0])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = np.einsum("cxs,sch->cxh", weights / weights.sum(-1, keepdims=True), of_slots[1])
            np.testing.assert_allclose(found[row], expected, atol=1e-4)
    calls.finish()


@pytest.mark.parametrize("layer", [-4, -3, -1, 0, 2, 3, 1 << 24])
def test_a_layer_is_counted_as_jax_counts_it(layer):
    rng = np.random.default_rng(7)
    rows, weights = drawn(rng, (1, 1, 2, 32)), drawn(rng, (3, 1, 6, 32))
    found = jax.jit(products.multiply, static_argnums=3)(rows, weights, layer, 6)
    expected = products.multiply(rows, jax.jit(lambda stack, index: stack[index])(weights, layer)[None], 0, 6)
    np.testing.assert_array_equal(found, expected)


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(8)
    # Where types are checked, as in the tests, lengths of one name that differ are found before.
    refused = pytest.raises((ValueError, TypeCheckError))
    rows, weights = drawn(rng, (2, 3, 4, 32)), drawn(rng, (2, 2, 7, 100))
    for wrong in (
        (rows[:1], weights, 7),
        (rows, weights, 8),
        (rows, weights[..., :95], 7),
        (rows[:, :, :0], weights, 7),
    ):
        with refused:
            products.multiply(*wrong[:2], 0, wrong[2])
    with refused:
        products.multiply(rows, weights.astype(jnp.bfloat16), 0, 7)
    with refused:
        products.combine(drawn(rng, (2, 3, 4, 8)), weights, 0, 32)
    with refused:
        products.combine(drawn(rng, (2, 3, 4, 7)), weights, 0, 48)
    query, mask = drawn(rng, (2, 3, 2, 4, 32)), jnp.ones((2, 4, 7), bool)
    for keys, values, seen in (
        (weights[:, :1], weights, mask),
        (weights, weights[..., :95], mask),
        (weights, weights[:1], mask),
        (weights, weights, jnp.ones((2, 4, 8), bool)),
        (weights, weights, mask[..., :0]),
        (weights, weights, mask[:1]),
        (weights, weights, mask[:, :1]),
    ):
        with refused:
            attend_to_seen(query, keys, values, 0, seen)
    with refused:
        attend_to_seen(query.astype(jnp.bfloat16), weights, weights, 0, mask)


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


def test_a_query_has_the_same_results_among_any_others_and_in_a_longer_cache():
    rng = np.random.default_rng(9)
    query, keys, values = drawn(rng, (3, 2, 3, 7, 64)), drawn(rng, (1, 3, 700, 128)), drawn(rng, (1, 3, 700, 128))
    mask = rng.random((3, 7, 700)) < 0.5
    mask[:, :, 500:] = mask[1, :, 300:] = mask[2, :, :180] = False
    attend_to = jax.jit(attend_to_seen)
    whole = attend_to(query, keys, values, 0, mask)
    for tokens in (slice(0, 1), slice(3, 4), slice(2, 7)):
        np.testing.assert_array_equal(
            attend_to(query[..., tokens, :], keys, values, 0, mask[:, tokens]), whole[..., tokens, :]
        )
    for row in range(3):
        part = slice(row, row + 1)
        alone = attend_to(query[part], keys[:, part, :500], values[:, part, :500], 0, mask[part, :, :500])
        np.testing.assert_array_equal(alone, whole[part])


def test_a_query_that_sees_nothing_gets_the_mean_of_all_and_spoils_no_other():
    rng = np.random.default_rng(10)
    query, keys, values = drawn(rng, (2, 1, 1, 3, 32)), drawn(rng, (1, 2, 300, 32)), drawn(rng, (1, 2, 300, 32))
    mask = np.zeros((2, 3, 300), bool)
    mask[0, ::2, 60:90] = True
    found = attend_to_seen(query, keys, values, 0, jnp.asarray(mask))
    means = np.asarray(values[0]).mean(1)
    np.testing.assert_allclose(found[0, 0, 0, 1], means[0], atol=1e-5)
    np.testing.assert_allclose(found[1, 0, 0], np.tile(means[1], (3, 1)), atol=1e-5)
    mask[0, 1] = mask[0, 0]
    seen = attend_to_seen(query, keys, values, 0, jnp.asarray(mask))
    np.testing.assert_array_equal(found[0, 0, 0, ::2], seen[0, 0, 0, ::2])


@pytest.mark.parametrize("key", [np.nan, np.inf, -np.inf, 3e38])
def test_hidden_keys_count_for_nothing_whatever_they_are(key):
    rng = np.random.default_rng(13)
    query, keys, values = drawn(rng, (1, 1, 1, 2, 32)), drawn(rng, (1, 1, 200, 32)), drawn(rng, (1, 1, 200, 32))
    mask = jnp.ones((1, 2, 200), bool).at[..., 20].set(False).at[:, 0, 128:].set(False)
    expected = attend_to_seen(query, keys, values, 0, mask)
    np.testing.assert_array_equal(attend_to_seen(query, keys.at[0, 0, 20].set(key), values, 0, mask), expected)


def test_great_and_small_scores():
    """Weights far apart neither overflow nor become nothing where they are all small."""
    rng = np.random.default_rng(11)
    keys, values = drawn(rng, (1, 1, 300, 32)), drawn(rng, (1, 1, 300, 32))
    for size in (1e-3, 30.0, 1e4):
        query = drawn(rng, (1, 1, 1, 5, 32)) * size
        scores = np.einsum("th,sh->ts", exact(query)[0, 0, 0], exact(keys)[0, 0])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weights / weights.sum(-1, keepdims=True) @ exact(values)[0, 0]
        found = attend_to_seen(query, keys, values, 0, jnp.ones((1, 5, 300), bool))[0, 0, 0]
        np.testing.assert_allclose(found, expected, atol=2e-5 * max(1.0, size))


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
    mask = jnp.asarray(rng.random((2, 2, 7)) < 0.6)

    def own(rows, weights, factors, lines):
        first, second = products.multiply(rows, weights, 1, 6), products.combine(factors, lines, 1, 32)
        third = attend_to_seen(rows.reshape(2, 3, 2, 2, 32), weights, lines[:, :, :7], 1, mask)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.cos(second)) + jnp.sum(jnp.sin(3 * third))

    def plain(rows, weights, factors, lines):
        first = jnp.einsum("bcmk,bnck->bcmn", rows, weights[1, :, :6, :96].reshape(2, 6, 3, 32), precision="highest")
        second = jnp.einsum("bcmk,bkcn->bcmn", factors, lines[1, :, :7, :96].reshape(2, 7, 3, 32), precision="highest")
        keys, values = (stack[1, :, :7, :96].reshape(2, 7, 3, 32) for stack in (weights, lines))
        scores = jnp.einsum("bcrth,bsch->bcrts", rows.reshape(2, 3, 2, 2, 32), keys, precision="highest")
        seen = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30))
        third = jnp.einsum("bcrts,bsch->bcrth", seen, values, precision="highest")
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.cos(second)) + jnp.sum(jnp.sin(3 * third))

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
    calls = [
        call.replace("%", "").split(", ")
        for call in re.findall(r"custom-call\(([^)]*)\), custom_call_target=\"jaxinfer_", text)
    ]
    # After rows and a layer: one matrix of the output, of the way down and of the vocabulary, two of the way up, three
    # of queries, keys and values; the cache, a bias and ranges.
    assert sorted(map(len, calls)) == [3] * (2 * 2 + 1) + [4] * 2 + [5] * 2 + [6] * 2
    stacks = [name for operands in calls for name in operands[2 : 4 if len(operands) == 6 else None]]
    assert not [name for name in stacks if re.match(r"(copy|slice|transpose|convert|reshape)", name)]
    assert " dot(" not in text
    assert "__ynn" not in text


def test_attention_to_keys_and_values_of_two_dtypes_is_left_to_xla():
    rng = np.random.default_rng(14)
    query, keys, values = drawn(rng, (1, 2, 4, 32)), drawn(rng, (1, 40, 64)), drawn(rng, (1, 40, 64), "bfloat16")
    mask = jnp.ones((1, 2, 40), bool)
    own, by_xla = (
        attend(query, keys, values, mask, 0.1, backend)
        for backend in (float32_backend(), replace(float32_backend(), kernel_rows=0))
    )
    np.testing.assert_allclose(own, by_xla, atol=1e-5)


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
    text = jax.jit(lambda x, w: product(x, w, backend, transposed=True)).lower(rows, weights.T).as_text()
    assert "jaxinfer_multiply" not in text


def test_without_llvm_all_is_left_to_xla(monkeypatch):
    assert choose_backend("float32", "cpu").kernel_rows == products.MAX_ROWS
    assert choose_backend("float32", "cpu", scan_layers=True).kernel_rows == 0
    assert choose_backend("bfloat16", "tpu").kernel_rows == 0
    monkeypatch.setattr(machine_code, "host_vectors", lambda: None)
    without = choose_backend("bfloat16", "cpu")
    assert without.kernel_rows == 0
    assert without.min_matmul_rows == 4
    assert choose_backend("float32", "cpu").transposed_kernels
