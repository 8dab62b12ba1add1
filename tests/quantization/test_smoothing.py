"""SmoothQuant: factors as the paper has them, and rows in bytes that lose less for it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LanguageModel
from jaxinfer.errors import InvalidOption
from jaxinfer.model_quantization import quantize, with_activations
from jaxinfer.ops.few_bits.formats import INT8
from jaxinfer.ops.few_bits.round_to_nearest import round_to_nearest
from jaxinfer.quantization.smoothing import smoothing_factors
from tests.quantization.test_model import OWN, divergence
from tests.toys import TINY_LLAMA, fable_tokens, float32_backend, random_params

TEXTS = [fable_tokens(100)[start : start + 48] for start in range(0, 480, 48)]
ASKED = {**OWN, "calibration": [token for text in TEXTS[:6] for token in text]}


def test_factors_share_what_is_hard_to_round_between_inputs_and_weights():
    """After that the largest input and the largest weight are alike, each the root of their product."""
    rng = np.random.default_rng(0)
    kernels = [rng.standard_normal((outputs, 8), np.float32) for outputs in (3, 5)]
    most_K = np.exp(rng.standard_normal(8)).astype(np.float32)
    found = np.asarray(smoothing_factors([jnp.asarray(each) for each in kernels], jnp.asarray(most_K)))
    weights_K = np.abs(np.concatenate(kernels)).max(axis=0)
    np.testing.assert_allclose(found, np.sqrt(most_K / weights_K), rtol=1e-5)
    np.testing.assert_allclose(most_K / found, weights_K * found, rtol=1e-5)
    # An input that is never seen, and one that no weight reads, are left finite.
    kernels[0][:, 1] = kernels[1][:, 1] = most_K[0] = 0
    again = np.asarray(smoothing_factors([jnp.asarray(each) for each in kernels], jnp.asarray(most_K)))
    assert np.isfinite(again).all()
    assert (again > 0).all()


@pytest.fixture(scope="module")
def uneven() -> LanguageModel:
    """Return a model with a few large inputs of linear layers, which small weights read."""
    params = random_params(TINY_LLAMA)
    factors = np.where(np.arange(TINY_LLAMA.model_dim) % 16 == 3, 60, 1).astype(np.float32)
    for block in params["blocks"].values():
        for norm, part, names in (
            ("attention_norm", "attention", ("query", "key", "value")),
            ("mlp_norm", "mlp", ("gate", "up")),
        ):
            block[norm]["scale"] = block[norm]["scale"] * factors
            for name in names:
                block[part][name]["kernel"] = block[part][name]["kernel"] / factors
    return LanguageModel(TINY_LLAMA, params, float32_backend())


@pytest.mark.exhaustive
def test_rows_in_bytes_lose_less_of_smoothed_inputs(uneven):
    smooth = quantize(uneven, "int8", method="smoothquant", activations="int8", **ASKED)
    assert smooth.backend.activations == "int8"
    nearest = with_activations(smooth, None)
    kernels = jax.tree.map(lambda leaf: round_to_nearest(leaf, INT8) if leaf.ndim == 2 else leaf, uneven.params)
    rows = LanguageModel(uneven.config, kernels, replace(uneven.backend, activations="int8"))
    lost, without, plain = (divergence(uneven, each, TEXTS[6:]) for each in (smooth, nearest, rows))
    assert 0 < without < lost < 0.2 * plain


@pytest.mark.parametrize(("activations", "message"), [("int4", "unknown activations 'int4'; use int8, or none")])
def test_mistakes_are_told(uneven, activations, message):
    with pytest.raises(InvalidOption, match=message):
        quantize(uneven, "int8", method="smoothquant", activations=activations, **ASKED)
    with pytest.raises(InvalidOption, match=r"activations 'int8': blocks.* is in float32: load the model with weights"):
        with_activations(uneven, "int8")
