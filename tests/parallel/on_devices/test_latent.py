"""Latent attention on several devices: each has some of the query heads, and all of the cache's rows."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.errors import InvalidOption
from tests.decoding.covered_models import random_prompts
from tests.parallel.on_devices import test_bits
from tests.parallel.on_devices.meshes import check_logits, make_model, on_mesh
from tests.toys import random_params

# The last of these has fewer heads than devices.
MESHES = ("tensor=2", "expert=2,tensor=2", "data=2,expert=2", "sequence=2", "sequence=2,tensor=2", "tensor=8")


@pytest.fixture(scope="module")
def single():
    """Return a model, and the logits of two texts on one device."""
    lm = make_model("deepseek_v3")
    texts = random_prompts()[:2]
    return lm, texts, np.asarray(lm.logits(texts))


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(mesh, marks=pytest.mark.slow if mesh == MESHES[1] else pytest.mark.exhaustive) for mesh in MESHES],
)
def test_logits_are_those_of_one_device(single, mesh):
    lm, texts, expected = single
    split = on_mesh(lm, mesh)
    assert split.params["blocks"]["layer_0"]["attention"]["latent"]["kernel"].sharding.is_fully_replicated
    check_logits(split, texts, expected)


@pytest.mark.exhaustive
def test_layers_that_are_alike_run_in_stages_and_others_do_not(single):
    lm, texts, _ = single
    with pytest.raises(InvalidOption, match="pipeline=2"):
        on_mesh(lm, "pipeline=2")
    assert lm.config.experts is not None
    config = replace(lm.config, experts=replace(lm.config.experts, layer_pattern=(True,)))
    alike = LanguageModel(config, random_params(config, seed=3), lm.backend)
    check_logits(on_mesh(alike, "pipeline=2"), texts, np.asarray(alike.logits(texts)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [("tensor=2", "triforce"), ("expert=2,tensor=2", "prompt_lookup"), ("data=2,tensor=2", "layerskip")],
)
def test_bits_are_those_of_each_row_alone(monkeypatch, mesh, strategy):
    test_bits.check(monkeypatch, mesh, "deepseek_v3", "float32", [strategy])
