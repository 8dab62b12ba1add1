"""xIELU is what its definition in NumPy says, and has the same bits with all that goes around."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.xielu import Xielu
from tests.toys import float32_backend

PARAMS = {"curvature": jnp.asarray([0.7]), "saturation": jnp.asarray([-0.4]), "slope": jnp.asarray([0.55])}


def activated(inputs: jax.Array) -> jax.Array:
    return Xielu(float32_backend()).apply({"params": PARAMS}, inputs)


def test_xielu_is_as_defined_and_its_bits_do_not_depend_on_a_sum_before_it():
    rng = np.random.default_rng(1)
    gate, bias = (3 * rng.standard_normal(shape, np.float32) for shape in ((2, 5, 64), (64,)))
    inputs = gate + bias
    found = jax.jit(activated)(inputs)
    wide = inputs.astype(np.float64)
    above, below = np.log1p(np.exp(0.7)), 0.55 + np.log1p(np.exp(-0.4))
    expected = 0.55 * wide + np.where(wide > 0, above * wide**2, below * (np.expm1(np.minimum(wide, 0)) - wide))
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    fused = jax.jit(lambda gate, bias: activated(gate + bias) * 2.0)(gate, bias)
    np.testing.assert_array_equal(fused, 2 * np.asarray(found))
