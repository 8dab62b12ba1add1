"""One decoder block: attention over a cache, then a gated MLP, each behind a norm and a residual."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Cache, Placement
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import Linear, RMSNorm
from jaxinfer.models.positions import rotate
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda inputs: jax.nn.gelu(inputs, approximate=False),
    "gelu_tanh": lambda inputs: jax.nn.gelu(inputs, approximate=True),
    "relu": jax.nn.relu,
}


class Step(NamedTuple):
    """What every block of one forward pass shares: rotary tables ``[B, T, H / 2]`` and the tokens' places."""

    cosines_BTR: Any
    sines_BTR: Any
    placement: Placement


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; writes its keys and values into the cache, then reads it."""

    config: DecoderConfig
    backend: Backend

    @nn.compact
    def __call__(
        self, inputs_BTD: Float[Array, "B T D"], cache: Cache, layer: Int[Array, ""] | int, step: Step
    ) -> tuple[Float[Array, "B T D"], Cache]:
        config = self.config

        def heads(name: str, count: int, axis: str) -> jax.Array:
            features = count * config.head_dim
            flat = Linear(features, (axis, "embed"), self.backend, config.attention_bias, name=name)(inputs_BTD)
            return flat.reshape(*flat.shape[:2], count, config.head_dim)

        query_BTNH = rotate(heads("query", config.num_heads, "heads"), step.cosines_BTR, step.sines_BTR)
        keys_BTKH = rotate(heads("key", config.num_kv_heads, "kv_heads"), step.cosines_BTR, step.sines_BTR)
        values_BTKH = heads("value", config.num_kv_heads, "kv_heads")
        cache = cache.write(layer, step.placement, keys_BTKH, values_BTKH)
        mixed_BTNH = cache.attend(layer, step.placement, query_BTNH, config.head_dim**-0.5, self.backend)
        mixed = mixed_BTNH.reshape(*mixed_BTNH.shape[:2], -1)
        project = Linear(config.model_dim, ("embed", "heads"), self.backend, config.attention_bias, name="output")
        return project(mixed), cache


class MLP(nn.Module):
    """The gated feed-forward layer: ``down(activation(gate(x)) * up(x))``."""

    config: DecoderConfig
    backend: Backend

    @nn.compact
    def __call__(self, inputs_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        widen = {
            name: Linear(config.ffn_dim, ("ffn", "embed"), self.backend, config.mlp_bias, name=name)
            for name in ("gate", "up")
        }
        gated = _ACTIVATIONS[config.activation](widen["gate"](inputs_BTD)) * widen["up"](inputs_BTD)
        return Linear(config.model_dim, ("embed", "ffn"), self.backend, config.mlp_bias, name="down")(gated)


class Block(nn.Module):
    """One pre-norm block; the carry is ``(hidden, cache)`` so that a scan updates the cache in place."""

    config: DecoderConfig
    backend: Backend

    @nn.compact
    def __call__(
        self, carry: tuple[Float[Array, "B T D"], Cache], layer: Int[Array, ""] | int, step: Step
    ) -> tuple[tuple[Float[Array, "B T D"], Cache], None]:
        hidden_BTD, cache = carry
        norm = {name: RMSNorm(self.config.norm_eps, self.backend, name=name) for name in ("attention_norm", "mlp_norm")}
        mixed_BTD, cache = Attention(self.config, self.backend, name="attention")(
            norm["attention_norm"](hidden_BTD), cache, layer, step
        )
        hidden_BTD = hidden_BTD + mixed_BTD
        hidden_BTD = hidden_BTD + MLP(self.config, self.backend, name="mlp")(norm["mlp_norm"](hidden_BTD))
        return (hidden_BTD.astype(jnp.dtype(self.backend.compute_dtype)), cache), None
