"""AWQ against searches written out in NumPy, and what it is for: products that change less."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.few_bits.formats import INT8, int4
from jaxinfer.ops.few_bits.round_to_nearest import nearest_values, round_to_nearest
from jaxinfer.quantization.awq import quantize_clipped, scales_for

FORMS = {"signed": int4(32, True), "minima": int4(32, False), "bytes": INT8}


def case(seed: int, width: int = 96, outputs: int = 8):
    """Return weights with a heavy tail, and inputs of which a few are large."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(300, width)) * np.exp(1.5 * rng.normal(size=width))
    return rng.standard_t(3, size=(outputs, width)).astype(np.float32), inputs.astype(np.float32)


def values_of(weights, form):
    return np.asarray(nearest_values(jnp.asarray(weights, jnp.float32), FORMS[form]))


def error(inputs, weights, found) -> float:
    return float(np.mean((inputs @ (np.asarray(found, np.float64) - weights).T) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_the_codes(form):
    weights, _ = case(0)
    expected = np.asarray(round_to_nearest(jnp.asarray(weights), FORMS[form]).dequantize())
    np.testing.assert_array_equal(values_of(weights, form), expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_factors_are_the_best_power_of_the_inputs_sizes(form):
    weights, inputs = case(1)
    kernels = [weights, weights[::-1] * 0.3]
    sizes, found = np.abs(inputs).mean(axis=0), {}
    for step in range(20):
        factors = sizes ** (step / 20)
        factors /= np.sqrt(factors.max() * factors.min())
        rounded = [values_of(kernel * factors, form) / factors for kernel in kernels]
        found[step] = sum(error(inputs, *pair) for pair in zip(kernels, rounded)), factors
    best, expected = min(found.values(), key=lambda each: each[0])
    squares = jnp.asarray(inputs.T @ inputs / len(inputs))
    chosen = np.asarray(scales_for([*map(jnp.asarray, kernels)], squares, jnp.asarray(sizes), FORMS[form]))
    np.testing.assert_allclose(chosen, expected, rtol=1e-4)
    assert best < 0.8 * found[0][0]


@pytest.mark.parametrize("form", FORMS)
def test_each_group_is_cut_where_its_products_change_least(form):
    weights, inputs = case(2)
    group = FORMS[form].group or weights.shape[1]
    expected = np.empty_like(weights)
    for row in range(len(weights)):
        for first in range(0, weights.shape[1], group):
            part, own = weights[row : row + 1, first : first + group], inputs[:, first : first + group]
            bounds = [np.abs(part).max() * (1 - step / 20) for step in range(10)]
            tried = [values_of(np.clip(part, -bound, bound), form) for bound in bounds]
            expected[row, first : first + group] = min(tried, key=lambda values: error(own, part, values))
    squares = jnp.asarray(inputs.T @ inputs / len(inputs))
    found = np.asarray(quantize_clipped(jnp.asarray(weights), squares, FORMS[form]).dequantize())
    assert np.mean(np.abs(found - expected) < 1e-6) > 0.99
    nearest = values_of(weights, form)
    assert np.mean(found != nearest) > 0.05
