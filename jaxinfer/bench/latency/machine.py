"""Measures this machine's limits: memory bandwidth and the speed of a large matrix product."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_READ_BYTES = 1 << 29
_ATTEMPTS = 5


@dataclass(frozen=True)
class Bandwidth:
    """Bytes read from memory per second, and how this was measured."""

    bytes_per_second: float
    method: str


def measure_bandwidth(num_bytes: int = _READ_BYTES) -> Bandwidth:
    """Return the best rate of five readings of one large array, by all cores or by the accelerator."""
    size = f"{num_bytes >> 20} MiB of float32"
    if jax.default_backend() != "cpu":
        values = jnp.ones(num_bytes // 4, jnp.float32)
        add_up = jax.jit(jnp.sum)
        seconds = _best_seconds(lambda: add_up(values).block_until_ready())
        return Bandwidth(num_bytes / seconds, f"jitted sum of {size}, best of {_ATTEMPTS}")
    num_threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        seconds = _best_seconds(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))
    method = f"{num_threads} threads reading {size} by NumPy dot products, best of {_ATTEMPTS}"
    return Bandwidth(num_bytes / seconds, method)


def measure_product(dtype: str, width: int | None = None) -> float:
    """Return the floating-point operations per second of a square product, accumulated in float32 or wider."""
    width = width or (2048 if jax.default_backend() == "cpu" else 8192)
    accumulator = jnp.promote_types(dtype, jnp.float32)
    exact = jnp.dtype(dtype).itemsize > 2
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        dimensions = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=accumulator)

    square = jnp.ones((width, width), dtype)
    compiled = jax.jit(multiply)
    return 2 * width**3 / _best_seconds(lambda: compiled(square, square).block_until_ready())


def _best_seconds(run: Callable[[], Any]) -> float:
    run()
    seconds = []
    for _ in range(_ATTEMPTS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
