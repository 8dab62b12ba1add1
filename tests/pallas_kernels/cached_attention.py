"""Random inputs of kernels that attend to a cache, and how their answers are judged."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

# Of the largest number that was expected.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Return normally distributed numbers."""
    return jnp.asarray(rng.normal(size=shape), dtype)


def poisoned_after(buffer_LBSF: jax.Array, ends: np.ndarray) -> jax.Array:
    """Put what is not a number into all slots from each row's end on: it must not be read."""
    beyond_BS = jnp.arange(buffer_LBSF.shape[2]) >= jnp.asarray(ends)[:, None]
    return jnp.where(beyond_BS[None, :, :, None], jnp.nan, buffer_LBSF)


def relative_error(found: jax.Array, expected: jax.Array) -> float:
    """Return the largest difference, relative to the largest expected number."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected)))


def assert_no_races() -> None:
    """Older JAX prints races and remembers them where nobody is told; newer JAX raises."""
    races = interpret_pallas_call.races
    assert races is None or not races.races_found
