"""The CPU's own kernels: for other processors, in a model's step, and where there are none."""

import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from llvmlite import binding as llvm

import jaxinfer
from jaxinfer.models.config import LayerKind, Rope
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cpu_kernels import machine_code, products
from jaxinfer.ops.cpu_kernels.attention import attend_to_seen
from jaxinfer.ops.cpu_kernels.attention_code import attention_module
from jaxinfer.ops.cpu_kernels.best import (
    CHUNK,
    best_module,
    best_of_classes_module,
    best_places,
    best_places_of_classes,
)
from jaxinfer.ops.cpu_kernels.few_bits.product_code import few_bits_module
from jaxinfer.ops.cpu_kernels.few_bits.tiles import supports
from jaxinfer.ops.cpu_kernels.norms import layer_norm_module
from jaxinfer.ops.cpu_kernels.panels.products import module_of
from jaxinfer.ops.cpu_kernels.product_code import dot_module
from jaxinfer.ops.cpu_kernels.rows import rows_module, take_rows
from jaxinfer.ops.cpu_kernels.tiles import Vectors, describe_vectors
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.few_bits.formats import FP8, INT8, MXFP4, int4, nf4
from jaxinfer.ops.matmul import product
from tests.ops.foreign_calls import HOST, POOLS, SMALLER, Calls, drawn
from tests.ops.test_cpu_attention import attend_directly, check_attention
from tests.ops.test_cpu_products import check_multiply, multiply_directly
from tests.toys import write_tiny_llama

SMALLER_ONES = pytest.mark.parametrize("vectors", SMALLER, ids=lambda vectors: f"{vectors.lanes}x{vectors.rows}")


def check_shapes(shapes, dtypes, multiply, attend):
    rng = np.random.default_rng(0)
    for rows, outputs in shapes:
        for dtype in dtypes:
            check_multiply(multiply, rng, dtype, 2, 3, rows, 64, outputs, (1, 8), 2, 1)
        check_attention(attend, rng, 2, 3, 2, rows, 24, 5 * outputs, (1, 8), 2, 1)


ALL_SHAPES = tuple(itertools.product((1, 2, 3, 6, 7), (1, 4, 37)))


@pytest.mark.slow
@SMALLER_ONES
def test_smaller_processors(vectors, monkeypatch):
    for module in (machine_code, products):
        monkeypatch.setattr(module, "host_vectors", lambda: vectors)
    directly = (functools.partial(call, vectors=vectors) for call in (multiply_directly, attend_directly))
    check_shapes(ALL_SHAPES, vectors.dtypes, *directly)


@pytest.mark.parametrize(
    ("vectors", "shapes"),
    [
        (SMALLER[0], ((7, 37),)),
        pytest.param(SMALLER[0], ALL_SHAPES, marks=pytest.mark.slow),
        *(pytest.param(each, ALL_SHAPES, marks=pytest.mark.exhaustive) for each in SMALLER[1:]),
    ],
    ids=lambda value: f"{value.lanes}x{value.rows}" if isinstance(value, Vectors) else f"{len(value)}",
)
def test_xla_calls_the_kernels_of_smaller_processors(vectors, shapes, monkeypatch):
    """The kernels are compiled anew, each program with them."""
    for module in (machine_code, products):
        monkeypatch.setattr(module, "host_vectors", lambda: vectors)
    # Not the programs of the processor at hand.
    by_xla = (
        jax.jit(lambda *arrays: products.multiply(*arrays[:3], arrays[3]), static_argnums=3),
        jax.jit(lambda *arrays, softcap, **sinks: attend_to_seen(*arrays, softcap, **sinks), static_argnames="softcap"),
    )
    check_shapes(shapes, vectors.dtypes, *by_xla)


AVX2, AVX512 = {"avx": True, "avx2": True, "f16c": True}, {"avx": True, "avx512f": True, "f16c": True}
OTHER_MAKES = pytest.mark.parametrize(
    ("triple", "processor", "features", "register"),
    [
        pytest.param("aarch64-unknown-linux-gnu", "neoverse-n1", {}, "v0.4s", marks=pytest.mark.slow),
        pytest.param("arm64-apple-macosx", "apple-m1", {}, "v0", marks=pytest.mark.exhaustive),
        pytest.param("x86_64-unknown-linux-gnu", "haswell", AVX2, "ymm0", marks=pytest.mark.slow),
        pytest.param("x86_64-pc-windows-msvc", "skylake-avx512", AVX512, "zmm0", marks=pytest.mark.exhaustive),
        pytest.param("x86_64-unknown-linux-gnu", "x86-64", {"f16c": True}, "xmm0", marks=pytest.mark.exhaustive),
    ],
)


