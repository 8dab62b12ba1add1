"""Latent attention over a cache of compressed rows (MLA; DeepSeek-V2, 2405.04434, section 2.1).

Keys and values of heads are never made. A head's query is multiplied by the matrix that would have made its keys, and
compared with the rows as they are; what it mixes of the rows is multiplied by the matrix that would have made its
values. So attention has one key/value head, whose keys are the cache's rows and whose values are the same rows: every
layout, kernel and mesh takes it as it takes any head that all queries share.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Cache, Scores
from jaxinfer.models.cache_rows import cached_width
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.latent import NORM_EPS
from jaxinfer.models.linear import Linear, gained, loaded_stacks, parameter, project, shifted
from jaxinfer.models.norm import Norm
from jaxinfer.models.step import Step
from jaxinfer.models.taps import tap
from jaxinfer.notation import Array, Float, Int
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.hadamard import even_out, evened_query
from jaxinfer.ops.head_products import multiply_heads
from jaxinfer.ops.low_rank_heads import add_pairs
from jaxinfer.ops.rotation import rotate
from jaxinfer.ops.rows_in_bytes import holds_bytes


class LatentAttention(nn.Module):
    """Latent attention for layers of one kind: writes new rows to the cache, then attends to it.

    Where a mesh splits the heads, the config has a key/value head for each device: copies of the same rows.
    """

    config: DecoderConfig
    backend: Backend
    kind: int

    @nn.compact
    def __call__(
        self, inputs: Float[Array, "B T d_in"], cache: Cache, index: Int[Array, ""] | int, step: Step
    ) -> tuple[Float[Array, "B T D"], Cache]:
        config, backend, latent = self.config, self.backend, self.config.latent
        kind, rotation = config.kinds[self.kind], step.rotations[self.kind]
        assert latent is not None
        assert kind.rope is not None
        rotary_dim, normed = kind.rope.dim, replace(config, norm_eps=NORM_EPS)

        def down(name: str, width: int) -> Linear:
            return Linear(width, (None, "embed"), backend, config.qkv_bias, name=name)

        def up(name: str, width: int, axis: str) -> Linear:
            return Linear(config.num_heads * width, (axis, "embed"), backend, name=name)

        def norm(name: str, rows: jax.Array) -> jax.Array:
            return Norm(normed, backend, name=name)(rows, step.adapters_B)

        shared = [down("latent", latent.rank), down("key", rotary_dim)]
        if latent.query_rank is not None:
            shared.append(down("query_latent", latent.query_rank))
        latent_BTR, key_BTP, *query_latent = project(inputs, shared, step.adapters_B)
        own = norm("query_norm", query_latent[0]) if query_latent else inputs
        wide = up("content", latent.content_dim, "content_heads"), up("query", rotary_dim, "rotary_heads")
        content_BTNH, rotary_BTNP = (
            tap(self, name, flat).reshape(*flat.shape[:2], config.num_heads, -1)
            for name, flat in zip(("contents", "queries"), project(own, wide, step.adapters_B))
        )
        key_heads = HeadMatrices(config.num_heads, latent.rank, latent.content_dim, backend, name="key_heads")
        absorbed_BTNR = key_heads.absorb(content_BTNH, step.adapters_B)
        query_BTNH = jnp.concatenate([rotate(rotary_BTNP, *rotation), absorbed_BTNR], axis=-1)
        query_BTNH = tap(self, "rotated_queries", query_BTNH)
        key_BT1P = rotate(key_BTP[:, :, None], *rotation)
        row_BT1H = jnp.concatenate([key_BT1P, norm("latent_norm", latent_BTR)[:, :, None]], axis=-1)
        row_BT1H = tap(self, "rotated_keys", row_BT1H)
        zeros = ((0, 0), (0, 0), (0, 0), (0, cached_width(config, backend) - config.head_dim))
        query_BTNH, row_BT1H = jnp.pad(query_BTNH, zeros), jnp.pad(row_BT1H, zeros)
        in_bytes = holds_bytes(backend.cache_dtype)
        if in_bytes:
            query_BTNH, row_BT1H = even_out(query_BTNH, row_BT1H, backend.platform)
        rows_BTKH = jnp.broadcast_to(row_BT1H, (*row_BT1H.shape[:2], config.num_kv_heads, row_BT1H.shape[3]))
        assert config.attention_scale is not None
        layer = index if step.held is None else step.held[self.kind].index(index)
        mixed_BTNH, cache = cache.attend(
            layer,
            step.placements[self.kind],
            query_BTNH,
            rows_BTKH,
            rows_BTKH,
            Scores(config.attention_scale),
            backend,
        )
        if in_bytes:
            # Rows are mixed as they stand in the cache, evened out.
            mixed_BTNH = evened_query(mixed_BTNH, backend.platform)
        value_heads = HeadMatrices(config.num_heads, latent.value_dim, latent.rank, backend, name="value_heads")
        values_BTNV = value_heads.make(mixed_BTNH[..., rotary_dim : config.head_dim], step.adapters_B)
        mixed = tap(self, "mixed", values_BTNV).reshape(*values_BTNV.shape[:2], -1)
        output = Linear(config.model_dim, ("embed", "value_heads"), backend, config.output_bias, name="output")
        return tap(self, "result", output(mixed, step.adapters_B)), cache


class HeadMatrices(nn.Module):
    """A matrix ``[out, in]`` for each head, never in few bits.

    Those of keys are absorbed: what they give is a query that rows are compared with. A row's loaded adapter may have
    pairs of them, of which a half is shared by the heads (`jaxinfer.models.adapters`): of keys the one that comes after
    the heads', of values the one before.
    """

    num_heads: int
    outputs: int
    inputs: int
    backend: Backend

    @nn.compact
    def __call__(self) -> Float[Array, "N out in"]:
        init: Any = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=2, out_axis=1, batch_axis=0)
        shape, dtype = (self.num_heads, self.outputs, self.inputs), jnp.dtype(self.backend.param_dtype)
        return parameter(self, "weights", init, ("latent_heads", None, None), shape, dtype)

    def absorb(
        self, content_BTNH: Float[Array, "B T N H"], adapters_B: Int[Array, " B"] | None
    ) -> Float[Array, "B T N R"]:
        """Return what rows are compared with instead of keys.

        What an adapter adds to all keys of a head alike (``"shift"``) changes no weight.
        """
        matrices_NRH, own, ids_B = self(), self._own(adapters_B), _ids(adapters_B)
        if own is None:
            return multiply_heads(content_BTNH, matrices_NRH, self.backend)
        gained_BTNH = _flatly(partial(gained, own=own, ids_B=ids_B, backend=self.backend), content_BTNH)
        absorbed_BTNR = multiply_heads(gained_BTNH, matrices_NRH, self.backend)
        if "up" not in own:
            return absorbed_BTNR
        # The other way round: ``up`` makes keys, and so comes first here; its gain is a part of it.
        return add_pairs(absorbed_BTNR, content_BTNH, own["up"], own["down"], ids_B, self.backend)

    def make(self, mixed_BTNR: Float[Array, "B T N R"], adapters_B: Int[Array, " B"] | None) -> Float[Array, "B T N V"]:
        """Return the heads' values of rows that have been mixed."""
        values_BTNV, own, ids_B = (
            multiply_heads(mixed_BTNR, self(), self.backend),
            self._own(adapters_B),
            _ids(adapters_B),
        )
        if own is None:
            return values_BTNV
        values_BTNV = _flatly(partial(gained, own=own, ids_B=ids_B, backend=self.backend), values_BTNV)
        if "up" in own:
            values_BTNV = add_pairs(values_BTNV, mixed_BTNR, own["down"], own["up"], ids_B, self.backend)
        return _flatly(partial(shifted, own=own, ids_B=ids_B), values_BTNV)

    def _own(self, adapters_B: Int[Array, " B"] | None) -> Any:
        return None if adapters_B is None else loaded_stacks(self)


def _ids(adapters_B: Any) -> Any:
    return None if adapters_B is None else adapters_B - 1


def _flatly(change: Any, heads_BTNF: jax.Array) -> jax.Array:
    """Change rows whose heads are one vector."""
    return change(heads_BTNF.reshape(*heads_BTNF.shape[:2], -1)).reshape(heads_BTNF.shape)
