"""The first layers of a checkpoint are the model of so many layers: the same tensors, and nothing of the others."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer import LanguageModel
from jaxinfer.checkpoint.convert import convert
from jaxinfer.checkpoint.first_layers import first_layers
from jaxinfer.checkpoint.hf_folder import open_hf_folder
from jaxinfer.checkpoint.load import check_tensors
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.errors import InvalidCheckpoint, InvalidOption, JaxinferError
from jaxinfer.models.config import DecoderConfig, shallower
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import FAMILIES, decoder_config, family_of
from jaxinfer.models.stacking import arranged
from jaxinfer.ops.backend import choose_backend
from jaxinfer.planning.known_models import known_models, planned_config
from jaxinfer.server.fingerprint import system_fingerprint
from tests.checkpoint.gguf.files import gguf_tensors, hf_tensors, write_gguf
from tests.checkpoint.test_experts import CONFIG as EXPERTS
from tests.checkpoint.test_experts import each_of_its_own
from tests.models.families import (
    test_published_dense,
    test_published_experts,
    test_published_gemma,
    test_published_mistral_qwen,
    test_published_olmo,
    test_published_opt_gpt2,
    test_published_phi,
    test_published_relatives,
)
from tests.toys import TINY_LLAMA

COUNT = 3
PROMPT = [[5, 9, 30, 77, 12]]


class Nothing:
    """The tensors of a checkpoint of which the configuration alone is there."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        raise AssertionError(name)


def published() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the published configurations that other tests hold, each family's at least once."""
    modules = (
        *(test_published_dense, test_published_experts, test_published_gemma, test_published_mistral_qwen),
        *(test_published_olmo, test_published_opt_gpt2, test_published_phi, test_published_relatives),
    )
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, Mapping) and "model_type" in value and value["model_type"] in FAMILIES:
                try:
                    decoder_config(value)
                except JaxinferError:  # one that is there to be refused
                    continue
                yield name, value


def described(config: DecoderConfig) -> tuple[Any, ...]:
    """Return what a config says of each layer, and of all else."""
    experts = config.experts and replace(config.experts, layer_pattern=())
    return replace(config, layer_pattern=(), experts=experts), config.bodies


