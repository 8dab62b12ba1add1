"""A loaded model's tensors are those that load to it, in whatever order, parts and shapes the checkpoint has them."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint.load import load_params
from jaxinfer.checkpoint.loaded import LoadedTensors
from jaxinfer.checkpoint.source import Checkpoint
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.families.registry import family_of
from jaxinfer.models.padding import pad_parameter, parameter_sources
from tests.toys import float32_backend, random_params

SIZES = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
# Neighbouring lanes and fused parts; heads' norms in another shape, or one by one; heads between others' rows.
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4": {"head_dim": 8, "num_key_value_heads": 2, "attention_bias": True},
    "cohere": {"num_key_value_heads": 2, "use_qk_norm": True},
    "stablelm": {"num_key_value_heads": 2, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    "gpt_neox": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CONFIGS)
def test_tensors_of_parameters_padded_or_not_load_to_them(model_type):
    config = {"model_type": model_type, **SIZES, **CONFIGS[model_type]}
    family = family_of(config)
    decoder = family.translate(config)
    names, backend = family.tensor_names(decoder), float32_backend(scan_layers=True)
    params = random_params(decoder, scan_layers=True)
    tensors = LoadedTensors(params, names, None)
    again = load_params(Checkpoint("here", config, tensors), names, abstract_params(decoder, backend))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    padding = parameter_sources(decoder, backend, shards=3)
    split = LoadedTensors(jax.tree.map(pad_parameter, params, padding), names, padding)
    for name, shape in tensors.shapes().items():
        expected = tensors.read(name, np.dtype(np.float32))
        assert expected.shape == shape
        np.testing.assert_array_equal(split.read(name, np.dtype(np.float32)), expected)


def test_whole_arrays_come_by_what_is_given():
    config = {"model_type": "cohere", **SIZES, **CONFIGS["cohere"]}
    decoder = family_of(config).translate(config)
    params, names, fetched = random_params(decoder), family_of(config).tensor_names(decoder), []

    def fetch(array):
        fetched.append(array.shape)
        return np.asarray(array) + 1

    plain, given = LoadedTensors(params, names, None), LoadedTensors(params, names, None, fetch)
    for name in plain.shapes():
        expected = plain.read(name, np.dtype(np.float32)) + 1
        np.testing.assert_array_equal(given.read(name, np.dtype(np.float32)), expected)
    assert len(fetched) == len(jax.tree.leaves(params))


def test_neighbouring_lanes_become_halves_of_what_turns():
    config = {"model_type": "glm4", **SIZES, **CONFIGS["glm4"]}
    names = family_of(config).tensor_names(family_of(config).translate(config))
    part = names.block["attention.query.kernel"]
    assert not isinstance(part, str | tuple)
    np.testing.assert_array_equal(part.rows(16), [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15])