@OTHER_MAKES
def test_processors_of_other_makes_have_code(triple, processor, features, register):
    vectors = describe_vectors(triple, features)
    assert vectors.dtypes == ("float32", "bfloat16", *vectors.dtypes[2:])
    assert set(vectors.dtypes) == {"float32", "bfloat16", "float16"}
    machine = machine_of(triple, processor, features)
    # Attention has the products of float32.
    makers = *(dot_module(vectors, dtype) for dtype in vectors.dtypes[1:]), attention_module(vectors)
    for assembly in (*makers, best_module(vectors), best_of_classes_module(vectors), rows_module(vectors)):
        # Rows are copied by the machine's own means.
        assert register in machine.emit_assembly(parsed(assembly, triple)) or "memcpy" in assembly


@OTHER_MAKES
def test_code_of_other_makes_is_encoded(triple, processor, features, register):
    vectors, machine = describe_vectors(triple, features), machine_of(triple, processor, features)
    for assembly in (
        *(dot_module(vectors, dtype) for dtype in vectors.dtypes),
        attention_module(vectors),
        attention_module(vectors, "int8"),
        *([attention_module(vectors, "uint8")] if "float16" in vectors.dtypes else []),
        best_module(vectors),
        best_of_classes_module(vectors),
        rows_module(vectors),
        layer_norm_module(vectors),
        *(module_of(vectors, form, "exact", "bfloat16", 1) for form in (INT8, int4(32, False))),
        *(few_bits_module(vectors, form, 1) for form in (FP8, nf4(64), MXFP4) if supports(vectors, form)),
    ):
        assert machine.emit_object(parsed(assembly, triple))


@pytest.mark.parametrize(
    ("processor", "more", "instruction", "register"),
    [
        ("alderlake", ("avx", "avx2", "f16c", "avxvnni"), "vpdpbusd", "ymm0"),
        pytest.param("haswell", ("avx", "avx2", "f16c"), "vpmaddubsw", "ymm0", marks=pytest.mark.slow),
        pytest.param("icelake-server", ("avx512f", "f16c", "avx512vnni"), "vpdpbusd", "zmm0", marks=pytest.mark.slow),
    ],
)
def test_bytes_are_multiplied_by_the_best_instruction_of_a_processor(processor, more, instruction, register):
    triple, features = "x86_64-unknown-linux-gnu", dict.fromkeys(more, True)
    vectors, machine = describe_vectors(triple, features), machine_of(triple, processor, features)
    for form in (INT8, int4(32, False)):
        assembly = machine.emit_assembly(parsed(module_of(vectors, form, "drafting", "float32", 1), triple))
        products = [line for line in assembly.splitlines() if f"\t{instruction}\t" in line]
        assert any(register[:3] in line for line in products)
        assert not any(f"\t{other}\t" in assembly for other in {"vpdpbusd", "vpmaddubsw"} - {instruction})


def machine_of(triple, processor, features):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    enabled = ",".join(f"+{feature}" for feature in features)
    return llvm.Target.from_triple(triple).create_target_machine(cpu=processor, features=enabled)


def parsed(assembly, triple):
    module = llvm.parse_assembly(assembly)
    module.triple = triple
    return module


def test_a_processor_of_an_unknown_make_has_none():
    assert describe_vectors("riscv64-unknown-linux-gnu", {}) is None
    assert describe_vectors("x86_64-unknown-linux-gnu", {}).lanes == 4
    assert "float16" not in describe_vectors("x86_64-unknown-linux-gnu", {}).dtypes


