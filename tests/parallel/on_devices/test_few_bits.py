"""Weights in few bits on meshes: each device's part of the codes of one device, and the logits of one device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel
from jaxinfer.errors import InvalidOption
from jaxinfer.models.few_bits import in_few_bits
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.few_bits.columns import ColumnArray, by_columns
from jaxinfer.ops.few_bits.formats import GGUF_FORMATS, INT8, int4
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.ops.few_bits.split import pad_quantized
from jaxinfer.parallel.mesh import parse_mesh
from tests.checkpoint.gguf.files import gguf_tensors, hf_tensors, write_gguf
from tests.decoding.identity import keeps_bits
from tests.decoding.rows import request, run
from tests.parallel.on_devices.meshes import check_logits, on_mesh
from tests.toys import TINY_LLAMA, random_params, write_tiny_llama

# Three key/value heads are four on two devices, and features fill up whole groups of each.
SIZES = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 32, "model_dim": 64, "ffn_dim": 128}
TEXTS = [[5, 6, 7, 8, 11], [9, 3, 2], [4] * 8, [7, 1]]
ROUNDED = 0.02
ALL = (
    ("nf4:group=32", "tensor=2,pipeline=2"),
    ("int4:group=32", "sequence=2,tensor=2"),
    ("int8", "data=2,pipeline=2"),
    ("int8", "tensor=4"),
    ("int4:group=32,symmetric=yes", "tensor=2,data=2"),
    ("fp8", "tensor=2"),
)
OTHERS = [pytest.param(*each, marks=pytest.mark.exhaustive) for each in ALL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("few_bits"), **SIZES)


@pytest.fixture(scope="module")
def one_device(folder) -> Callable[[str], LanguageModel]:
    """Return a function that loads the model on one device, once."""
    made: dict[str, LanguageModel] = {}

    def get(weights: str) -> LanguageModel:
        if weights not in made:
            made[weights] = jaxinfer.load(folder, weights=weights)
        return made[weights]

    return get


def load_on(path: Path, weights: str, mesh: str) -> LanguageModel:
    parsed = parse_mesh(mesh)
    return jaxinfer.load(path, weights=weights, mesh=parsed.build(jax.devices()[: parsed.num_devices]))


def check(one: LanguageModel, lm: LanguageModel) -> None:
    """Logits and fingerprint are those of one device; a device holds no more than its part."""
    expected, found = (np.asarray(each.logits(TEXTS)) for each in (one, lm))
    # A sum of parts may differ in its last bit, and then the next row be rounded to another bfloat16.
    limit = 0 if keeps_bits(lm) else ROUNDED * expected.std()
    assert all(
        np.abs(found[at, : len(text)] - expected[at, : len(text)]).max() <= limit for at, text in enumerate(TEXTS)
    )
    assert lm.fingerprint == one.fingerprint
    codes = [each.codes for each in jax.tree.leaves(lm.params["blocks"], is_leaf=is_quantized) if is_quantized(each)]
    parts = lm.programs.partitioner.tensor * lm.programs.partitioner.pipeline
    assert sum(each.addressable_shards[0].data.size for each in codes) * parts == sum(each.size for each in codes) > 0


@pytest.mark.parametrize(
    ("weights", "mesh"),
    [
        pytest.param("int4:group=32", "tensor=2", marks=pytest.mark.slow),
        pytest.param("int8", "tensor=4", marks=pytest.mark.exhaustive),
        pytest.param("fp8", "tensor=2", marks=pytest.mark.exhaustive),
    ],
)
def test_without_kernels_that_round_rows_logits_are_those_of_one_device(one_device, weights, mesh):
    """What is multiplied is the same weight for weight: float32 by XLA tells them apart."""
    one = one_device(weights)
    plain = replace(one.backend, cpu_kernels=False)
    check_logits(
        on_mesh(one, mesh, cpu_kernels=False), TEXTS, LanguageModel(one.config, one.params, plain).logits(TEXTS)
    )


@pytest.mark.parametrize(
    ("weights", "mesh"),
    [("int4:group=32", "tensor=2"), *OTHERS],
)
def test_logits_are_those_of_one_device(folder, one_device, weights, mesh):
    check(one_device(weights), load_on(folder, weights, mesh))


@pytest.mark.slow
def test_a_model_of_one_device_is_split_and_saved_as_its_checkpoint_would_be(folder, one_device, tmp_path):
    """Part by part: what a mesh loads, and what is placed on it."""
    loaded = load_on(folder, "int4:group=32", "tensor=2")
    placed = on_mesh(one_device("int4:group=32"), "tensor=2")
    for one, other in zip(*(jax.tree.leaves(lm.params) for lm in (loaded, placed)), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)
    again = jaxinfer.load(loaded.save(tmp_path / "saved"))
    jax.tree.map(np.testing.assert_array_equal, again.params, one_device("int4:group=32").params)


def test_padding_cuts_no_group():
    """Of heads of 16 lanes, two to a run, the second is filled up."""
    array = QuantizedArray.of(INT8, [np.ones((2, 48), np.int8), np.ones((2, 1), np.float32)])
    places = np.concatenate([np.arange(16), np.full(16, -1), np.arange(32, 48), np.full(16, -1)])
    with pytest.raises(InvalidOption, match="padding its inputs to 64 for the mesh would cut runs of 32"):
        pad_quantized(array, (None, places))


@pytest.mark.slow
def test_stages_hold_their_own_layers(folder, one_device):
    staged, whole = load_on(folder, "int8", "pipeline=2"), one_device("int8")
    kernel = staged.params["blocks"]["mlp"]["down"]["kernel"]
    assert kernel.codes.addressable_shards[1].data.shape == (1, 64, 128)
    for layer in range(2):
        expected = whole.params["blocks"][f"layer_{layer}"]["mlp"]["down"]["kernel"].by_rows()
        for one, other in zip(kernel.matrix, expected.matrix, strict=True):
            np.testing.assert_array_equal(one[layer], other)


@pytest.mark.exhaustive
def test_the_blocks_of_a_file_are_split_by_layers(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(hf_tensors()), gguf.GGMLQuantizationType.Q4_1)
    check(jaxinfer.load(path, weights="gguf"), load_on(path, "gguf", "pipeline=2"))


@pytest.mark.slow
def test_bits_on_a_mesh_that_splits_sums_are_those_of_each_row_alone(tmp_path):
    lm = load_on(write_tiny_llama(tmp_path, **SIZES, num_layers=1), "int4:group=32", "data=2,tensor=2")
    requests = [request(text, 12) for text in ([5, 6, 5, 6, 5], [9], [3] * 12, [7, 8])]
    alone = [run(lm, [each])[0] for each in requests]
    for found, expected in zip(run(lm, requests, lm.resolve("prompt_lookup")), alone, strict=True):
        assert found.tokens == expected.tokens
        assert found.logprobs == expected.logprobs


def test_inputs_move_in_whole_groups_with_their_scales():
    """Of heads that are copied and filled up; a K-quant's units of eight groups move with their own units."""
    rng = np.random.default_rng(0)
    for form in (int4(32, False), INT8, GGUF_FORMATS["Q6_K"]):
        unit, parts = form.unit, []
        for shape, dtype in form.parts(3, 3 * form.unit).values():
            parts.append(rng.integers(1, 100, shape).astype(dtype))
        array = QuantizedArray.of(form, parts)
        places = np.concatenate(
            [np.arange(unit, 2 * unit), np.full(unit, -1), np.arange(unit), np.arange(unit, 3 * unit)]
        )
        rows = np.array([2, -1, 0, 1])
        found, plain = pad_quantized(array, (rows, places)).dequantize(), array.dequantize()
        expected = np.where((rows[:, None] < 0) | (places < 0), 0, plain[rows][:, places])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("weights", "mesh", "message"),
    [
        ("int4:group=32", "tensor=4", r"down_proj.weight: its rows of 64 weights do not split over 4 devices in whole"),
        ("int8", "tensor=3", r"down_proj.weight: padding its inputs to 66 for the mesh would cut runs of 32"),
    ],
)
def test_groups_that_do_not_split_are_refused_in_one_line(tmp_path, weights, mesh, message):
    folder = write_tiny_llama(tmp_path, **{**SIZES, "ffn_dim": 64, "num_layers": 1})
    with pytest.raises(InvalidOption, match=message) as caught:
        load_on(folder, weights, mesh)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocabulary", [1000, pytest.param(1001, marks=pytest.mark.slow)])