def test_every_published_configuration_has_first_layers():
    known = set()
    for name, config in published():
        whole = decoder_config(config)
        for count in {1, whole.num_layers // 2, whole.num_layers - 1}:
            found = decoder_config(first_layers(Checkpoint(name, config, Nothing()), count).config)
            assert found.num_layers == count
            assert found.bodies == whole.bodies[:count]
            assert described(found) == described(shallower(whole, count)), name
            known.add(found.family)
    assert len(known) > 25


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loading_some_layers_gives_the_model_of_their_tensors(tiny_llama_folder, scan):
    folder = tiny_llama_folder(num_layers=5)
    whole, lm = (jaxinfer.load(folder, layers=layers, scan_layers=scan) for layers in (None, COUNT))
    config = replace(TINY_LLAMA, num_layers=COUNT)
    assert lm.config == config
    params = arranged(whole.params, abstract_params(config, whole.backend))
    assert jax.tree.structure(lm.params) == jax.tree.structure(params)
    assert jax.tree.all(jax.tree.map(np.array_equal, lm.params, params))
    np.testing.assert_array_equal(lm.logits(PROMPT), LanguageModel(config, params, whole.backend).logits(PROMPT))
    assert np.abs(lm.logits(PROMPT) - whole.logits(PROMPT)).max() > 0.1
    assert system_fingerprint(lm) != system_fingerprint(whole)


def test_all_layers_are_the_checkpoint_itself(tiny_llama_folder):
    checkpoint = open_hf_folder(tiny_llama_folder(num_layers=5))
    assert first_layers(checkpoint, 5) is checkpoint
    assert first_layers(checkpoint, None) is checkpoint


class Watched:
    """Tensors that remember which of them were read."""

    def __init__(self, tensors: Any):
        self.tensors, self.read_names = tensors, set()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.tensors.shapes()

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        self.read_names.add(name)
        return self.tensors.read(name, dtype)


def test_nothing_of_other_layers_is_read(tiny_llama_folder, monkeypatch):
    checkpoint = open_hf_folder(tiny_llama_folder(num_layers=5))
    watched = Watched(checkpoint.tensors)
    monkeypatch.setattr("jaxinfer.model_loading.open_checkpoint", lambda *_, **__: replace(checkpoint, tensors=watched))
    jaxinfer.load("any", layers=COUNT)
    layers = {name.split(".")[2] for name in watched.read_names if name.startswith("model.layers.")}
    assert layers == {"0", "1", "2"}


@pytest.mark.parametrize(
    "source", ["folder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("orbax", "gguf", "int8"))]
)
def test_saved_first_layers_load_as_a_model_of_so_many_layers(tiny_llama_folder, tmp_path, source):
    path, options = tiny_llama_folder(num_layers=5), {}
    if source == "orbax":
        path = convert(path, tmp_path / "whole")
    elif source == "gguf":
        path = write_gguf(tmp_path / "model.gguf", gguf_tensors(hf_tensors()))
    elif source == "int8":
        options["weights"] = "int8"
    lm = jaxinfer.load(path, layers=COUNT if source != "gguf" else 1, **options)
    found = jaxinfer.load(lm.save(tmp_path / "saved"))
    assert found.config == lm.config
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, lm.params))
    if source != "int8":
        written = jaxinfer.load(convert(path, tmp_path / "made", layers=lm.config.num_layers))
        assert jax.tree.all(jax.tree.map(np.array_equal, written.params, lm.params))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_layers_with_experts_are_those_that_the_whole_model_has(tmp_path, count):
    """Layer 1 of three is dense; of the first layer alone nothing else is left."""
    save_file(dict(each_of_its_own()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    whole, lm = (jaxinfer.load(tmp_path, layers=layers) for layers in (None, count))
    assert lm.config.sparse_layers == (True, False)[:count]
    assert jax.tree.all(
        jax.tree.map(
            lambda one, other: np.array_equal(one, other),
            lm.params["blocks"],
            {name: whole.params["blocks"][name] for name in lm.params["blocks"]},
        )
    )


def test_a_missing_tensor_of_the_first_layers_is_still_named(tiny_llama_folder):
    checkpoint = open_hf_folder(tiny_llama_folder(num_layers=5))
    shapes = {name: shape for name, shape in checkpoint.tensors.shapes().items() if name != "model.norm.weight"}
    shapes["model.layers.4.extra.weight"] = (1,)
    broken = replace(checkpoint, tensors=Watched(checkpoint.tensors))
    broken.tensors.shapes = lambda: shapes
    cut = first_layers(broken, COUNT)
    family = family_of(cut.config)
    config = family.translate(cut.config)
    backend = choose_backend("float32", "cpu")
    with pytest.raises(InvalidCheckpoint, match=r"missing tensor model\.norm\.weight"):
        check_tensors(cut, family.tensor_names(config), abstract_params(config, backend))
    shapes["model.norm.weight"] = (config.model_dim,)
    with pytest.raises(InvalidCheckpoint, match=r"no place for tensor model\.layers\.4\.extra"):
        check_tensors(cut, family.tensor_names(config), abstract_params(config, backend))


@pytest.mark.parametrize("layers", [0, 6, -1, True])
def test_a_number_of_layers_that_the_model_has_not_is_refused(tiny_llama_folder, layers):
    folder = tiny_llama_folder(num_layers=5)
    with pytest.raises(InvalidOption, match="the model has 5 layers: choose 1 to that"):
        jaxinfer.load(folder, layers=layers)


def test_plans_are_of_the_first_layers():
    assert "smollm2-135m" in known_models()
    assert planned_config("smollm2-135m", 12) == shallower(planned_config("smollm2-135m"), 12)
    with pytest.raises(InvalidOption, match="layers 31: the model has 30 layers"):
        planned_config("smollm2-135m", 31)
