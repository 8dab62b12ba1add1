"""Random inputs of kernels that attend to a cache, and how their answers are judged."""

import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from numpy.typing import ArrayLike

# Of the largest number that was expected.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return normally distributed numbers: NumPy's, so that what is done to them compiles nothing."""
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], num_kv_heads: int, head_dim: int) -> np.ndarray:
    """Return rows in bytes whose scales are from a 128th to a 64th, each slot's and head's its own."""
    rows, first = rng.integers(-127, 128, shape, np.int8), num_kv_heads * head_dim
    rows[..., first : first + num_kv_heads] = 0x3C
    lower = rng.integers(0, 128, (*shape[:-1], num_kv_heads), np.uint8)
    rows[..., first + num_kv_heads : first + 2 * num_kv_heads] = lower.view(np.int8)
    return rows


def sinks_of(num_heads: int, has_sinks: bool) -> dict[str, np.ndarray]:
    """Return the option of scores that no slot has, from far below all others to above; none where there are none."""
    return {"sink_logits_N": np.linspace(-4, 6, num_heads, dtype=np.float32)} if has_sinks else {}


def poisoned_after(buffer_LBSF: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Put what is not a number into all slots from each row's end on: it must not be read."""
    beyond_BS = np.arange(buffer_LBSF.shape[2]) >= np.asarray(ends)[:, None]
    poison = -1 if buffer_LBSF.dtype == np.int8 else np.nan  # a scale of bits alone is no number
    return np.where(beyond_BS[None, :, :, None], poison, buffer_LBSF).astype(buffer_LBSF.dtype)


def relative_error(found: ArrayLike, expected: ArrayLike) -> float:
    """Return the largest difference, relative to the largest expected number."""
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def assert_no_races() -> None:
    """Older JAX prints races and remembers them where nobody is told; newer JAX raises."""
    races = interpret_pallas_call.races
    assert races is None or not races.races_found