def test_each_device_reads_its_own_tokens_of_a_table_by_columns(vocabulary):
    """To the bit; a vocabulary that does not split evenly is on every device."""
    numbers = np.random.default_rng(0).standard_normal((vocabulary, 128), np.float32)
    table = by_columns(round_to_nearest(numbers, GGUF_FORMATS["Q8_0"]))
    ids = jnp.asarray([[0, 499, 500], [999, 7, 640]], jnp.int32)
    one = replace(choose_backend("float32", "cpu", kernels="interpret"), cpu_kernels=False)
    mesh = parse_mesh("data=2,tensor=2").build(jax.devices()[:4])
    found = jax.jit(embed, static_argnums=2)(table, ids, replace(one, mesh=mesh))
    np.testing.assert_array_equal(found, embed(table, ids, one))


def test_a_model_that_lies_as_a_tpu_reads_it_goes_onto_a_mesh():
    """Its vocabulary is padded there, and so are codes, scales and minima that lie by columns."""
    config = replace(TINY_LLAMA, tied_embeddings=True, model_dim=128, ffn_dim=256, head_dim=32, num_heads=4)
    backend = replace(choose_backend("float32", "cpu", kernels="reference"), cpu_kernels=False)
    params = in_few_bits(random_params(config), replace(INT8, group=64), "weights")
    assert params["embed"]["embedding"].form == replace(INT8, group=64)
    one = LanguageModel(config, params, backend)
    assert isinstance(one.params["embed"]["embedding"], ColumnArray)
    mesh = parse_mesh("tensor=2").build(jax.devices()[:2])
    two = LanguageModel(config, one.params, backend, mesh=mesh)
    assert two.params["embed"]["embedding"].shape[0] % 256 == 0
    expected, found = (np.asarray(lm.logits(TEXTS[:1])) for lm in (one, two))
    assert np.abs(found - expected).max() < ROUNDED * expected.std()
