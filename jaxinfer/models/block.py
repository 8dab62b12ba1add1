"""One decoder block: attention over a cache and a feed-forward layer, each with norms and a residual connection."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Cache, LayeredCache, Scores
from jaxinfer.models.alibi import widened
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.experts import MixtureOfExperts
from jaxinfer.models.latent_attention import LatentAttention
from jaxinfer.models.linear import Linear, parameter, project
from jaxinfer.models.mlp import MLP
from jaxinfer.models.norm import Norm
from jaxinfer.models.step import Step
from jaxinfer.models.taps import tap
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.hadamard import even_out
from jaxinfer.ops.once import apart_from_product
from jaxinfer.ops.rotation import rotate
from jaxinfer.ops.rounding import scale_by
from jaxinfer.ops.rows_in_bytes import holds_bytes
from jaxinfer.ops.split_tokens import enter_region, leave_region


class Attention(nn.Module):
    """Grouped-query attention for layers of one kind: writes new keys and values to the cache, then attends to it."""

    config: DecoderConfig
    backend: Backend
    kind: int

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "B T d_in"], cache: Cache, index: Int[Array, ""] | int, step: Step
    ) -> tuple[Float[Array, "B T D"], Cache]:
        config, rotation = self.config, step.rotations[self.kind]
        # A rotation changes no norm, so it is the same before it and after it.
        has_norms = config.qk_norm is not None and (config.qk_norm != "rotated_heads" or rotation is not None)

        def heads(name: str, count: int, axis: str) -> Linear:
            return Linear(count * config.head_dim, (axis, "embed"), self.backend, config.qkv_bias, name=name)

        def bounded(heads_BTNH: jax.Array) -> jax.Array:
            return heads_BTNH if config.clip_qkv is None else jnp.clip(heads_BTNH, -config.clip_qkv, config.clip_qkv)

        def place(name: str, axis: str, heads_BTNH: jax.Array) -> jax.Array:
            if rotation is not None and config.norm_after_rotation:
                heads_BTNH = rotate(heads_BTNH, *rotation)
            if has_norms:
                axis = axis if config.qk_norm in ("own_head", "all_heads") else "head_dim"
                norm = Norm(config, self.backend, axis, config.head_norm, name=f"{name}_norm")
                shape = heads_BTNH.shape
                normed = heads_BTNH.reshape(*shape[:2], -1) if config.qk_norm == "all_heads" else heads_BTNH
                heads_BTNH = norm(normed, step.adapters_B).reshape(shape)
            heads_BTNH = bounded(heads_BTNH)
            return heads_BTNH if rotation is None or config.norm_after_rotation else rotate(heads_BTNH, *rotation)

        linears = [
            heads("query", config.num_heads, "heads"),
            heads("key", config.num_kv_heads, "kv_heads"),
            heads("value", config.num_kv_heads, "kv_heads"),
        ]
        if config.attention_gate:
            linears.append(Linear(config.num_heads * config.head_dim, ("heads", "embed"), self.backend, name="gate"))
        query_BTNH, keys_BTKH, values_BTKH, *gates_BTNH = (
            apart_from_product(tap(self, name, flat), config.head_dim, self.backend).reshape(
                *flat.shape[:2], -1, config.head_dim
            )
            for name, flat in zip(("queries", "keys", "values", "gates"), project(inputs, linears, step.adapters_B))
        )
        values_BTKH = bounded(values_BTKH)
        query_BTNH = tap(self, "rotated_queries", place("query", "heads", query_BTNH))
        if step.query_scales and (scales_BT := step.query_scales[self.kind]) is not None:
            query_BTNH = query_BTNH * scales_BT[..., None, None]
        if config.scores_by_depth:
            query_BTNH = query_BTNH / jnp.asarray(index + 1, query_BTNH.dtype)
        keys_BTKH = tap(self, "rotated_keys", place("key", "kv_heads", keys_BTKH))
        if holds_bytes(self.backend.cache_dtype):
            query_BTNH, keys_BTKH = even_out(query_BTNH, keys_BTKH, self.backend.platform)
        if step.key_lanes is not None:
            heads_BTNH = query_BTNH, keys_BTKH, values_BTKH
            query_BTNH, keys_BTKH, values_BTKH = widened(config, self.backend, step.key_lanes, *heads_BTNH)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        scores = Scores(scale, config.attention_softcap, self._sink_logits())
        placement = step.placements[self.kind]
        layer = index if step.held is None else step.held[self.kind].index(index)
        mixed_BTNH, cache = cache.attend(layer, placement, query_BTNH, keys_BTKH, values_BTKH, scores, self.backend)
        mixed_BTNH = tap(self, "mixed", mixed_BTNH[..., : config.head_dim])
        for gate_BTNH in gates_BTNH:
            mixed_BTNH = mixed_BTNH * jax.nn.sigmoid(gate_BTNH)
        mixed = mixed_BTNH.reshape(*mixed_BTNH.shape[:2], -1)
        if config.inner_norms:
            mixed = Norm(config, self.backend, "heads", name="inner_norm")(mixed, step.adapters_B)
        output = Linear(config.model_dim, ("embed", "heads"), self.backend, config.output_bias, name="output")
        return tap(self, "result", output(mixed, step.adapters_B)), cache

    def _sink_logits(self) -> Float[Array, " N"] | None:
        """Return the heads' scores that no token has, None if the model has none."""
        if not self.config.attention_sinks:
            return None
        shape, dtype = (self.config.num_heads,), jnp.dtype(self.backend.param_dtype)
        return parameter(self, "sink_logits", nn.initializers.zeros, ("query_heads",), shape, dtype)


