"""Normalisation layers, computed in float32 or wider."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import parameter
from jaxinfer.models.taps import tap
from jaxinfer.notation import TENSOR, Array, Float
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.cpu_kernels.norms import norm_rows
from jaxinfer.ops.each_device import even_axis, row_axes


class Norm(nn.Module):
    """The config's norm, over the last axis.

    RMS normalisation is Zhang and Sennrich, 1910.07467; LayerNorm is Ba et al., 1607.06450. ``axis`` is the axis's
    logical name. On a CPU with kernels of our own, a row's result does not depend on the other rows or on their number.
    """

    config: DecoderConfig
    backend: Backend
    axis: str = "embed"

    @nn.compact
    def __call__(self, inputs: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        kind, dtype = self.config.norm, jnp.dtype(self.backend.param_dtype)
        width = inputs.shape[-1:]
        scale = bias = None
        if kind != "plain_layer":
            neutral = nn.initializers.zeros if kind == "rms_plus_one" else nn.initializers.ones
            scale = parameter(self, "scale", neutral, (self.axis,), width, dtype)
        if kind == "layer":
            bias = parameter(self, "bias", nn.initializers.zeros, (self.axis,), width, dtype)
        has_kernel = self.backend.cpu_kernels and inputs.dtype == jnp.float32
        norm = functools.partial(_by_kernel if has_kernel else _by_xla, self.config)
        norm = self._on_own_rows(norm, inputs.shape) if has_kernel else norm
        return tap(self, "result", norm(inputs, scale, bias))

    def _on_own_rows(self, norm: Callable[..., Any], shape: tuple[int, ...]) -> Callable[..., Any]:
        """Return ``norm`` so that each device runs it on its rows, and on its heads if these are normed."""
        *lead, _ = shape
        rows = row_axes(lead, self.backend)
        if self.axis == "head_dim":
            rows = *rows[:-1], even_axis(TENSOR, lead[-1], self.backend)
        whole = PartitionSpec()
        return self.backend.on_devices(norm, (PartitionSpec(*rows), whole, whole), PartitionSpec(*rows))


def _by_kernel(config: DecoderConfig, inputs: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    rows = inputs.reshape(-1, inputs.shape[-1])
    scale = jnp.ones(rows.shape[1:], rows.dtype) if scale is None else scale.astype(rows.dtype)
    if config.norm in ("layer", "plain_layer"):
        bias = jnp.zeros_like(scale) if bias is None else bias.astype(rows.dtype)
    elif config.norm == "rms_plus_one":
        scale = 1.0 + scale
    return norm_rows(rows, scale, bias, config.norm_eps).reshape(inputs.shape)


def _by_xla(config: DecoderConfig, inputs: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    wide = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    if config.norm in ("layer", "plain_layer"):
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_eps)
    if scale is None:
        return normed.astype(inputs.dtype)
    if config.norm == "rms":
        normed = normed.astype(inputs.dtype)
        return normed * _over(scale, normed)
    if config.norm == "rms_plus_one":
        return (normed * (1.0 + _over(scale, normed))).astype(inputs.dtype)
    assert bias is not None
    return (normed * _over(scale, normed) + _over(bias, normed)).astype(inputs.dtype)


def _over(weights: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(weights.astype(like.dtype), like.shape)
