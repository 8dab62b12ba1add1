"""Weights in four bits as TPU kernels read them: the same weights, and products with them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.column_products import codes_of
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.few_bits.columns import (
    ColumnArray,
    by_columns,
    has_whole_tiles,
    layer_of,
    lies_by_columns,
    maybe_by_columns,
)
from jaxinfer.ops.few_bits.formats import FP8, GGUF_FORMATS, INT8, MXFP4, TWO_OF_FOUR, UNSIGNED, Format, int4, nf4
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.matmul import linear, product
from pallas_kernels.grouped_matmul.codes import widened
from tests.ops.test_few_bits import drawn
from tests.toys import TINY_LLAMA, random_params

FP8_BLOCKS = replace(FP8, group=128, scale_type="float32")
FORMS = {"int4": int4(64, False), "symmetric": int4(32, True), "Q4_1": GGUF_FORMATS["Q4_1"], "mxfp4": MXFP4}
TPU = replace(choose_backend("float32", "cpu", scan_layers=True, kernels="interpret"), cpu_kernels=False)
CONFIG = replace(TINY_LLAMA, model_dim=128, ffn_dim=256, head_dim=32, num_heads=4)


def draw(shape: tuple[int, ...], form) -> QuantizedArray:
    return round_to_nearest(jax.random.normal(jax.random.key(0), shape), form)


ALL = {**FORMS, **GGUF_FORMATS, "nf4": nf4(64), "fp8": FP8_BLOCKS}
ALL["halves"] = replace(FP8, group=32, scale_type="bfloat16")
ALL["zeros"] = Format(4, 128, UNSIGNED, has_zeros=True)


@pytest.mark.parametrize(
    "name", [name if name in ("Q6_K", "fp8") else pytest.param(name, marks=pytest.mark.exhaustive) for name in ALL]
)
def test_experts_are_the_same_by_columns_in_every_form(name):
    """And in one array a number: codes of 5 and 6 bits take a byte each."""
    form, rng = ALL[name], np.random.default_rng(0)
    one, other = (drawn(rng, form, 8, 512) for _ in range(2))
    array = jax.tree.map(lambda *parts: jnp.stack(parts), one, other)
    assert lies_by_columns(form, 512)
    columns = maybe_by_columns(array, 512)
    assert columns.codes.dtype == (jnp.uint4 if form.bits == 4 else jnp.int8)
    assert columns.shape == (2, 8, 512)
    np.testing.assert_array_equal(widened(codes_of(columns)), array.dequantize())
    for found in (columns, jax.tree.map(np.asarray, columns)):
        for part, stored in zip(found.by_rows().matrix, array.matrix, strict=True):
            assert part.dtype == stored.dtype
            np.testing.assert_array_equal(part, stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_weights_are_the_same_by_rows_and_by_columns(name):
    array = draw((2, 24, 128), FORMS[name])
    columns = by_columns(array)
    assert columns.shape == array.shape
    assert {part.dtype.name for part in columns.matrix} == {"uint4", "uint8" if name == "mxfp4" else "int16"}
    for found in (columns, jax.tree.map(np.asarray, columns)):
        for one, other in zip(found.by_rows().matrix, array.matrix, strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(columns.dequantize(), array.dequantize())


def test_only_what_a_kernel_multiplies_lies_by_columns():
    by_rows = INT8, FP8, TWO_OF_FOUR, replace(int4(64, True), is_ordered=True)
    assert not any(lies_by_columns(form, 256) for form in by_rows)
    assert [lies_by_columns(int4(64, False), width) for width in (256, 192, 96)] == [True, True, False]
    assert [has_whole_tiles(int4(64, False), width) for width in (256, 192)] == [True, False]
    assert not any(has_whole_tiles(form, 256) for form in (MXFP4, nf4(64), GGUF_FORMATS["Q4_K"], GGUF_FORMATS["Q8_0"]))
    assert [lies_by_columns(MXFP4, width) for width in (96, 192)] == [True, True]
    assert [lies_by_columns(GGUF_FORMATS["Q6_K"], width) for width in (256, 384)] == [True, False]


@pytest.mark.parametrize(
    "name",
    [
        "int4",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("symmetric", "mxfp4", "fp8")),
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in ("nf4", "Q4_K", "Q6_K", "Q8_0", "Q5_1", "zeros")
        ),
    ],
)
def test_a_layer_of_a_stack_is_multiplied(name):
    """By the interpreted kernel; rows are rounded to bfloat16, here before."""
    drawn_each = [drawn(np.random.default_rng(layer), ALL[name], 40, 256) for layer in range(3)]
    array = jax.tree.map(lambda *parts: jnp.stack(parts), *drawn_each)
    x = jax.random.normal(jax.random.key(1), (2, 3, 256)).astype(jnp.bfloat16).astype(jnp.float32)
    one = layer_of({"kernel": by_columns(array)}, jnp.int32(2))["kernel"]
    assert isinstance(one, ColumnArray)
    assert one.shape == (40, 256)
    found = jax.jit(lambda x, kernel: linear(x, kernel, None, TPU))(x, one)
    exact = np.einsum("btk,nk->btn", np.asarray(x, np.float64), np.asarray(array.dequantize()[2], np.float64))
    assert np.abs(found - exact).max() < 1e-5 * exact.std()
    again = linear(x, one, None, replace(TPU, kernels="xla"))
    assert np.abs(again - exact).max() < 1e-5 * exact.std()


@pytest.mark.parametrize(
    "name", ["Q8_0", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int4", "Q6_K", "mxfp4", "halves"))]
)
def test_tokens_read_a_table_that_lies_by_columns(name):
    """In the bits of the same table by rows, by the interpreted kernel and without one; ids end at the table's.

    A prompt's are read with the whole table.
    """
    table = jax.tree.map(jnp.asarray, drawn(np.random.default_rng(3), ALL[name], 1000, 256))
    columns, run = by_columns(table), jax.jit(embed, static_argnums=2)
    for ids in (jnp.asarray([[0, 999, 127], [128, 1000, -1]]), jnp.arange(1000)[None]):
        for backend in (TPU, replace(TPU, kernels="reference"), replace(TPU, kernels="xla")):
            np.testing.assert_array_equal(run(columns, ids, backend), embed(table, ids, backend))
        is_kernel = "name=take_columns" in str(jax.make_jaxpr(run, static_argnums=2)(columns, ids, TPU))
        assert is_kernel == (ids.size < 10)


@pytest.mark.parametrize("name", ["Q8_0", pytest.param("int4", marks=pytest.mark.slow)])
def test_logits_are_as_wide_as_their_sums(name):
    """Not rounded to the bfloat16 that layers compute in."""
    array = jax.tree.map(jnp.asarray, drawn(np.random.default_rng(4), ALL[name], 40, 256))
    x = jax.random.normal(jax.random.key(1), (3, 256)).astype(jnp.bfloat16)
    backend = replace(TPU, compute_dtype="bfloat16")
    found = product(x, by_columns(array), backend)
    assert found.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(array.dequantize(), np.float64).T
    assert np.abs(found - exact).max() < 1e-5 * exact.std()
    assert linear(x, by_columns(array), None, backend).dtype == jnp.bfloat16


@pytest.mark.exhaustive
def test_a_models_logits_are_those_of_the_cpu():
    """Up to rows that are rounded to other bfloat16 numbers; tables of one scale a row do not lie by columns."""

    def rounded(path, leaf):
        names = [key.key for key in path]
        form = int4(32, False) if names[-1] == "kernel" else INT8
        return round_to_nearest(leaf, form) if leaf.ndim == 2 else leaf

    backend = choose_backend("float32", "cpu")
    params = jax.tree_util.tree_map_with_path(rounded, random_params(CONFIG))
    cpu = LanguageModel(CONFIG, params, backend)
    scanned = jax.tree.map(lambda *layers: jnp.stack(layers), *params["blocks"].values())
    tpu = LanguageModel(CONFIG, {**params, "blocks": scanned}, replace(TPU, kernels="reference"))
    kinds = {type(leaf) for leaf in jax.tree.leaves(tpu.params, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))}
    assert ColumnArray in kinds
    assert type(tpu.params["embed"]["embedding"]) is QuantizedArray
    expected, found = (np.asarray(lm.logits([[5, 6, 7, 9, 11, 4]])) for lm in (cpu, tpu))
    assert np.abs(found - expected).max() < 0.02 * expected.std()
    assert tpu.fingerprint == cpu.fingerprint