class Block(nn.Module):
    """One block for layers of one kind. The carry is ``(hidden, cache)``, so that a scan updates the cache in place.

    ``index`` is the number of earlier layers of this kind. A ``sparse`` block has experts.
    """

    config: DecoderConfig
    backend: Backend
    kind: int = 0
    sparse: bool = False

    @nn.compact
    def __call__(
        self, carry: tuple[Float[Array, "B T D"], LayeredCache], index: Int[Array, ""] | int, step: Step
    ) -> tuple[tuple[Float[Array, "B T D"], LayeredCache], None]:
        hidden_BTD, cache = carry
        form = self.config.block
        form_of_attention = Attention if self.config.latent is None else LatentAttention
        attention = form_of_attention(self.config, self.backend, self.kind, name="attention")
        mlp = (MixtureOfExperts if self.sparse else MLP)(self.config, self.backend, name="mlp")

        def norm(name: str, inputs_BTD: jax.Array) -> jax.Array:
            return Norm(self.config, self.backend, name=name)(inputs_BTD, step.adapters_B)

        seen = step.placements[self.kind].seen

        def attend(inputs_BTD: jax.Array) -> tuple[jax.Array, Cache]:
            inputs_BTD = enter_region(inputs_BTD, seen, self.backend)
            mixed_BTD, part = attention(inputs_BTD, cache.parts[self.kind], index, step)
            return leave_region(mixed_BTD, seen, self.backend), part

        def feed_forward(inputs_BTD: jax.Array) -> jax.Array:
            inputs_BTD = enter_region(inputs_BTD, seen, self.backend)
            return leave_region(mlp(inputs_BTD, step.adapters_B), seen, self.backend)

        def add(hidden_BTD: jax.Array, *results_BTD: jax.Array) -> jax.Array:
            scale = self.config.residual_scale
            for result_BTD in results_BTD:
                hidden_BTD = hidden_BTD + (
                    result_BTD if scale is None else scale_by(scale, result_BTD, self.backend.platform)
                )
            return hidden_BTD

        hidden_BTD = leave_region(hidden_BTD, seen, self.backend)
        inputs_BTD = hidden_BTD if form in ("post_norm", "output_norm") else norm("attention_norm", hidden_BTD)
        mixed_BTD, part = attend(inputs_BTD)
        if form == "parallel":
            hidden_BTD = add(hidden_BTD, mixed_BTD, feed_forward(inputs_BTD))
        elif form == "parallel_norms":
            hidden_BTD = add(hidden_BTD, mixed_BTD, feed_forward(norm("mlp_norm", hidden_BTD)))
        elif form == "post_norm":
            hidden_BTD = norm("attention_norm", add(hidden_BTD, mixed_BTD))
            hidden_BTD = norm("mlp_norm", add(hidden_BTD, feed_forward(hidden_BTD)))
        elif form == "sandwich":
            hidden_BTD = add(hidden_BTD, norm("attention_post_norm", mixed_BTD))
            hidden_BTD = add(hidden_BTD, norm("mlp_post_norm", feed_forward(norm("mlp_norm", hidden_BTD))))
        elif form == "output_norm":
            hidden_BTD = add(hidden_BTD, norm("attention_post_norm", mixed_BTD))
            hidden_BTD = add(hidden_BTD, norm("mlp_post_norm", feed_forward(hidden_BTD)))
        else:
            hidden_BTD = add(hidden_BTD, mixed_BTD)
            hidden_BTD = add(hidden_BTD, feed_forward(norm("mlp_norm", hidden_BTD)))
        hidden_BTD = hidden_BTD.astype(jnp.dtype(self.backend.compute_dtype))
        return (tap(self, "result", hidden_BTD), cache.with_part(self.kind, part)), None
