"""Decides whether a TPU kernel serves an operation on a cache."""

from typing import Any, Literal

import jax.numpy as jnp

from jaxinfer.ops.backend import Backend

# A TPU's lanes. A cache whose width is no multiple of them has another layout and would be copied for a kernel.
_LANES = 128


def choose_means(backend: Backend, keys_LBSF: Any) -> Literal["kernel", "reference", "xla"]:
    """Return the means for this cache: XLA if neither the kernels nor the reference support it."""
    in_bytes = keys_LBSF.dtype == jnp.int8
    if backend.kernels == "xla" or not (in_bytes or keys_LBSF.dtype in (jnp.bfloat16, jnp.float32)):
        return "xla"
    if in_bytes and (backend.kernels == "reference" or backend.compute_dtype == "float16"):
        return "xla"
    if backend.kernels == "reference":
        return "reference"
    lies_well = keys_LBSF.shape[-1] // backend.kv_shards % _LANES == 0
    return "kernel" if lies_well or (backend.kernels == "interpret" and not in_bytes) else "xla"
