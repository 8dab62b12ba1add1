"""Properties of the decoder that hold without a reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.models.config import Rope, RopeScaling
from jaxinfer.models.decoder import abstract_params, init_params, logical_axes
from jaxinfer.models.positions import rotary_tables
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.rotation import rotate
from tests.models.dense import dense_logits
from tests.models.restack import arranged, scanned
from tests.toys import TINY_LLAMA, float32_backend, random_params

EVERYTHING = replace(TINY_LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True)
TIED = replace(TINY_LLAMA, tied_embeddings=True)
TEXTS = np.random.default_rng(0).integers(2, 258, (2, 40)).tolist()


@pytest.mark.parametrize("scan_layers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scanned_and_unrolled_layers_are_what_the_definition_says(scan_layers):
    params = random_params(EVERYTHING)
    expected = np.stack([dense_logits(EVERYTHING, params, text) for text in TEXTS])
    held = scanned(EVERYTHING, params) if scan_layers else params
    found = LanguageModel(EVERYTHING, held, float32_backend(scan_layers)).logits(TEXTS)
    assert expected.std() > 1
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_logits_see_no_later_token_and_no_other_row():
    lm = LanguageModel(TINY_LLAMA, random_params(TINY_LLAMA), float32_backend())
    first, second = TEXTS
    changed = [[*first[:20], 7, *first[21:]], second]
    before, after = np.asarray(lm.logits(TEXTS)), np.asarray(lm.logits(changed))
    np.testing.assert_array_equal(after[1], before[1])
    np.testing.assert_array_equal(after[0, :20], before[0, :20])
    assert (np.abs(after[0, 20:] - before[0, 20:]).max(axis=-1) > 1e-3).all()


@pytest.mark.parametrize(
    ("config", "scan_layers"),
    [
        pytest.param(EVERYTHING, True, id="biases-scanned"),
        pytest.param(TIED, False, id="tied-single"),
        pytest.param(EVERYTHING, False, id="biases-single", marks=pytest.mark.slow),
        pytest.param(TIED, True, id="tied-scanned", marks=pytest.mark.slow),
    ],
)
def test_abstract_parameters_and_axes_describe_the_real_ones(config, scan_layers):
    backend = replace(choose_backend("bfloat16", "tpu", scan_layers), kernels="xla")
    params = init_params(config, backend, jax.random.key(0))
    abstract = abstract_params(config, backend)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )
    axes = logical_axes(config, backend)
    is_spec = jax.sharding.PartitionSpec
    ranks = jax.tree.map(lambda spec: len(spec), axes, is_leaf=lambda node: isinstance(node, is_spec))
    assert ranks == jax.tree.map(lambda leaf: leaf.ndim, params)


@pytest.mark.parametrize("kind", [None, "linear", "llama3", "yarn", "dynamic"])
def test_rotated_products_depend_on_the_distance_alone(kind):
    scaling = None if kind is None else RopeScaling(kind, 4.0, 64)
    rope = Rope(10000.0, 16, scaling)
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(query_at: int, key_at: int) -> float:
        def rotated(head, position):
            tables = rotary_tables(rope, jnp.array([[position]]), jnp.array([300]), jnp.dtype("float32"))
            return rotate(head, *tables)

        return float(jnp.sum(rotated(query, query_at) * rotated(key, key_at)))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(9, 3)) > 1e-3


def test_dynamic_scaling_is_a_function_of_the_row_alone():
    """A prompt is rotated for its whole length, a later token for the length that it brings the text to."""
    rope = Rope(10000.0, 8, RopeScaling("dynamic", 2.0, 16))
    positions_BT = jnp.array([[0, 1, 39, 40, 41]])

    def cosines(length: int) -> np.ndarray:
        return np.asarray(rotary_tables(rope, positions_BT, jnp.array([length]), jnp.dtype("float32"))[0][0])

    np.testing.assert_array_equal(cosines(40)[2], cosines(10)[2])  # the prompt's last token, or the 40th of the text
    assert not np.array_equal(cosines(40)[1], cosines(10)[1])
    np.testing.assert_array_equal(cosines(40)[3:], cosines(10)[3:])
    np.testing.assert_array_equal(cosines(16)[:2], cosines(10)[:2])


def test_sixteen_bit_weights_stay_near_the_exact_logits():
    params = random_params(TINY_LLAMA)
    exact = np.stack([dense_logits(TINY_LLAMA, params, text) for text in TEXTS])
    backend = choose_backend("bfloat16", "cpu")
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), arranged(TINY_LLAMA, params, backend))
    found = np.asarray(LanguageModel(TINY_LLAMA, half, backend).logits(TEXTS))
    assert found.dtype == np.float32
    error = np.sqrt(np.mean((found - exact) ** 2)) / exact.std()
    assert 1e-4 < error < 0.1
