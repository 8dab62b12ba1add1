"""Experts load from a tensor each and from tensors of all of them, and are saved as they came."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.errors import InvalidCheckpoint
from jaxinfer.models.families.registry import family_of
from jaxinfer.notation import Params
from tests.toys import random_params

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "mlp_only_layers": [1], "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
FAMILY = family_of(CONFIG)
DECODER = FAMILY.translate(CONFIG)
Tensors = Mapping[str, np.ndarray]


@cache
def params() -> Params:
    return jax.tree.map(np.asarray, random_params(DECODER, seed=1))


def each_of_its_own() -> Tensors:
    """Return the tensors that Hugging Face publishes."""
    tensors = LoadedTensors(params(), FAMILY.tensor_names(DECODER), None)
    return {name: tensors.read(name, np.dtype(np.float32)) for name in tensors.shapes()}


def stacked(tensors: Tensors, layer: int, part: str) -> np.ndarray:
    return np.stack([tensors[f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"] for expert in range(4)])


def without_experts(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: values for name, values in tensors.items() if ".experts." not in name}


def joined(tensors: Tensors) -> Tensors:
    """Return the tensors as transformers 5 holds them: gate and up of all experts in one."""
    made = without_experts(tensors)
    for layer in (0, 2):
        wide = [stacked(tensors, layer, part) for part in ("gate_proj", "up_proj")]
        made[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate(wide, axis=1)
        made[f"model.layers.{layer}.mlp.experts.down_proj"] = stacked(tensors, layer, "down_proj")
    return made


def single(tensors: Tensors) -> Tensors:
    """Return the tensors as GGUF files have them: one for each kernel of all experts."""
    made = without_experts(tensors)
    for layer in (0, 2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            made[f"model.layers.{layer}.mlp.experts.{part}.weight"] = stacked(tensors, layer, part)
    return made


def write(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def equal(found: object, expected: object) -> bool:
    return jax.tree.all(jax.tree.map(lambda one, other: bool((np.asarray(one) == other).all()), found, expected))


@pytest.mark.parametrize(
    "form",
    [pytest.param(dict, marks=pytest.mark.slow), joined, single],
    ids=["each", "joined", "single"],
)
def test_experts_load_from_every_form_that_is_published(tmp_path, form: Callable[[Tensors], Tensors]):
    folder = write(tmp_path / "model", form(each_of_its_own()))
    assert equal(jaxinfer.load(folder, scan_layers=False).params, params())
    # The layers are two stacks and a single one: each parameter has its layer's tensors.
    scanned = jaxinfer.load(folder, scan_layers=True).params["blocks"]
    assert set(scanned) == {"layer_0", "layer_1", "layer_2"}
    assert equal(scanned["layer_2"]["mlp"], params()["blocks"]["layer_2"]["mlp"])


def test_a_missing_expert_and_one_too_many_are_refused_by_name(tmp_path):
    tensors = dict(each_of_its_own())
    lost = "model.layers.2.mlp.experts.3.down_proj.weight"
    kept = {name: values for name, values in tensors.items() if name != lost}
    with pytest.raises(InvalidCheckpoint, match=rf"missing tensor {lost}"):
        jaxinfer.load(write(tmp_path / "missing", kept))
    extra = "model.layers.1.mlp.experts.0.up_proj.weight"
    with pytest.raises(InvalidCheckpoint, match=f"no place for tensor {extra}"):
        jaxinfer.load(write(tmp_path / "extra", {**tensors, extra: tensors[lost]}))


@pytest.mark.slow
def test_a_model_is_saved_with_the_tensors_that_it_was_published_with(tmp_path):
    lm = jaxinfer.load(write(tmp_path / "model", joined(each_of_its_own())))
    lm.save(tmp_path / "saved")
    again = jaxinfer.load(tmp_path / "saved")
    assert equal(again.params, params())
    assert again.fingerprint == lm.fingerprint
