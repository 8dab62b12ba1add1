"""Experts split over devices: each computes its own, holds no other's weights, and changes no bit."""

import functools

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer import MeshConfig
from jaxinfer.errors import InvalidOption
from jaxinfer.parallel.partitioner import Partitioner
from tests.checkpoint.test_experts import each_of_its_own, equal, write
from tests.decoding.covered_models import random_prompts
from tests.parallel.on_devices import test_bits
from tests.parallel.on_devices.meshes import check_logits, make_model, on_mesh
from tests.toys import TINY_LLAMA

# In the last, each device has half of the features of three of six experts.
MESHES = ("expert=2", "tensor=2", "data=2,expert=2", "expert=3", "sequence=2", "pipeline=2", "expert=2,tensor=2")


# Two key heads are copied over four devices, with half of the query heads and of their sinks each.
MESHES_OF_SINKS = (*MESHES, "tensor=4", "sequence=2,tensor=2", "sequence=4")


@pytest.fixture(scope="module")
def single():
    """Return a function that makes a model, with the logits of two texts on one device."""

    @functools.cache
    def make(name: str):
        # Two stages have a layer of each kind.
        lm = make_model(name, num_layers=4 if name == "gpt_oss" else 2)
        texts = random_prompts()[:2]
        return lm, texts, np.asarray(lm.logits(texts))

    return make


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        *(
            pytest.param(mesh, "qwen2_moe", marks=() if "expert=2,t" in mesh else pytest.mark.exhaustive)
            for mesh in MESHES
        ),
        *(pytest.param(mesh, "gpt_oss", marks=pytest.mark.exhaustive) for mesh in MESHES_OF_SINKS),
    ],
)
def test_logits_are_those_of_one_device(single, mesh, model):
    """Of a model with a shared expert, and of one with biases, limits and attention sinks."""
    lm, texts, expected = single(model)
    check_logits(on_mesh(lm, mesh), texts, expected)


@pytest.mark.parametrize(
    ("mesh", "model", "strategy"),
    [
        pytest.param("expert=2,tensor=2", "qwen2_moe", "prompt_lookup", marks=pytest.mark.exhaustive),
        pytest.param("data=2,expert=2", "qwen2_moe", "layerskip", marks=pytest.mark.exhaustive),
        pytest.param("expert=2", "qwen2_moe", "medusa+jacobi", marks=pytest.mark.exhaustive),
        pytest.param("expert=2", "qwen2_moe", "streams", marks=pytest.mark.exhaustive),
        pytest.param("expert=2,tensor=2", "qwen2_moe", "mtp", marks=pytest.mark.exhaustive),
        pytest.param("expert=2,tensor=2", "gpt_oss", "prompt_lookup", marks=pytest.mark.exhaustive),
        pytest.param("sequence=2,tensor=2", "gpt_oss", "lookahead", marks=pytest.mark.exhaustive),
    ],
)
def test_bits_are_those_of_each_row_alone(monkeypatch, mesh, model, strategy):
    test_bits.check(monkeypatch, mesh, model, "float32", [strategy])


@pytest.mark.slow
def test_each_device_reads_its_own_experts_and_all_are_saved(tmp_path):
    folder = write(tmp_path / "model", each_of_its_own())
    whole = jaxinfer.load(folder, scan_layers=False)
    split = jaxinfer.load(folder, scan_layers=False, mesh=MeshConfig(expert=2, tensor=2).build(jax.devices()[:4]))
    down = split.params["blocks"]["layer_2"]["mlp"]["experts"]["down"]
    assert {shard.data.shape for shard in down.addressable_shards} == {(2, 32, 12)}
    assert split.fingerprint == whole.fingerprint
    split.save(tmp_path / "saved")
    assert equal(jaxinfer.load(tmp_path / "saved", scan_layers=False).params, whole.params)


def test_experts_that_do_not_split_and_models_without_are_refused(tmp_path):
    folder = write(tmp_path / "model", each_of_its_own())
    three = MeshConfig(expert=3).build(jax.devices()[:3])
    with pytest.raises(InvalidOption, match="4 experts do not split over expert=3 devices: choose a divisor"):
        jaxinfer.load(folder, mesh=three)
    two = MeshConfig(expert=2).build(jax.devices()[:2])
    with pytest.raises(InvalidOption, match="family llama has no experts: leave expert=2 out"):
        Partitioner(two).check(TINY_LLAMA)
