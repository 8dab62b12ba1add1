"""Sums of a vocabulary's probabilities, each row's in one order: independent of the other rows and of their number."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.notation import TENSOR, Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.masses import total_masses
from jaxinfer.ops.each_device import even_axis, row_axes

_LANES = 128


def masses_from(
    logits: Float[Array, "*rows V"], best: Float[Array, "*rows"], backend: Backend | None = None
) -> Callable[[Float[Array, "*rows"]], Float[Array, "*rows"]]:
    """Return a function from a threshold to the sum of ``exp(logit - best)`` of the logits that reach it.

    A sum does not increase with its threshold; for NaN it is 0. If the ``backend`` has CPU kernels, one adds them up.
    """
    if backend is not None and _has_kernel(logits, backend):
        # Gathered once, not for every sum.
        whole = _gathered(logits, backend)
        return lambda least: _by_kernel(whole, best, least, backend)[0]
    # The barrier makes XLA compute these once, not for every sum.
    masses = lax.optimization_barrier(jnp.exp(logits - best[..., None]))
    return lambda least: _fixed_order_sum(jnp.where(logits >= least[..., None], masses, 0))


def log_softmax(logits: Float[Array, "*rows V"], backend: Backend | None = None) -> Float[Array, "*rows V"]:
    """Return the log-probabilities of all tokens."""
    best = best_logit(logits)
    return logits - best[..., None] - _log_total(logits, best, backend)[..., None]


def log_sum_exp(logits: Float[Array, "*rows V"], backend: Backend | None = None) -> Float[Array, "*rows"]:
    """Return what a logit must be reduced by to become a log-probability."""
    best = best_logit(logits)
    return best + _log_total(logits, best, backend)


def best_logit(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Return each row's greatest logit, 0 if it is not finite."""
    best = jnp.max(logits, axis=-1)
    return jnp.where(jnp.isfinite(best), best, 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _log_total(logits: Array, best: Array, backend: Backend | None) -> Array:
    if backend is not None and _has_kernel(logits, backend):
        return _by_kernel(_gathered(logits, backend), best, jnp.full_like(best, -jnp.inf), backend)[1]
    return jnp.log(jnp.sum(jnp.exp(logits - best[..., None]), axis=-1))


@_log_total.defjvp
def _log_total_jvp(backend: Backend | None, primals: Any, tangents: Any) -> Any:
    # The kernel has no gradient.
    logits, best = primals
    log_total = _log_total(logits, best, backend)
    shares = jnp.exp(logits - (best + log_total)[..., None])
    return log_total, jnp.sum(shares * tangents[0], axis=-1) - tangents[1]


def _has_kernel(logits: Array, backend: Backend) -> bool:
    return backend.cpu_kernels and logits.dtype == jnp.float32


def _gathered(logits: Array, backend: Backend) -> Array:
    """Gather a vocabulary that is split over devices."""
    axis = even_axis(TENSOR, logits.shape[-1], backend)
    if axis is None:
        return logits
    rows = row_axes(logits.shape[:-1], backend)
    gather = functools.partial(lax.all_gather, axis_name=axis, axis=logits.ndim - 1, tiled=True)
    return backend.on_devices(gather, PartitionSpec(*rows, axis), PartitionSpec(*rows))(logits)


def _by_kernel(logits: Array, best: Array, least: Array, backend: Backend) -> tuple[Array, Array]:
    def add_up(logits: Array, best: Array, least: Array) -> list[Array]:
        results = total_masses(logits.reshape(-1, logits.shape[-1]), best.reshape(-1), least.reshape(-1))
        return [result.reshape(best.shape) for result in results]

    rows = PartitionSpec(*row_axes(best.shape, backend))
    totals, logarithms = backend.on_devices(add_up, rows, rows)(logits, best, least)
    return totals, logarithms


def _fixed_order_sum(values: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Sum over the last axis in a fixed order, independent of the other axes; appended zeros change nothing."""
    padding = -values.shape[-1] % _LANES
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)])
    lanes = padded.reshape(*values.shape[:-1], -1, _LANES).sum(axis=-2)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]
