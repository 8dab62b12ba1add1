"""A DFlash drafter computes what its published module does, whatever was written to its cache before."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.checkpoint.drafters.dflash import read_dflash
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.drafters.dflash import Drafter, default_features
from jaxinfer.models.model import Model
from jaxinfer.ops.backend import choose_backend
from tests.models.drafters.published_dflash import published_block, settings_for, write_published
from tests.toys import TINY_LLAMA, float32_backend, random_params

CONFIG = replace(TINY_LLAMA, num_layers=4)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
LENGTHS = (23, 9)


@pytest.mark.parametrize(
    ("changes", "scan_layers"),
    [
        ({}, False),
        pytest.param({"attention_bias": True}, True, marks=pytest.mark.slow),
        pytest.param(SLIDING, False, marks=pytest.mark.slow),
    ],
    ids=["published", "biases", "windows"],
)
def test_blocks_are_those_of_the_published_module(tmp_path, changes, scan_layers):
    """Two texts that grow unevenly: a prompt, then what a step took; blocks of before leave nothing behind."""
    folder, backend = write_published(tmp_path, settings_for(**changes)), float32_backend(scan_layers)
    dflash, params = read_dflash(folder, CONFIG, backend)
    assert (dflash.block_size, dflash.mask_token, dflash.features) == (6, 7, (1, 3))
    target = Model(Decoder(CONFIG, backend), random_params(CONFIG, scan_layers=scan_layers))
    rng = np.random.default_rng(1)
    hidden_BTF = jnp.asarray(rng.standard_normal((2, 32, 64)), jnp.float32)
    tokens_BT = jnp.asarray(rng.integers(0, 258, (2, 32)), jnp.int32)
    lengths_B = jnp.asarray(LENGTHS, jnp.int32)

    @jax.jit
    def run(hidden_BTF):
        drafter = Drafter(dflash, backend, params)
        first_B, taken_B = lengths_B - jnp.asarray([4, 1]), jnp.asarray([4, 1])
        cache = drafter.create_cache(2, 32, 5)
        cache = drafter.extend(hidden_BTF[:, :24], jnp.zeros_like(lengths_B), cache, lengths_B, first_B)

        def block(cache, start_B):
            roots_B = jnp.take_along_axis(tokens_BT, start_B[:, None], axis=1)[:, 0]
            return drafter.run_block(target, roots_B, start_B, cache, lengths_B)

        before_BND = block(cache, first_B)
        caught_up_BTF = jnp.take_along_axis(hidden_BTF, (first_B[:, None] + jnp.arange(5))[..., None], axis=1)
        cache = drafter.extend(caught_up_BTF, first_B, cache, lengths_B, taken_B)
        return before_BND, block(cache, lengths_B)

    found = run(hidden_BTF)
    table = np.asarray(target.params["embed"]["embedding"])
    for row, length in enumerate(LENGTHS):
        for states_BND, known in zip(found, (length - (4, 1)[row], length)):
            block = [int(tokens_BT[row, known]), *[7] * 5]
            wanted = published_block(tmp_path, np.asarray(hidden_BTF[row, :known]), table[block])
            np.testing.assert_allclose(states_BND[row], wanted, atol=1e-4)
            assert np.ptp(wanted, axis=0).mean() > 0.1  # places are not alike


def test_features_are_those_of_the_published_rule():
    """Outputs of layers 1, 9, 17, 25 and 33 of 36 are the inputs of those that follow."""
    assert default_features(36, 5) == (2, 10, 18, 26, 34)
    assert default_features(32, 5) == (2, 9, 16, 23, 30)
    assert default_features(36, 1) == (19,)
    assert default_features(2, 3) == (1,)


def test_weights_are_read_in_the_dtype_of_the_target(tmp_path):
    folder = write_published(tmp_path, settings_for())
    params = read_dflash(folder, CONFIG, choose_backend("bfloat16", "cpu"))[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
