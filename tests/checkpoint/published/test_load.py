"""What is done with published checkpoints in few bits: texts, conversion, meshes, plans, and what is refused."""

import json

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.convert import convert
from jaxinfer.errors import InvalidOption
from jaxinfer.ops.few_bits.quantized_array import is_quantized
from jaxinfer.planning.known_models import planned_config
from tests.checkpoint.published.cases import CASES
from tests.checkpoint.published.folders import plain_model, write_published
from tests.late_imports import late

late("torch")
pytestmark = pytest.mark.parity

PROMPTS = [[5, 9, 17, 5, 9, 17, 5, 9], [3, 3, 3, 4]]


@pytest.fixture(scope="module")
def model():
    return plain_model()


def leaves(lm):
    return jax.tree.leaves(lm.params, is_leaf=is_quantized)


@pytest.mark.exhaustive
def test_strategies_write_what_plain_decoding_writes(tmp_path, model):
    write_published(tmp_path, CASES["gptq_act_order"], model)
    lm = jaxinfer.load(tmp_path)
    plain = lm.generate(PROMPTS, max_new_tokens=16)
    drafted = lm.generate(PROMPTS, max_new_tokens=16, strategy="prompt_lookup")
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert [each.logprobs for each in drafted] == [each.logprobs for each in plain]
    assert sum(each.stats.drafted for each in drafted) > 0


def test_layers_that_are_scanned_have_one_form(tmp_path, model):
    """Inputs of one layer in an order of their own, of the other in the file's."""
    case = CASES["gptq_act_order"]
    drawn = iter(range(14))

    def pack(rng, outputs, width):
        return case.pack.func(rng, outputs, width, **{**case.pack.keywords, "act_order": next(drawn) % 14 < 7})

    weights = write_published(tmp_path, case._replace(pack=pack), model)
    lm = jaxinfer.load(tmp_path, scan_layers=True)
    kernel = lm.params["blocks"]["mlp"]["down"]["kernel"]
    found = jax.tree.map(np.asarray, kernel).dequantize()
    assert is_quantized(kernel)
    assert kernel.form.is_ordered
    for layer in range(2):
        np.testing.assert_allclose(found[layer], weights[f"model.layers.{layer}.mlp.down_proj.weight"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq_act_order", "nf4"])
def test_a_converted_folder_has_the_same_bits(tmp_path, model, name):
    """Or, with a dtype, the same numbers; and so does a loaded model that is saved."""
    write_published(tmp_path / "from", CASES[name], model)
    lm = jaxinfer.load(tmp_path / "from")
    convert(tmp_path / "from", tmp_path / "to")
    lm.save(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "to" / "config.json").read_text())
    for folder in ("to", "saved"):
        again = jaxinfer.load(tmp_path / folder)
        assert jax.tree.structure(again.params) == jax.tree.structure(lm.params)
        for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(lm.params)):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    convert(tmp_path / "from", tmp_path / "plain", dtype="float32")
    found = jaxinfer.load(tmp_path / "plain").params["blocks"]["layer_1"]["mlp"]["up"]["kernel"]
    kernel = jax.tree.map(np.asarray, lm.params["blocks"]["layer_1"]["mlp"]["up"]["kernel"])
    expected = kernel.dequantize() if is_quantized(kernel) else kernel
    assert np.asarray(found).tobytes() == expected.tobytes()


def test_on_a_mesh_bits_stay_but_for_inputs_in_an_order_of_their_own(tmp_path, model):
    """These are widened, and said to be."""
    said = []
    write_published(tmp_path, CASES["gptq_asymmetric_32"], model)
    lm, whole = jaxinfer.load(tmp_path, mesh="data=1", notice=said.append), jaxinfer.load(tmp_path)
    assert not said
    one, other = (each.params["blocks"]["layer_1"]["mlp"]["up"]["kernel"] for each in (lm, whole))
    assert one.form.has_zeros
    parts = [[np.asarray(part).tobytes() for part in each.by_rows().matrix] for each in (one, other)]
    assert parts[0] == parts[1]
    write_published(tmp_path, CASES["gptq_act_order"], model)
    lm = jaxinfer.load(tmp_path, mesh="data=1", notice=said.append)
    assert not any(map(is_quantized, leaves(lm)))
    expected = "matrices of gptq, 4 bits are widened to float32: inputs in an order of their own on a mesh"
    assert said == [f"{tmp_path}: {expected}"]


def test_weights_are_not_rounded_twice(tmp_path, model):
    write_published(tmp_path, CASES["fp8_blocks"], model)
    with pytest.raises(InvalidOption, match=r"'int8': those of .* are in few bits already \(fp8\): leave weights= out"):
        jaxinfer.load(tmp_path, weights="int8")


def test_a_plan_leaves_out_how_weights_are_stored(tmp_path, model):
    write_published(tmp_path, CASES["gptq"], model)
    assert planned_config(str(tmp_path)) == jaxinfer.load(tmp_path).config


def test_biases_of_zeros_that_a_model_does_not_have_are_left_out(tmp_path, model):
    """The first GPTQ files have one for every matrix; any other is refused."""
    case = CASES["gptq"]

    def pack_with(bias):
        def pack(rng, outputs, width):
            tensors, weights = case.pack(rng, outputs, width)
            return {**tensors, "bias": np.full(outputs, bias, np.float16)}, weights

        return case._replace(pack=pack)

    write_published(tmp_path, pack_with(0), model)
    assert any(map(is_quantized, leaves(jaxinfer.load(tmp_path))))
    convert(tmp_path, tmp_path / "to")
    jaxinfer.load(tmp_path / "to")
    write_published(tmp_path, pack_with(1), model)
    with pytest.raises(jaxinfer.errors.InvalidCheckpoint, match="leaves no place for tensors"):
        jaxinfer.load(tmp_path)


def test_activations_that_a_checkpoint_would_round_stay_and_are_named(tmp_path, model):
    write_published(tmp_path, CASES["compressed_int8"], model)
    said = []
    jaxinfer.load(tmp_path, notice=said.append)
    assert said == [f"{tmp_path}: activations stay as they are: the checkpoint's scheme for them is not used"]
