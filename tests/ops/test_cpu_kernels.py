"""The CPU's own kernels: for other processors, in a model's step, and where there are none."""

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
from jaxinfer.ops.cpu_kernels.best import CHUNK, best_module, best_places
from jaxinfer.ops.cpu_kernels.product_code import column_module, dot_module
from jaxinfer.ops.cpu_kernels.rows import rows_module, take_rows
from jaxinfer.ops.cpu_kernels.tiles import describe_vectors
from jaxinfer.ops.embedding import embed
from tests.ops.foreign_calls import HOST, POOLS, Calls, drawn
from tests.ops.test_cpu_attention import check_attention
from tests.ops.test_cpu_products import check_combine, check_multiply
from tests.toys import write_tiny_llama

# Processors whose instructions run on this one too: half and quarter vectors, and bfloat16 without products of pairs.
SMALLER = tuple(
    replace(HOST, lanes=lanes, rows=rows, pairs_bfloat16=False, dtypes=("float32", "bfloat16", "int8"))
    for lanes, rows in ((8, 2), (4, 2), (4, 4))
)


@pytest.fixture(params=SMALLER, ids=lambda vectors: f"{vectors.lanes}x{vectors.rows}")
def smaller_processor(request, monkeypatch):
    """Have the kernels compiled anew for a smaller processor."""
    for module in (machine_code, products):
        monkeypatch.setattr(module, "host_vectors", lambda: request.param)
    return request.param


def test_smaller_processors(smaller_processor):
    rng = np.random.default_rng(0)
    for rows, outputs in itertools.product((1, 2, 3, 6, 7), (1, 4, 37)):
        for dtype in smaller_processor.dtypes:
            check_multiply(rng, dtype, 2, 3, rows, 64, outputs, (1, 8), 2, 1)
        check_combine(rng, 2, 3, rows, outputs, 24, (1, 8), 2, 1)
        check_attention(rng, 2, 3, 2, rows, 24, 5 * outputs, (1, 8), 2, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
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
    makers = dot_module(vectors, dtype), column_module(vectors), attention_module(vectors), best_module(vectors)
    for assembly in (*makers, rows_module(vectors)):
        module = llvm.parse_assembly(assembly)
        module.triple = triple
        # Rows are copied by the machine's own means.
        assert register in machine.emit_assembly(module) or "memcpy" in assembly
        assert machine.emit_object(module)


def test_a_processor_of_an_unknown_make_has_none():
    assert describe_vectors("riscv64-unknown-linux-gnu", {}) is None
    assert describe_vectors("x86_64-unknown-linux-gnu", {}).lanes == 4
    assert "float16" not in describe_vectors("x86_64-unknown-linux-gnu", {}).dtypes


@POOLS
def test_whatever_the_pool_does_the_best_are_found_and_records_freed(pool):
    rng = np.random.default_rng(17)
    calls = Calls(best_module(HOST), pool, threads=5)
    for rows, length in itertools.product((0, 1, 9), (HOST.lanes, CHUNK - 1, CHUNK, CHUNK + 1, 20_011)):
        scores_RV = rng.integers(0, length // 4, (rows, length)).astype(np.float32)
        chunks = -(-length // CHUNK)
        places, _, _ = calls.call([scores_RV], [(rows,), (rows, chunks), (rows, chunks)])
        assert places.view(np.int32).tolist() == scores_RV.argmax(axis=1).tolist()
    calls.finish()


def test_the_best_are_looked_for_in_float32_of_a_vector_at_least():
    for scores in (jnp.zeros((2, HOST.lanes - 1)), jnp.zeros((0, 64)), jnp.zeros((2, 64), jnp.bfloat16)):
        with pytest.raises(ValueError, match="not looked for"):
            best_places(scores)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_a_table_are_taken_where_they_lie(dtype):
    table = drawn(np.random.default_rng(15), (37, 5), dtype)
    for ids in ([-3, 0, 36, 37, 2**30, 5, 5], [7], []):
        expected = np.asarray(table)[np.clip(ids, 0, 36).astype(int)]
        np.testing.assert_array_equal(jax.jit(take_rows)(table, jnp.asarray(ids, jnp.int32)), expected)
    # More numbers than a thread takes alone.
    many = drawn(np.random.default_rng(16), (1000, 300), dtype)
    ids = jnp.arange(999, -1, -1)
    np.testing.assert_array_equal(take_rows(many, ids), np.asarray(many)[::-1])
    own = choose_backend(dtype, "cpu")
    for backend in (own, replace(own, kernel_rows=0)):
        embedded = jax.jit(embed, static_argnums=2)(table, jnp.asarray([[2, 2, 40, -1]]), backend)
        np.testing.assert_array_equal(embedded[0], np.asarray(table, np.float32)[[2, 2, 36, 0]])
        pull = jax.vjp(lambda table, backend=backend: embed(table, jnp.asarray([[2, 2, 40]]), backend), table)[1]
        (counts,) = pull(jnp.ones((1, 3, 5), backend.compute_dtype))
        assert counts[:, 0].astype(int).tolist() == [0, 0, 2, *[0] * 33, 1]
    with pytest.raises(ValueError, match="16-bit"):
        take_rows(table.astype(jnp.float32), ids)


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
        products.multiply(rows, weights.astype(jnp.int8), 0, 7)
    mixed = weights.astype(jnp.bfloat16), weights.astype(jnp.int8)
    for two in (mixed, mixed[::-1]):
        with refused:
            products.multiply_by_each(rows.astype(jnp.bfloat16), two, 0, (7, 7))
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_reads_weights_and_cache_where_they_lie(tmp_path, dtype):
    """No product is left to XLA, and nothing as large as a layer's weights, keys or values is copied for a call."""
    sizes = {"model_dim": 128, "ffn_dim": 256, "head_dim": 32, "layer_pattern": (LayerKind(Rope(10000.0, 32)),)}
    lm = jaxinfer.load(write_tiny_llama(tmp_path, **sizes), dtype=dtype)
    lm.generate([[5, 6, 7]], max_new_tokens=200)
    text = next(each.as_text() for name, each in lm.programs._compiled.items() if name[0][0] == "decode")
    calls = [
        call.replace("%", "").split(", ")
        for call in re.findall(r"custom-call\(([^)]*)\), custom_call_target=\"jaxinfer_[ma]", text)
    ]
    # After rows and a layer: one matrix of the output, of the way down and of the vocabulary, two of the way up, three
    # of queries, keys and values; the cache, a bias and ranges.
    assert sorted(map(len, calls)) == [3] * (2 * 2 + 1) + [4] * 2 + [5] * 2 + [6] * 2
    stacks = [name for operands in calls for name in operands[2 : 4 if len(operands) == 6 else None]]
    assert not [name for name in stacks if re.match(r"(copy|slice|transpose|convert|reshape)", name)]
    assert ('custom_call_target="jaxinfer_take_rows' in text) == (dtype == "bfloat16")
    assert " dot(" not in text
    assert "__ynn" not in text


def test_without_llvm_all_is_left_to_xla(monkeypatch):
    assert choose_backend("float32", "cpu").kernel_rows == products.MAX_ROWS
    assert choose_backend("float32", "cpu", scan_layers=True).kernel_rows == 0
    assert choose_backend("bfloat16", "tpu").kernel_rows == 0
    monkeypatch.setattr(machine_code, "host_vectors", lambda: None)
    without = choose_backend("bfloat16", "cpu")
    assert without.kernel_rows == 0
    assert without.min_matmul_rows == 4
    assert choose_backend("float32", "cpu").transposed_kernels
