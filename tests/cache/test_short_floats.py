"""Keys and values of a model in 16 bits on a CPU: float16, which XLA writes in place and the kernel widens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.ops.attention import attend
from jaxinfer.ops.backend import choose_backend
from jaxinfer.ops.cache_write import as_rows
from jaxinfer.ops.cpu_kernels import machine_code

VECTORS = machine_code.host_vectors()
assert VECTORS is not None, "the tests need llvmlite"
pytestmark = pytest.mark.skipif("float16" not in VECTORS.dtypes, reason="the processor does not widen float16")


def test_caches_are_float16_where_the_kernel_widens_it(monkeypatch):
    for dtype in ("bfloat16", "float16"):
        assert choose_backend(dtype, "cpu").cache_dtype == "float16"
        # Without the kernel, XLA widens what it reads, and a scan takes XLA's products.
        assert choose_backend(dtype, "cpu", scan_layers=True).cache_dtype == "float32"
    assert choose_backend("float32", "cpu").cache_dtype == "float32"
    assert choose_backend("bfloat16", "cpu", cache_dtype="int8").cache_dtype == "int8"
    assert choose_backend("bfloat16", "tpu").cache_dtype == "bfloat16"
    monkeypatch.setattr(machine_code, "host_vectors", lambda: replace(VECTORS, dtypes=("float32", "bfloat16")))
    assert choose_backend("bfloat16", "cpu").cache_dtype == "float32"


def test_numbers_that_float16_does_not_have_become_the_largest_that_it_has():
    """An infinite key or value would make all that follows NaN."""
    rows = jnp.array([[[[1e6, -1e6, 3.0, 65504.0]]]])
    buffer = jnp.zeros((1, 1, 1, 6), jnp.float16)
    found = as_rows(rows, buffer, choose_backend("bfloat16", "cpu"))
    np.testing.assert_array_equal(found, [[[65504.0, -65504.0, 3.0, 65504.0, 0.0, 0.0]]])
    assert found.dtype == jnp.float16


def test_xla_widens_what_it_reads():
    """Scores and weights are never rounded to what keys and values are kept in."""
    backend = replace(choose_backend("bfloat16", "cpu"), cpu_kernels=False)
    rng = np.random.default_rng(3)
    query = rng.standard_normal((2, 5, 4, 16), np.float32)
    keys, values = rng.standard_normal((2, 2, 30, 32), np.float32).astype(np.float16)
    mask = rng.random((2, 5, 30)) < 0.5
    run = jax.jit(attend, static_argnums=(4, 5))
    found = run(query, keys, values, mask, 0.25, backend)
    wide = run(query, keys.astype(np.float32), values.astype(np.float32), mask, 0.25, backend)
    np.testing.assert_array_equal(found, wide)
    assert found.dtype == jnp.float32
