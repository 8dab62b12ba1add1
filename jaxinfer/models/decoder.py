"""The decoder: embedding, blocks over a cache, final norm, and the output matrix; a thin functional shell of Linen.

``Decoder(config, backend).apply({"params": params}, ...)`` is pure: the cache is an argument and a result.
"""

from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.cache.dense import DenseCache, create_dense_cache
from jaxinfer.cache.interface import Cache, Placement
from jaxinfer.models.block import Block, Step
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import RMSNorm, Table
from jaxinfer.models.positions import rotary_tables
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.matmul import product


class UnrolledBlocks(nn.Module):
    """The blocks one after another, each with parameters of its own: ``layer_0``, ``layer_1``, ..."""

    config: DecoderConfig
    backend: Backend

    @nn.compact
    def __call__(self, carry: tuple[Float[Array, "B T D"], Cache], layers: Int[Array, " L"], step: Step):
        for layer in range(layers.shape[0]):
            carry, _ = Block(self.config, self.backend, name=f"layer_{layer}")(carry, layer, step)
        return carry, None


def _scanned_blocks(config: DecoderConfig, backend: Backend) -> nn.Module:
    scanned = nn.scan(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]
        length=config.num_layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return scanned(config, backend)


class Decoder(nn.Module):
    """A decoder-only language model over a cache.

    ``__call__`` runs embedding, blocks and final norm; ``logits`` is the output matrix, apart from it because decoding
    wants the logits of few of a prompt's tokens.
    """

    config: DecoderConfig
    backend: Backend

    def setup(self) -> None:
        config, backend = self.config, self.backend
        table_shape = (config.vocab_size, config.model_dim)
        self.embed = Table(table_shape, "embedding", backend)
        build_blocks = _scanned_blocks if backend.scan_layers else UnrolledBlocks
        self.blocks = build_blocks(config, backend)
        self.final_norm = RMSNorm(config.norm_eps, backend)
        if not config.tied_embeddings:
            self.head = Table(table_shape, "kernel", backend)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        cache: Cache,
        placement: Placement,
        context_lengths_B: Int[Array, " B"],
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """Return the final normed hidden states of new tokens, and the cache with them written but not committed.

        ``positions_BT`` count from the start of the text; ``context_lengths_B`` are the rows' prompt lengths (see
        `rotary_tables`). Token ids outside the vocabulary read its first or last row.
        """
        compute_dtype = jnp.dtype(self.backend.compute_dtype)
        cosines, sines = rotary_tables(self.config, positions_BT, context_lengths_B, compute_dtype)
        hidden_BTD = embed(self.embed(), tokens_BT, self.backend)
        step = Step(cosines, sines, placement)
        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (hidden_BTD, cache), _ = self.blocks((hidden_BTD, cache), layers, step)
        return self.final_norm(hidden_BTD), cache

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Return the logits of hidden states, in float32 or wider."""
        kernel = self.embed() if self.config.tied_embeddings else self.head()
        return product(hidden, kernel, self.backend)

    def everything(self, tokens_BT, positions_BT, cache, placement, context_lengths_B):
        """Run both parts, so that initialising through it makes every parameter."""
        hidden_BTD, _ = self(tokens_BT, positions_BT, cache, placement, context_lengths_B)
        return self.logits(hidden_BTD)


def forward(
    decoder: Decoder,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    cache: Cache,
    placement: Placement,
    context_lengths_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Cache]:
    """Run `Decoder.__call__` as a pure function."""
    inputs = (tokens_BT, positions_BT, cache, placement, context_lengths_B)
    return cast(tuple[jax.Array, Cache], decoder.apply({"params": params}, *inputs))


def output_logits(decoder: Decoder, params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Run `Decoder.logits` as a pure function."""
    return cast(jax.Array, decoder.apply({"params": params}, hidden, method="logits"))


def init_params(config: DecoderConfig, backend: Backend, key: jax.Array) -> Params:
    """Draw random parameters; under ``jax.eval_shape`` this describes the real ones."""
    return cast(Params, nn.unbox(_init_boxed(config, backend, key)))


def abstract_params(config: DecoderConfig, backend: Backend) -> Params:
    """Describe the parameters as a tree of ``jax.ShapeDtypeStruct``, allocating nothing."""
    return jax.eval_shape(lambda key: init_params(config, backend, key), jax.random.key(0))


def logical_axes(config: DecoderConfig, backend: Backend) -> Params:
    """Return the logical axis names of every parameter, as a tree of ``PartitionSpec``."""
    return cast(
        Params, nn.get_partition_spec(jax.eval_shape(lambda key: _init_boxed(config, backend, key), jax.random.key(0)))
    )


def create_cache(config: DecoderConfig, batch: int, num_slots: int, backend: Backend) -> DenseCache:
    """Return an empty dense cache for a decoder."""
    lanes = config.num_kv_heads * config.head_dim
    return create_dense_cache(config.num_layers, batch, num_slots, lanes, backend)


def _init_boxed(config: DecoderConfig, backend: Backend, key: jax.Array) -> Params:
    decoder = Decoder(config, backend)
    cache = create_cache(config, 1, 1, backend)
    zero_B, one_BT = jnp.zeros((1,), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    placement = cache.place(zero_B, jnp.ones((1, 1, 1), bool))
    variables = decoder.init(key, one_BT, one_BT, cache, placement, zero_B, method=Decoder.everything)
    return cast(Params, variables["params"])
