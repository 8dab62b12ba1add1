"""Weights of seven bits, which only drafts are made with."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.drafters.heads import rounded_outputs
from jaxinfer.ops.seven_bits import round_rows, rounded_product, rounds
from tests.toys import float32_backend


def test_a_rounded_product_is_near_the_exact_one_in_any_number_of_rows():
    rng = np.random.default_rng(0)
    # Rows of very different sizes, and one of nothing.
    kernel = (rng.standard_normal((300, 64)) * 10.0 ** rng.integers(-6, 4, (300, 1))).astype(np.float32)
    kernel[7], kernel[8] = 0, 1e-38
    integers, scale = map(np.asarray, jax.jit(round_rows)(kernel))
    assert np.abs(integers).max() == 63
    largest = np.abs(kernel).max(axis=1, keepdims=True).clip(1e-30)
    assert (np.abs(integers * scale[:, None] - kernel) <= largest / 126 * 1.0001).all()
    for shape, has_kernels in itertools.product(((1, 64), (2, 3, 64), (130, 64)), (True, False)):
        inputs = rng.standard_normal(shape, np.float32)
        backend = replace(float32_backend(), cpu_kernels=has_kernels)
        found = np.asarray(jax.jit(rounded_product, static_argnums=3)(inputs, integers, scale, backend))
        exact = np.asarray(inputs.astype(jnp.bfloat16), np.float64) @ (integers.T.astype(np.float64) * scale)
        np.testing.assert_allclose(found / largest[:, 0].clip(1e-9), exact / largest[:, 0].clip(1e-9), atol=1e-4)


def test_only_outputs_of_heads_are_rounded_and_only_where_the_kernels_are():
    rng = np.random.default_rng(1)
    block = {"kernel": jnp.ones((64, 64)), "bias": jnp.zeros(64)}
    output = {"kernel": jnp.asarray(rng.standard_normal((100, 64)), jnp.float32), "bias": jnp.ones(100)}
    shared = {"heads": ({"blocks": [block]},), "output": output, "ids": jnp.arange(100)}
    own = {"heads": ({"blocks": [block], "output": output},)}
    backend = float32_backend()
    for head_params in (shared, own):
        rounded = rounded_outputs(head_params, backend)
        assert rounded["heads"][0]["blocks"] == [block]
        found = rounded.get("output") or rounded["heads"][0]["output"]
        assert found["kernel"].dtype == jnp.int8
        assert found["scale"].shape == (100,)
        assert found["bias"] is output["bias"]
        again = rounded_outputs(rounded, backend)
        assert (again.get("output") or again["heads"][0]["output"])["scale"] is found["scale"]
        plain = rounded_outputs(head_params, replace(backend, cpu_kernels=False))
        assert plain.get("output", output)["kernel"].dtype == jnp.float32
    assert not rounds(jnp.ones((100, 64), jnp.int32), backend)
