"""Where weights are: what is saved on one mesh is loaded on another, bit for bit; drafters stand beside their model."""

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.mesh import parse_mesh
from tests.decoding.strategy_cases import CASES
from tests.parallel.on_devices.meshes import make_model
from tests.toys import write_tiny_llama

DRAFTERS = ("draft_model", "medusa")
SIZES = {"num_heads": 9, "num_kv_heads": 3, "ffn_dim": 63}


def test_a_llama_saved_on_four_devices_loads_on_two_and_on_one(tiny_llama_folder, tmp_path):
    source = tiny_llama_folder(**SIZES)
    four = jaxinfer.load(source, dtype="float32", mesh=parse_mesh("data=2,tensor=2").build(jax.devices()[:4]))
    assert len(jax.tree.leaves(four.params)[0].sharding.device_set) == 4
    first = four.save(tmp_path / "first")
    two = jaxinfer.load(first, dtype="float32", mesh=parse_mesh("tensor=2").build(jax.devices()[:2]))
    second = two.save(tmp_path / "second")
    one, whole = jaxinfer.load(second, dtype="float32"), jaxinfer.load(source, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, one.params, whole.params)
    assert one.tokenizer.encode("a b") == whole.tokenizer.encode("a b")
    for made in (first, second):
        before, after = (open_checkpoint(folder).tensors for folder in (source, made))
        assert before.shapes() == after.shapes()
    with pytest.raises(InvalidOption, match="overwrite"):
        four.save(second)
    assert four.save(second, overwrite=True) == second


@pytest.mark.slow
def test_a_model_saved_in_stages_loads_on_other_meshes_bit_for_bit(tmp_path):
    source = write_tiny_llama(tmp_path / "source")
    staged = jaxinfer.load(source, mesh=parse_mesh("pipeline=2").build(jax.devices()[:2]))
    assert staged.params["blocks"]["mlp"]["up"]["kernel"].addressable_shards[0].data.shape[0] == 1
    saved = staged.save(tmp_path / "saved")
    for mesh in (None, parse_mesh("tensor=2,pipeline=2").build(jax.devices()[:4]), "data=2,tensor=4"):
        expected, found = (jaxinfer.load(path, mesh=mesh).params for path in (source, saved))
        jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_a_model_of_no_checkpoint_has_no_configuration_to_save(tmp_path):
    with pytest.raises(InvalidOption, match="not loaded from a checkpoint"):
        make_model("llama").save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_what_is_loaded_for_a_strategy_is_placed_beside_the_model(single):
    one = single("llama")
    lm = one.on("tensor=2")
    drafter, heads = (lm.resolve(CASES[name].strategy("llama", one.lm, one.asked.texts)) for name in DRAFTERS)
    for strategy in (drafter, heads):
        assert {
            leaf.sharding.device_set == set(lm.programs.partitioner.mesh.devices.flat)
            for leaf in jax.tree.leaves(strategy.parameters)
        } == {True}
    kernel = drafter.parameters["blocks"]["layer_0"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (32, 32)
    output = heads.parameters["heads"][0]["output"]["kernel"]
    assert output.codes.addressable_shards[0].data.shape[0] == output.shape[0] // 2
