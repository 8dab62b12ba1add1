"""Hidden units in another order are the same function, and those active together share blocks: fewer are live."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel, load
from jaxinfer.bench.sparsity.order import with_units_in_order
from jaxinfer.bench.sparsity.shares import active_features
from jaxinfer.errors import InvalidOption
from jaxinfer.models.decoder import abstract_params
from jaxinfer.models.stacking import stack_params
from jaxinfer.models.unit_order import UNITS, in_order, live_share, order_units
from tests.toys import TINY_LLAMA, float32_backend, random_params

# Of 600 units, 128 are nearly always active, the others with one of four themes, and these are of one in eight tokens.
THEMES, OFTEN, NUM_UNITS, TOKENS = 4, 128, 600, 96
TEXT = np.random.default_rng(3).integers(1, 200, TOKENS).tolist()


def drawn_activity(seed: int, order):
    rng = np.random.default_rng(seed)
    themes_T = rng.integers(0, 2 * THEMES, TOKENS)
    of_units = np.repeat(np.arange(-1, THEMES), [OFTEN, *[(NUM_UNITS - OFTEN) // THEMES] * THEMES])
    active = (of_units == -1) | (of_units == themes_T[:, None])
    return (active & (rng.random((TOKENS, NUM_UNITS)) < 0.9))[:, order]


def test_units_that_are_active_together_share_blocks():
    """Of an order that is found in one text, few blocks are live in another."""
    shuffled = np.random.default_rng(0).permutation(NUM_UNITS)
    order = order_units(drawn_activity(1, shuffled))
    np.testing.assert_array_equal(np.sort(order), np.arange(NUM_UNITS))
    other = drawn_activity(2, shuffled)
    assert live_share(other) > 0.95
    # The block of units that are nearly always active, and in half of the places a theme's, or two that share it.
    assert live_share(other[:, order]) < 0.45
    # More rows need more of them.
    assert live_share(other[:, order]) < live_share(other[:, order], 1, 4) < live_share(other[:, order], 40) == 1


def test_parts_of_a_mesh_have_as_many_live_blocks_each():
    """The second of two devices does not wait for the first, which would have all units that are active often."""
    often = np.arange(1024) < 400
    active = np.random.default_rng(1).random((64, 1024)) < np.where(often, 0.5, 0.0)
    halves = [live_share(half) for half in np.split(active[:, order_units(active, 2)], 2, axis=1)]
    assert halves == [0.5, 0.5]
    with pytest.raises(InvalidOption, match="1024 hidden units do not split over 3 devices"):
        order_units(active, 3)


def test_live_blocks_are_those_with_a_unit_that_is_active_at_one_of_a_steps_places():
    active = np.zeros((5, UNITS + 4), bool)
    active[0, 3] = active[1, UNITS + 1] = active[4, 0] = True
    assert live_share(active) == pytest.approx(3 / 10)
    # Places 0 and 1, and 2 and 3; two sequences, of places 0 and 2, and 1 and 3.
    assert live_share(active, nodes=2) == pytest.approx(2 / 4)
    assert live_share(active, batch=2) == pytest.approx(2 / 4)
    assert live_share(active, batch=9) == 1


def themed():
    """Return a model of which a token's units are its theme's."""
    # A norm of hidden units has a scale for each.
    config = replace(TINY_LLAMA, activation="relu", ffn_dim=512, mlp_bias=True, inner_norms=True)
    params = random_params(config)
    rng = np.random.default_rng(5)
    directions = rng.normal(size=(THEMES, config.model_dim)).astype(np.float32)

    def change(path, leaf):
        *_, layer, name = [key.key for key in path]
        if layer != "gate":
            return leaf
        of_units = rng.integers(0, THEMES, 512)
        return jnp.asarray(2 * directions[of_units]) if name == "kernel" else jnp.full(512, -3.0)

    return config, jax.tree_util.tree_map_with_path(change, params)


def test_a_model_in_another_order_says_the_same_and_has_fewer_live_blocks():
    config, params = themed()
    lm = LanguageModel(config, params, float32_backend())
    ordered = with_units_in_order(lm, [TEXT])
    expected, found = (np.asarray(each.logits([TEXT])) for each in (lm, ordered))
    np.testing.assert_allclose(found, expected, atol=2e-5 * expected.std())
    before, after = (np.mean([live_share(layer) for layer in active_features(each, TEXT)]) for each in (lm, ordered))
    assert after < 0.75 * before


def test_no_texts_and_no_devices_are_refused():
    config, params = themed()
    lm = LanguageModel(config, params, float32_backend())
    for texts, parts, named in (([], 1, "no text"), ([[]], 1, "prompt"), ([TEXT], 0, "over 0 devices")):
        with pytest.raises(InvalidOption, match=named):
            with_units_in_order(lm, texts, parts)


@pytest.mark.slow
def test_stacked_and_transposed_kernels_are_put_in_order_too():
    config, params = themed()
    rng = np.random.default_rng(6)
    orders = [rng.permutation(512) for _ in range(config.num_layers)]
    backends = [float32_backend(scan_layers=True), replace(float32_backend(), cpu_kernels=False)]
    changed = in_order(params, orders)
    for backend in backends:
        other = abstract_params(config, backend)
        by_path = in_order(stack_params(params, other), orders)
        jax.tree.map(np.testing.assert_array_equal, by_path, stack_params(changed, other))


@pytest.mark.slow
def test_hidden_units_in_few_bits_are_refused(tiny_llama_folder):
    lm = load(tiny_llama_folder(), weights="int8")
    with pytest.raises(InvalidOption, match="hidden units in few bits cannot be put in order"):
        with_units_in_order(lm, [TEXT])