@POOLS
def test_whatever_the_pool_does_the_best_are_found_and_records_freed(pool):
    rng = np.random.default_rng(17)
    calls = Calls(best_module(HOST), pool, threads=5)
    for rows, length in itertools.product((0, 1, 9), (HOST.lanes, CHUNK - 1, CHUNK, CHUNK + 1, 20_011)):
        any_RV = rng.integers(0, length // 4, (rows, length)).astype(np.float32)
        last_RV = any_RV.copy()
        last_RV[:, -1] = length
        chunks = -(-length // CHUNK)
        for scores_RV in (any_RV, last_RV):
            places, _, _ = calls.call([scores_RV], [(rows,), (rows, chunks), (rows, chunks)])
            assert places.view(np.int32).tolist() == scores_RV.argmax(axis=1).tolist()
    calls.finish()


@POOLS
def test_whatever_the_pool_does_the_best_of_classes_are_found(pool):
    rng = np.random.default_rng(18)
    calls = Calls(best_of_classes_module(HOST), pool, threads=5)
    for (groups, rows), length in itertools.product(((1, 1), (3, 6)), (HOST.lanes, CHUNK - 1, CHUNK + 1, 20_011)):
        scores_RV = rng.integers(0, length // 4, (rows, length)).astype(np.float32)
        classes_BV = rng.integers(0, 37, (groups, length)).astype(np.int16)
        added_RK = np.where(rng.random((rows, 37)) < 0.9, -np.inf, 0).astype(np.float32)
        chunks = -(-length // CHUNK)
        shapes = [(rows,), (rows, chunks), (rows, chunks)]
        places, _, _ = calls.call([scores_RV, classes_BV, added_RK], shapes)
        of_rows_RV = np.repeat(classes_BV, rows // groups, axis=0).astype(int)
        expected = (scores_RV + np.take_along_axis(added_RK, of_rows_RV, axis=1)).argmax(axis=1)
        assert places.view(np.int32).tolist() == expected.tolist()
    calls.finish()


def test_classes_are_int16_of_as_many_places_as_there_are_numbers():
    scores, classes, added = jnp.zeros((4, 64)), jnp.zeros((2, 64), jnp.int16), jnp.zeros((4, 3))
    for wrong in ((scores, classes.astype(jnp.int32)), (scores, jnp.zeros((3, 64), jnp.int16))):
        with pytest.raises(ValueError, match="not looked for"):
            best_places_of_classes(*wrong, added)


def test_the_best_are_looked_for_in_float32_of_a_vector_at_least():
    for scores in (jnp.zeros((2, HOST.lanes - 1)), jnp.zeros((0, 64)), jnp.zeros((2, 64), jnp.bfloat16)):
        with pytest.raises(ValueError, match="not looked for"):
            best_places(scores)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_a_table_are_taken_where_they_lie(dtype):
    table, take = drawn(np.random.default_rng(15), (37, 5), dtype), jax.jit(take_rows)
    for ids in ([-3, 0, 36, 37, 2**30, 5, 5], []):
        expected = table[np.clip(ids, 0, 36).astype(int)]
        np.testing.assert_array_equal(take(table, np.asarray(ids, np.int32)), expected)
    # More numbers than a thread takes alone.
    many = drawn(np.random.default_rng(16), (1000, 300), dtype)
    np.testing.assert_array_equal(take(many, np.arange(999, -1, -1, dtype=np.int32)), many[::-1])
    own = choose_backend(dtype, "cpu")
    for backend in (own, replace(own, cpu_kernels=False)):
        embedded = jax.jit(embed, static_argnums=2)(table, np.array([[2, 2, 40, -1]], np.int32), backend)
        np.testing.assert_array_equal(embedded[0], np.asarray(table, np.float32)[[2, 2, 36, 0]])

        def total(table, backend=backend):
            return embed(table, jnp.asarray([[2, 2, 40]]), backend).sum()

        counts = np.asarray(jax.jit(jax.grad(total))(table))
        assert counts[:, 0].astype(int).tolist() == [0, 0, 2, *[0] * 33, 1]
    with pytest.raises(ValueError, match="16-bit"):
        take(table.astype(np.float32), np.zeros(1, np.int32))


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(8)
    # Where types are checked, as in the tests, lengths of one name that differ are found before.
    refused = pytest.raises((ValueError, TypeCheckError))
    rows, weights = jnp.asarray(drawn(rng, (2, 3, 4, 32))), jnp.asarray(drawn(rng, (2, 2, 7, 100)))
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
        products.multiply(rows, weights.astype(jnp.int8), 0, 7)
    mixed = weights.astype(jnp.bfloat16), weights.astype(jnp.int8)
    for two in (mixed, mixed[::-1]):
        with refused:
            products.multiply_by_each(rows.astype(jnp.bfloat16), two, 0, (7, 7))
    query, mask = jnp.asarray(drawn(rng, (2, 3, 2, 4, 32))), jnp.ones((2, 4, 7), bool)
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


@pytest.mark.slow
def test_gradients_are_those_of_xla():
    rng = np.random.default_rng(3)
    rows, weights, lines = drawn(rng, (2, 3, 4, 32)), drawn(rng, (2, 2, 7, 100)), drawn(rng, (2, 2, 9, 100))
    mask = rng.random((2, 2, 7)) < 0.6

    def own(rows, weights, lines, sinks_CR):
        first = products.multiply(rows, weights, 1, 6)
        held = weights, lines[:, :, :7], 1, jnp.asarray(mask)
        second = attend_to_seen(rows.reshape(2, 3, 2, 2, 32), *held, sink_logits_CR=sinks_CR)
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(3 * second))

    def plain(rows, weights, lines, sinks_CR):
        first = jnp.einsum("bcmk,bnck->bcmn", rows, weights[1, :, :6, :96].reshape(2, 6, 3, 32), precision="highest")
        keys, values = (stack[1, :, :7, :96].reshape(2, 7, 3, 32) for stack in (weights, lines))
        scores = jnp.einsum("bcrth,bsch->bcrts", rows.reshape(2, 3, 2, 2, 32), keys, precision="highest")
        sinks = jnp.broadcast_to(sinks_CR[..., None, None], (*scores.shape[:4], 1))
        scores = jnp.concatenate([jnp.where(mask[:, None, None], scores, -1e30), sinks], axis=-1)
        seen = jax.nn.softmax(scores)[..., :-1]
        second = jnp.einsum("bcrts,bsch->bcrth", seen, values, precision="highest")
        return jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(3 * second))

    arguments = rows, weights, lines, drawn(rng, (3, 2))
    by_both = (jax.jit(jax.grad(function, (0, 1, 2, 3)))(*arguments) for function in (own, plain))
    for found, expected in zip(*by_both):
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.any(expected)


@pytest.mark.parametrize("stacked", [1, 2])
def test_gradients_of_products_of_bfloat16_are_those_of_float32_but_for_rounding(stacked):
    """A matrix that is all there is, and a part of one of two."""
    rng = np.random.default_rng(12)
    count, width = (7, 96) if stacked == 1 else (6, 64)
    stack, rows = drawn(rng, (stacked, 1, 7, 96)), drawn(rng, (1, 2, 5, width // 2))

    def total(rows, stack):
        return jnp.sum(jnp.sin(products.multiply(rows, stack, stacked - 1, count)))

    def plain(rows, stack):
        part_NCK = stack[stacked - 1, 0, :count, :width].reshape(count, 2, -1)
        return jnp.sum(jnp.sin(jnp.einsum("bcmk,nck->bcmn", rows, part_NCK, precision="highest")))

    narrow = [jnp.asarray(each, jnp.bfloat16) for each in (rows, stack)]
    wide = [each.astype(jnp.float32) for each in narrow]
    for found, wanted in zip(jax.grad(total, (0, 1))(*narrow), jax.grad(plain, (0, 1))(*wide)):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_reads_weights_and_cache_where_they_lie(tmp_path, dtype):
    """No product is left to XLA, and nothing as large as a layer's weights, keys or values is copied for a call."""
    sizes = {"model_dim": 128, "ffn_dim": 256, "head_dim": 32, "layer_pattern": (LayerKind(Rope(10000.0, 32)),)}
    lm = jaxinfer.load(write_tiny_llama(tmp_path, **sizes), dtype=dtype)
    lm.generate([[5, 6, 7]], max_new_tokens=200)
    text = next(each.as_text() for name, each in lm.programs.live.items() if name[0][0] == "decode")
    calls = [
        call.replace("%", "").split(", ")
        for call in re.findall(r"custom-call\(([^)]*)\), custom_call_target=\"jaxinfer_[ma]", text)
    ]
    # After rows and a layer: one matrix of the output, of the way down and of the vocabulary, two of the way up, three
    # of queries, keys and values; the cache, a table, a mask, ranges and sinks.
    assert sorted(map(len, calls)) == [3] * (2 * 2 + 1) + [4] * 2 + [5] * 2 + [11] * 2
    stacks = [name for operands in calls for name in (operands[3:5] if len(operands) == 11 else operands[2:])]
    assert not [name for name in stacks if re.match(r"(copy|slice|transpose|convert|reshape)", name)]
    assert ('custom_call_target="jaxinfer_take_rows' in text) == (dtype == "bfloat16")
    assert " dot(" not in text
    assert "__ynn" not in text


def test_without_llvm_all_is_left_to_xla(monkeypatch):
    assert choose_backend("float32", "cpu").cpu_kernels
    assert choose_backend("float32", "cpu", scan_layers=True).cpu_kernels is False
    assert choose_backend("bfloat16", "tpu").cpu_kernels is False
    monkeypatch.setattr(machine_code, "host_vectors", lambda: None)
    without = choose_backend("bfloat16", "cpu")
    assert without.cpu_kernels is False
    assert without.min_matmul_rows == 4
    assert choose_backend("float32", "cpu").transposed_kernels


def test_a_compiled_program_names_the_source_of_the_kernels_that_it_calls(monkeypatch):
    def text() -> str:
        backend = choose_backend("float32", "cpu")
        kernel = jnp.ones((16, 64))
        return jax.jit(lambda rows: product(rows, kernel, backend)).lower(jnp.ones((1, 64))).as_text()

    before = text()
    assert before == text()
    monkeypatch.setattr(machine_code, "_source_digest", lambda: "of another version")
    assert before != text()
