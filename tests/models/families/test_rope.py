"""Rotary scaling is read alike from transformers 4 and 5, and every unknown part of it is refused by name."""

import numpy as np
import pytest

from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import Rope, RopeScaling
from jaxinfer.models.families.keys.config_reader import ConfigReader
from jaxinfer.models.families.keys.rope import read_rope
from jaxinfer.models.rope_frequencies import static_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}
LONGROPE = {"short_factor": [1, 1.5, 2.0], "long_factor": [2, 4, 8]}
HEAD_DIM = 6
EXPECTED = {
    "linear": ({"factor": 2}, RopeScaling("linear", 2.0, 4096)),
    "dynamic": ({"factor": 2.5}, RopeScaling("dynamic", 2.5, 4096)),
    "llama3": (LLAMA3, RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)),
    "yarn": (
        YARN,
        RopeScaling("yarn", 4.0, 4096, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5, truncate=False),
    ),
    "longrope": (
        {**LONGROPE, "original_max_position_embeddings": 1024},
        RopeScaling("longrope", 4.0, 1024, short_factors=(1.0, 1.5, 2.0), long_factors=(2.0, 4.0, 8.0)),
    ),
    "default": ({}, None),
}


def read(config):
    reader = ConfigReader(config, "llama")
    rope = reader.finish(read_rope(reader, 4096, HEAD_DIM))
    assert rope.dim == HEAD_DIM
    return rope.theta, rope.scaling


@pytest.mark.parametrize("kind", EXPECTED)
def test_versions_4_and_5_mean_the_same(kind):
    fields, expected = EXPECTED[kind]
    assert read({"rope_theta": 5e5, "rope_scaling": {"type": kind, **fields}}) == (5e5, expected)
    assert read({"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, "type": kind, **fields}}) == (5e5, expected)
    assert read({"rope_parameters": {"rope_theta": 5e5, "rope_type": kind, **fields}}) == (5e5, expected)


def test_absent_rope_keys_mean_unscaled_positions():
    assert read({}) == (10000.0, None)
    assert read({"rope_scaling": None, "rope_parameters": None}) == (10000.0, None)
    assert read({"rope_theta": 7, "rope_parameters": {"rope_theta": 7}}) == (7.0, None)


def test_yarn_takes_a_null_factor_as_the_ratio_of_lengths_and_zeros_as_absent():
    fields = {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 1024,
        "mscale": 0,
        "beta_fast": 0,
    }
    assert read({"rope_scaling": fields})[1] == RopeScaling("yarn", 4.0, 1024)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "longrope", "factor": 2}, "short_factor is missing"),
        ({"type": "longrope", **LONGROPE, "long_factor": [1, 2]}, "long_factor = [1, 2]"),
        ({"type": "longrope", **LONGROPE, "long_factor": [1, 2, 0]}, "long_factor = [1, 2, 0]"),
        ({"rope_type": "ntk"}, "rope_scaling.rope_type = 'ntk'"),
        ({"type": "mrope", "mrope_section": [1]}, "mrope"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": 0.5}, "factor = 0.5"),
        ({"type": "linear", "factor": True}, "factor = True"),
        ({"type": "linear", "factor": 2, "beta_fast": 3}, "beta_fast = 3"),
        ({"type": "linear", "rope_type": "dynamic", "factor": 2}, "contradicts"),
        ({"type": "dynamic", "factor": 2, "original_max_position_embeddings": 7}, "original_max_position_embeddings"),
        ({"type": "default", "factor": 2}, "factor = 2"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, "original_max_pos"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 2, "attention_factor": 0}, "attention_factor"),
        ({"rope_type": "yarn"}, "factor is missing"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_unknown_kinds_keys_and_values_are_refused_by_name(scaling, named):
    with pytest.raises(UnsupportedModel) as error:
        read({"rope_scaling": scaling})
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        ({"rope_theta": 1e-300}, 6),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, 6),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1e308}}, 6),
        ({"rope_scaling": {"type": "longrope", **LONGROPE, "original_max_position_embeddings": 1}}, 6),
        ({"rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": [1e-300, 1, 1]}}, 6),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e300}}, 6),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 2),
    ],
)
def test_numbers_that_give_no_finite_angles_are_refused(config, head_dim):
    with pytest.raises(UnsupportedModel, match=r"angles are not finite|it must be a number"):
        read_rope(ConfigReader(config, "llama"), 4096, head_dim)


def test_heads_of_more_lanes_than_any_has_are_refused_before_their_angles_are_computed():
    assert read_rope(ConfigReader({}, "llama"), 4096, 2**14).dim == 2**14
    with pytest.raises(UnsupportedModel, match="no head has more than 16384 rotary lanes"):
        read_rope(ConfigReader({}, "llama"), 4096, 2**24)


def test_contradictions_between_the_two_forms_are_refused():
    linear = {"type": "linear", "factor": 2}
    with pytest.raises(UnsupportedModel, match="keep one"):
        read({"rope_scaling": linear, "rope_parameters": linear})
    with pytest.raises(UnsupportedModel, match="contradicts the outer"):
        read({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})


@pytest.mark.parity
@pytest.mark.parametrize("high", [4.0, 1.0])
def test_llama3_frequencies_are_those_of_transformers_also_where_they_are_a_step(high):
    """Llama 4 Scout's are one: high_freq_factor is low_freq_factor."""
    transformers = pytest.importorskip("transformers")
    fields = {"rope_type": "llama3", **LLAMA3, "factor": 16.0, "high_freq_factor": high}
    config = transformers.LlamaConfig(
        head_dim=128, max_position_embeddings=131072, rope_parameters={**fields, "rope_theta": 5e5}
    )
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    reader = ConfigReader({"rope_theta": 5e5, "rope_scaling": fields}, "llama")
    found, _ = static_frequencies(read_rope(reader, 131072, 128))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
    plain = 5e5 ** -(np.arange(64) / 64)
    ratios = np.round(plain / found, 4)
    assert (set(ratios) == {1.0, 16.0}) == (high == 1.0)


@pytest.mark.parity
@pytest.mark.parametrize("kind", EXPECTED)
def test_what_transformers_5_writes_for_each_kind_is_read(kind):
    transformers = pytest.importorskip("transformers")
    fields = {"rope_type": kind, "rope_theta": 5e5, **EXPECTED[kind][0]}
    length = 4096 if kind != "llama3" else 131072
    written = transformers.LlamaConfig(max_position_embeddings=length, rope_parameters=fields).to_dict()
    reader = ConfigReader({"rope_parameters": written["rope_parameters"]}, "llama")
    assert reader.finish(read_rope(reader, 4096, HEAD_DIM)) == Rope(5e5, HEAD_DIM, EXPECTED[kind][1])
