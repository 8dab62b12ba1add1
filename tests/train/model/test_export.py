"""A trained model, once written, is the same model when it is loaded."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer import LanguageModel
from jaxinfer.errors import UnsupportedModel
from jaxinfer.models.config import RopeScaling
from jaxinfer.models.families.registry import decoder_config
from jaxinfer.ops.backend import choose_backend
from tests.models.restack import arranged
from tests.toys import TINY_LLAMA, float32_backend, random_params, with_rope
from train.model.export import describe_config, save_hf_folder

TEXT = [list(range(40, 80))]
EVERYTHING = with_rope(
    replace(TINY_LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True, num_layers=3),
    scaling=RopeScaling("yarn", 4.0, 256, attention_factor=0.9),
)


TIED = replace(TINY_LLAMA, tied_embeddings=True)


@pytest.mark.parametrize(
    ("config", "scan_layers"),
    [
        (EVERYTHING, True),
        pytest.param(TIED, False, marks=pytest.mark.slow),
        pytest.param(TIED, True, marks=pytest.mark.slow),
        pytest.param(EVERYTHING, False, marks=pytest.mark.slow),
    ],
    ids=["everything-scanned", "tied", "tied-scanned", "everything"],
)
def test_loading_what_was_saved_gives_identical_logits(config, scan_layers, tmp_path):
    """Bit for bit, from stacked blocks as from separate ones, each loaded as the other too."""
    params = random_params(config, scan_layers=scan_layers)
    folder = save_hf_folder(tmp_path, config, params)
    expected_BTV = LanguageModel(config, params, float32_backend(scan_layers)).logits(TEXT)
    loaded = jaxinfer.load(folder, scan_layers=scan_layers)
    assert loaded.config == config
    np.testing.assert_array_equal(loaded.logits(TEXT), expected_BTV)
    other = jaxinfer.load(folder, scan_layers=not scan_layers)
    assert len(jax.tree.leaves(other.params)) != len(jax.tree.leaves(params))
    np.testing.assert_allclose(other.logits(TEXT), expected_BTV, atol=1e-4)


def test_dtype_of_the_parameters_is_kept(tmp_path):
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), random_params(TINY_LLAMA))
    loaded = jaxinfer.load(save_hf_folder(tmp_path, TINY_LLAMA, params), dtype="bfloat16", scan_layers=False)
    expected = arranged(TINY_LLAMA, params, choose_backend("bfloat16", "cpu", scan_layers=False))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("linear", 2.0, 1024),
        RopeScaling("dynamic", 3.0, 1024),
        RopeScaling("llama3", 8.0, 128, low_freq_factor=1.5, high_freq_factor=3.0),
        RopeScaling("yarn", 4.0, 256),
        RopeScaling("longrope", 4.0, 256, short_factors=(1.0, 1.5, 2.0, 2.5), long_factors=(1.0, 2.0, 3.0, 4.0)),
        RopeScaling("yarn", 4.0, 256, beta_fast=16.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.5, truncate=False),
    ],
)
@pytest.mark.parametrize("ends", [(), (0,), (0, 7)])
def test_every_configuration_survives(scaling, ends):
    config = replace(TINY_LLAMA, eos_token_ids=ends, bos_token_id=None, mlp_bias=bool(ends))
    config = with_rope(config, scaling=scaling)
    assert decoder_config(describe_config(config)) == config


def test_a_family_that_cannot_be_written_is_refused():
    with pytest.raises(UnsupportedModel, match="family 'other' cannot be written"):
        describe_config(replace(TINY_LLAMA, family="other"))
