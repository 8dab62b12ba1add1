"""What is saved on one mesh is loaded on another, bit for bit."""

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint.open import open_checkpoint
from jaxinfer.errors import InvalidOption
from tests.parallel.on_eight_devices.meshes import MESHES, make_single

SIZES = {"num_heads": 9, "num_kv_heads": 3, "ffn_dim": 63}


def test_a_llama_saved_on_eight_devices_loads_on_two_and_on_one(tiny_llama_folder, tmp_path):
    source = tiny_llama_folder(**SIZES)
    eight = jaxinfer.load(source, dtype="float32", mesh="data=2,tensor=4")
    assert len(jax.tree.leaves(eight.params)[0].sharding.device_set) == 8
    first = eight.save(tmp_path / "first")
    two = jaxinfer.load(first, dtype="float32", mesh=MESHES["tensor=2"].build(jax.devices()[:2]))
    second = two.save(tmp_path / "second")
    one, whole = jaxinfer.load(second, dtype="float32"), jaxinfer.load(source, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, one.params, whole.params)
    assert one.tokenizer.encode("a b") == whole.tokenizer.encode("a b")
    for made in (first, second):
        before, after = (open_checkpoint(folder).tensors for folder in (source, made))
        assert before.shapes() == after.shapes()
    with pytest.raises(InvalidOption, match="overwrite"):
        eight.save(second)
    assert eight.save(second, overwrite=True) == second


def test_a_model_of_no_checkpoint_has_no_configuration_to_save(tmp_path):
    with pytest.raises(InvalidOption, match="not loaded from a checkpoint"):
        make_single("gpt2").lm.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
