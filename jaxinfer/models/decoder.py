"""The decoder: embedding, blocks over a cache, final norm and output matrix, as a pure Linen module.

``Decoder(config, backend).apply({"params": params}, ...)`` is pure: the cache is an argument and a result.
"""

from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.cache.dense import create_dense_cache
from jaxinfer.cache.interface import Cache, LayeredCache, Placement
from jaxinfer.cache.layouts import DENSE, CacheLayout, StreamingLayout
from jaxinfer.cache.ring import create_ring_cache, ring_capacity
from jaxinfer.cache.streaming import create_streaming_cache
from jaxinfer.models.block import Step
from jaxinfer.models.blocks import build_blocks, layer_indices
from jaxinfer.models.config import DecoderConfig, LayerKind
from jaxinfer.models.linear import Linear, Table, parameter
from jaxinfer.models.norm import Norm
from jaxinfer.models.pipeline import run_stages
from jaxinfer.models.positions import rotary_tables, unbounded_tables
from jaxinfer.models.rope_frequencies import static_frequencies
from jaxinfer.models.streaming import streams
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.matmul import product
from jaxinfer.ops.once import computed_once
from jaxinfer.ops.split_tokens import enter_region


class Decoder(nn.Module):
    """A decoder-only language model over a cache.

    ``__call__`` runs embedding, blocks and final norm. ``logits``, the output matrix, is separate because decoding
    needs the logits of only a few of a prompt's tokens.
    """

    config: DecoderConfig
    backend: Backend

    def setup(self) -> None:
        config, backend = self.config, self.backend
        table_shape = (config.vocab_size, config.embedding_dim or config.model_dim)
        self.embed = Table(table_shape, "embedding", backend)
        if config.learned_positions is not None:
            position_shape = (config.max_position + config.learned_positions, config.model_dim)
            self.positions = Table(position_shape, "embedding", backend, axes=(None, "embed"))
        if config.embedding_dim is not None:
            self.project_in = Linear(config.model_dim, ("embed", None), backend)
            self.project_out = Linear(config.embedding_dim, (None, "embed"), backend)
        self.blocks = build_blocks(config, backend)
        if config.final_norm:
            self.final_norm = Norm(config, backend)
        if not config.tied_embeddings:
            self.head = Table(table_shape, "kernel", backend)
        if config.head_bias:
            self.head_bias = Bias(config.vocab_size, "vocab", backend)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: LayeredCache,
        placements: tuple[Placement, ...],
        context_lengths_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], LayeredCache]:
        """Return the final normed hidden states of new tokens, and the cache with them written but not committed.

        ``positions_BT`` count from the start of the sequence; ``context_lengths_B`` are the rows' prompt lengths (see
        `rotary_tables`). Token ids outside the vocabulary read its first or last row.
        """
        step = build_step(self.config, self.backend, positions_BT, placements, context_lengths_B)
        # Tokens are split only after the embedding: otherwise every device would need the whole table.
        hidden_BTD = enter_region(self.embedded(tokens_BT, positions_BT), placements[0].seen, self.backend)
        carry = (hidden_BTD, cache)
        (hidden_BTD, cache), _ = self.blocks(carry, layer_indices(self.config), step)
        return self.normed(hidden_BTD), cache

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Return the logits of hidden states, in float32 or wider."""
        config = self.config
        if config.embedding_dim is not None:
            hidden = self.project_out(hidden)
        logits = product(hidden, self.embed() if config.tied_embeddings else self.head(), self.backend)
        if config.head_bias:
            logits = logits + jnp.broadcast_to(self.head_bias().astype(logits.dtype), logits.shape)
        if config.final_softcap is not None:
            logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
        if config.vocab_padding:
            logits = jnp.where(jnp.arange(config.vocab_size) < config.num_tokens, logits, -jnp.inf)
        return logits

    def normed(self, hidden_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the final norm of hidden states after any layer: the input of the output matrix."""
        return self.final_norm(hidden_BTD) if self.config.final_norm else hidden_BTD

    def embedded(self, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return the hidden states before the first layer."""
        config, backend = self.config, self.backend
        hidden_BTD = embed(self.embed(), tokens_BT, backend)
        if config.embedding_scale is not None:
            # Rounded like the weights, as in training, where sqrt(3072) became 55.5.
            scale = jnp.asarray(config.embedding_scale, backend.param_dtype)
            hidden_BTD = hidden_BTD * scale.astype(hidden_BTD.dtype)
        if config.embedding_dim is not None:
            hidden_BTD = self.project_in(hidden_BTD)
        if config.learned_positions is not None:
            hidden_BTD = hidden_BTD + embed(self.positions(), positions_BT + config.learned_positions, backend)
        return hidden_BTD.astype(backend.compute_dtype)

    def everything(self, tokens_BT, positions_BT, cache, placements, context_lengths_B):
        """Run both parts; initialisation calls this to create every parameter."""
        hidden_BTD, _ = self(tokens_BT, positions_BT, cache, placements, context_lengths_B)
        return self.logits(hidden_BTD)


def build_step(
    config: DecoderConfig,
    backend: Backend,
    positions_BT: Int[Array, "B T"],
    placements: tuple[Placement, ...],
    context_lengths_B: Int[Array, " B"],
) -> Step:
    """Compute the inputs that all blocks share in a forward pass over these positions."""
    dtype = jnp.dtype(backend.compute_dtype)
    rotations, placed = [], []

    def kept(tables: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return computed_once(tables, context_lengths_B, backend)

    for kind, placement in zip(config.kinds, placements, strict=True):
        if kind.rope is None:
            rotations.append(None)
        elif placement.shift_BT is None:
            rotations.append(kept(rotary_tables(kind.rope, positions_BT, context_lengths_B, dtype)))
        else:
            factor = static_frequencies(kind.rope)[1]
            cosines_BTR, sines_BTR = unbounded_tables(kind.rope, positions_BT, dtype)
            rotations.append(kept((cosines_BTR * factor, sines_BTR * factor)))
            placement = placement._replace(rotation=kept(unbounded_tables(kind.rope, placement.shift_BT, dtype)))
        placed.append(placement)
    return Step(tuple(rotations), tuple(placed))


class Bias(nn.Module):
    """A vector that is added to the logits."""

    features: int
    axis: str
    backend: Backend

    @nn.compact
    def __call__(self) -> Float[Array, " V"]:
        shape, dtype = (self.features,), jnp.dtype(self.backend.param_dtype)
        return parameter(self, "bias", nn.initializers.zeros, (self.axis,), shape, dtype)


def forward(
    decoder: Decoder,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    cache: LayeredCache,
    placements: tuple[Placement, ...],
    context_lengths_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], LayeredCache]:
    """Run `Decoder.__call__` as a pure function; with pipeline stages, each stage runs its own blocks."""
    config, backend = decoder.config, decoder.backend
    if backend.stages > 1:
        step = build_step(config, backend, positions_BT, placements, context_lengths_B)
        hidden_BTD = decoder.apply({"params": params}, tokens_BT, positions_BT, method="embedded")
        carry = cast(jax.Array, hidden_BTD), cache
        hidden_BTD, cache = run_stages(config, backend, params["blocks"], carry, 0, config.num_layers, step)
        return cast(jax.Array, decoder.apply({"params": params}, hidden_BTD, method="normed")), cache
    inputs = (tokens_BT, positions_BT, cache, placements, context_lengths_B)
    return cast(tuple[jax.Array, LayeredCache], decoder.apply({"params": params}, *inputs))


def output_logits(decoder: Decoder, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Run `Decoder.logits` as a pure function."""
    return cast(jax.Array, decoder.apply({"params": params}, hidden, method="logits"))


def init_params(config: DecoderConfig, backend: Backend, key: jax.Array) -> Params:
    """Draw random parameters; under ``jax.eval_shape`` this describes the parameters."""
    return cast(Params, nn.unbox(_init_boxed(config, backend, key)))


def abstract_params(config: DecoderConfig, backend: Backend) -> Params:
    """Describe the parameters as a tree of ``jax.ShapeDtypeStruct``; allocate nothing."""
    return jax.eval_shape(lambda key: init_params(config, backend, key), jax.random.key(0))


def logical_axes(config: DecoderConfig, backend: Backend) -> Params:
    """Return the logical axis names of every parameter, as a tree of ``PartitionSpec``."""
    return cast(
        Params, nn.get_partition_spec(jax.eval_shape(lambda key: _init_boxed(config, backend, key), jax.random.key(0)))
    )


def create_cache(
    config: DecoderConfig,
    batch: int,
    num_slots: int,
    backend: Backend,
    headroom: int = 0,
    layout: CacheLayout = DENSE,
) -> LayeredCache:
    """Return an empty cache for sequences of up to ``num_slots`` tokens.

    Layers with a window get a ring if it is smaller than a dense cache. ``headroom`` is how many tokens past the
    current one a decoding step may write. The ``layout`` must suit the model (`check_layout`).
    """
    lanes = backend.cache_lanes(config.num_kv_heads * config.head_dim)

    def part(kind: LayerKind) -> Cache:
        count = config.layers.count(kind)
        if isinstance(layout, StreamingLayout) and streams(kind, layout):
            return create_streaming_cache(count, batch, layout, headroom, lanes, backend)
        if kind.window is not None and ring_capacity(kind.window, headroom) < num_slots:
            return create_ring_cache(count, batch, kind.window, headroom, lanes, backend)
        window = kind.window if kind.window is not None and kind.window < num_slots else None
        return create_dense_cache(count, batch, num_slots, lanes, backend, window)

    return LayeredCache(tuple(part(kind) for kind in config.kinds))


def _init_boxed(config: DecoderConfig, backend: Backend, key: jax.Array) -> Params:
    decoder = Decoder(config, backend)
    cache = create_cache(config, 1, 1, backend)
    zero_B, one_BT = jnp.zeros((1,), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    placements = cache.place(zero_B, jnp.ones((1, 1, 1), bool))
    variables = decoder.init(key, one_BT, one_BT, cache, placements, zero_B, method=Decoder.everything)
    return cast(Params, variables["params"])
