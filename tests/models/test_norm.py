"""Norms are what their definitions in NumPy say, by XLA as on other devices, and by the CPU's kernels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.adapters import LOADED
from jaxinfer.models.norm import Norm
from tests.toys import TINY_LLAMA, float32_backend


def defined(kind, rows, scale, bias, epsilon):
    if kind in ("layer", "layer_plus_one", "plain_layer"):
        rows = rows - rows.mean(axis=-1, keepdims=True)
    normed = rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + epsilon)
    return {
        "rms": normed * scale,
        "rms_plus_one": normed * (1 + scale),
        "layer": normed * scale + bias,
        "layer_plus_one": normed * (1 + scale) + bias,
        "plain_layer": normed,
    }[kind]


@pytest.mark.parametrize("kernels", [False, True], ids=["xla", "kernels"])
@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer", "layer_plus_one", "plain_layer"])
def test_norms_are_as_defined(kind, kernels):
    rng = np.random.default_rng(1)
    inputs, scale, bias = (rng.standard_normal(shape, np.float32) for shape in ((2, 3, 40), (40,), (40,)))
    inputs += np.arange(3, dtype=np.float32)[:, None]  # each token has a mean of its own
    config = replace(TINY_LLAMA, norm=kind, norm_eps=0.1)
    norm = Norm(config, replace(float32_backend(), cpu_kernels=kernels))
    names = () if kind == "plain_layer" else ("scale", "bias") if kind.startswith("layer") else ("scale",)
    params = {name: jnp.asarray({"scale": scale, "bias": bias}[name]) for name in names}
    found = jax.jit(norm.apply)({"params": params}, inputs)
    expected = defined(kind, *(each.astype(np.float64) for each in (inputs, scale, bias)), 0.1)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("kernels", [False, True], ids=["xla", "kernels"])
@pytest.mark.parametrize("shape", [(3, 3, 40), (1, 3, 40), (3, 3, 4, 10)], ids=["all heads", "one row", "each head"])
def test_a_row_is_normed_by_its_own_adapters_weights(shape, kernels):
    rng = np.random.default_rng(2)
    inputs, scale_D, own_ND = (rng.standard_normal(each, np.float32) for each in (shape, (40,), (2, 40)))
    ids_B = np.array([2, 0, 1][: len(inputs)], np.int32)
    norm = Norm(replace(TINY_LLAMA, norm_eps=0.1), replace(float32_backend(), cpu_kernels=kernels), "heads")
    params = {"scale": jnp.asarray(scale_D), LOADED: {"scale": jnp.asarray(own_ND)}}
    found = jax.jit(norm.apply)({"params": params}, inputs, ids_B)
    for row, number in enumerate(ids_B):
        weights = np.concatenate([scale_D[None], own_ND])[number].reshape(shape[2:])
        expected = defined("rms", inputs[row].astype(np.float64), weights, np.zeros(1), 0.1)
        np.testing.assert_allclose(found[row], expected, atol=2e-6)
