"""Experts in few bits on meshes: each device has codes of its own experts, or parts of them; logits of one device."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxinfer
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.errors import InvalidOption
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.layers import expert_stacks
from jaxinfer.parallel.mesh import parse_mesh
from tests.toys import random_params

# Half of each row is whole groups of 32.
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
FAMILY = family_of(CONFIG)
DECODER = FAMILY.translate(CONFIG)
TEXTS = [[5, 6, 7, 8, 11, 3], [9, 3, 2], [4] * 5, [7, 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    tensors = LoadedTensors(random_params(DECODER, seed=4), FAMILY.tensor_names(DECODER), None)
    values = {name: np.ascontiguousarray(tensors.read(name, np.dtype(np.float32))) for name in tensors.shapes()}
    (made / "config.json").write_text(json.dumps(CONFIG))
    save_file(values, made / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def one_device(folder):
    @functools.cache
    def load(weights: str):
        lm = jaxinfer.load(folder, weights=weights)
        return lm, np.asarray(lm.logits(TEXTS))

    return load


@pytest.mark.parametrize(
    ("weights", "mesh"),
    [
        pytest.param(weights, mesh, marks=pytest.mark.slow if (weights, mesh) == ONE else pytest.mark.exhaustive)
        for ONE in [("int4:group=32", "expert=2,tensor=2")]
        for weights in ("int4:group=32", "mxfp4", "int8")
        for mesh in ("expert=2,tensor=2", "expert=4", "tensor=2", "data=2,expert=2", "pipeline=2")
    ],
)
def test_logits_are_those_of_one_device(folder, one_device, tmp_path, weights, mesh):
    """Up to sums of parts, after which rows may be rounded to other bfloat16 numbers, and those be sent elsewhere."""
    one, expected = one_device(weights)
    parsed = parse_mesh(mesh)
    lm = jaxinfer.load(folder, weights=weights, mesh=parsed.build(jax.devices()[: parsed.num_devices]))
    found = np.asarray(lm.logits(TEXTS))
    errors = [np.abs(found[at, : len(text)] - expected[at, : len(text)]).max(-1) for at, text in enumerate(TEXTS)]
    assert np.quantile(np.concatenate(errors), 0.8) <= 0.02 * expected.std()
    split = parsed.expert * parsed.tensor * parsed.pipeline
    for stack in expert_stacks(lm.params):
        assert stack.codes.addressable_shards[0].data.size * split == stack.codes.size
    assert lm.fingerprint == one.fingerprint
    lm.save(tmp_path / "saved")
    again = jaxinfer.load(tmp_path / "saved")
    assert (np.asarray(again.logits(TEXTS)) == expected).all()


@pytest.mark.slow
def test_groups_that_a_mesh_would_cut_are_refused_in_one_line(folder):
    two = parse_mesh("tensor=2").build(jax.devices()[:2])
    with pytest.raises(InvalidOption, match=r"experts.0.down_proj.weight: its rows of 64 weights do not split over 2"):
        jaxinfer.load(folder, weights="int4:group=64", mesh=two)
