"""Normalisation layers, computed in float32 or wider."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.models.config import NORMS_PLUS_ONE, DecoderConfig, NormKind
from jaxinfer.models.linear import loaded_stacks, parameter
from jaxinfer.models.taps import tap
from jaxinfer.notation import TENSOR, Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.norms import norm_rows
from jaxinfer.ops.each_device import even_axis, row_axes
from jaxinfer.ops.low_rank import own_rows
from jaxinfer.ops.rounding import rounded

# The kinds that subtract the mean.
_CENTRED = ("layer", "layer_plus_one", "scaled_layer", "plain_layer")
_WITH_BIAS = ("layer", "layer_plus_one")


class Norm(nn.Module):
    """A norm over the last axis, of the config's kind if ``kind`` is None.

    RMS normalisation is Zhang and Sennrich, 1910.07467; LayerNorm is Ba et al., 1607.06450. ``axis`` is the logical
    name of the weights' axis: ``heads`` and ``kv_heads`` for inputs ``[B, T, N, H]`` whose heads have weights of their
    own, or ``[B, T, N * H]``. On a CPU with kernels of our own, a row's result does not depend on the other rows or on
    their number. Where loaded adapters have weights of their own for it (`jaxinfer.models.adapters`), a row with one
    takes these.
    """

    config: DecoderConfig
    backend: Backend
    axis: str = "embed"
    kind: NormKind | None = None

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "*rows d"], adapters_B: Int[Array, " B"] | None = None
    ) -> Float[Array, "*rows d"]:
        kind, dtype = self.kind or self.config.norm, jnp.dtype(self.backend.param_dtype)
        width = inputs.shape[2:] if self.axis in ("heads", "kv_heads") else inputs.shape[-1:]
        scale = bias = None
        if kind not in ("plain_layer", "plain_rms"):
            neutral = nn.initializers.zeros if kind in NORMS_PLUS_ONE else nn.initializers.ones
            scale = parameter(self, "scale", neutral, (self.axis,), (math.prod(width),), dtype).reshape(width)
        if kind in _WITH_BIAS:
            bias = parameter(self, "bias", nn.initializers.zeros, (self.axis,), width, dtype)
        has_kernel = self.backend.cpu_kernels and inputs.dtype == jnp.float32
        norm = functools.partial(_by_kernel if has_kernel else _by_xla, kind, self.config.norm_eps)
        norm = self._on_own_rows(norm, inputs.shape) if has_kernel else norm
        if has_kernel and scale is not None and scale.ndim > 1:
            # The kernel has one vector of weights for all rows.
            assert kind not in NORMS_PLUS_ONE
            result = rounded(norm(inputs, None, bias) * _over(scale, inputs))
        else:
            result = norm(inputs, scale, bias)
        if adapters_B is not None and (loaded := loaded_stacks(self)) is not None:
            own = self._with_own(norm, kind, inputs, loaded, adapters_B - 1, has_kernel=has_kernel)
            result = jnp.where((adapters_B == 0).reshape(-1, *[1] * (inputs.ndim - 1)), result, own)
        return tap(self, "result", result)

    def _with_own(
        self, norm: Callable[..., Any], kind: NormKind, inputs: jax.Array, loaded: Any, ids_B: Any, *, has_kernel: bool
    ) -> jax.Array:
        """Return what each row's own weights make of it; what a row of a negative id gets means nothing."""
        # A norm over all heads at once has one axis of weights, as others have.
        own_axes = inputs.ndim - 2 if self.axis in ("heads", "kv_heads") else 1
        lead = (-1, *[1] * (inputs.ndim - 1 - own_axes))

        def of_rows(name: str) -> jax.Array | None:
            if name not in loaded:
                return None
            return own_rows(loaded[name], ids_B).reshape(*lead, *inputs.shape[len(lead) :])

        scale, bias = of_rows("scale"), of_rows("bias")
        if not has_kernel:
            return norm(inputs, scale, bias)
        # The kernel has one vector of weights for all rows, so that these follow; each step is rounded in any program.
        assert scale is not None
        neutral = jnp.zeros(inputs.shape[-1:], inputs.dtype) if kind in NORMS_PLUS_ONE else None
        scale = 1.0 + scale if kind in NORMS_PLUS_ONE else scale
        result = rounded(norm(inputs, neutral, None) * _over(scale, inputs))
        return result if bias is None else result + _over(bias, inputs)

    def _on_own_rows(self, norm: Callable[..., Any], shape: tuple[int, ...]) -> Callable[..., Any]:
        """Return ``norm`` so that each device runs it on its rows, and on its heads if these are normed."""
        *lead, _ = shape
        rows = row_axes(lead, self.backend)
        if self.axis != "embed" and len(lead) == 3:
            rows = *rows[:-1], even_axis(TENSOR, lead[-1], self.backend)
        whole = PartitionSpec()
        return self.backend.on_devices(norm, (PartitionSpec(*rows), whole, whole), PartitionSpec(*rows))


def _by_kernel(
    kind: NormKind, epsilon: float, inputs: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    rows = inputs.reshape(-1, inputs.shape[-1])
    scale = jnp.ones(rows.shape[1:], rows.dtype) if scale is None else scale.astype(rows.dtype)
    if kind in NORMS_PLUS_ONE:
        scale = 1.0 + scale
    if kind in _CENTRED:
        bias = jnp.zeros_like(scale) if bias is None else bias.astype(rows.dtype)
    return norm_rows(rows, scale, bias, epsilon).reshape(inputs.shape)


def _by_xla(
    kind: NormKind, epsilon: float, inputs: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if kind in _CENTRED:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    if scale is None:
        return normed.astype(inputs.dtype)
    if kind == "rms":
        normed = normed.astype(inputs.dtype)
        return normed * _over(scale, normed)
    if kind == "rms_plus_one":
        return (normed * (1.0 + _over(scale, normed))).astype(inputs.dtype)
    scaled = normed * (_over(scale, normed) + (1.0 if kind in NORMS_PLUS_ONE else 0.0))
    return (scaled if bias is None else scaled + _over(bias, normed)).astype(inputs.dtype)


def _over(weights: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(weights.astype(like.dtype), like.shape)
