"""The network as a Linen module: embedding, blocks over a cache, final norm, and the output matrix."""

from dataclasses import replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.adapters import EMBED, HEAD
from jaxinfer.models.blocks import build_blocks, layer_indices
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.linear import Linear, Table, loaded_stacks, parameter
from jaxinfer.models.norm import Norm
from jaxinfer.models.own_tables import own_embeddings, own_logits
from jaxinfer.models.positions import sinusoids
from jaxinfer.models.step import build_step
from jaxinfer.models.taps import tap
from jaxinfer.notation import TENSOR, Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.embedding import embed
from jaxinfer.ops.matmul import product
from jaxinfer.ops.rounding import rounded, scale_by
from jaxinfer.ops.split_tokens import enter_region


class Network(nn.Module):
    """A decoder-only language model over a cache.

    ``__call__`` runs embedding, blocks and final norm; ``logits`` is the output matrix, apart from it because decoding
    wants the logits of few of a prompt's tokens.
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
        if config.embedding_norm:
            self.embed_norm = Norm(config, backend)
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
        adapters_B: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayeredCache]:
        """Return the final normed hidden states of new tokens, and the cache with them written but not committed.

        ``positions_BT`` count from the start of the text; ``context_lengths_B`` are the rows' prompt lengths (see
        `rotary_tables`), ``adapters_B`` their loaded adapters. Token ids outside the vocabulary read its first or last
        row.
        """
        step = build_step(self.config, self.backend, positions_BT, placements, context_lengths_B, adapters_B)
        # Were its rows split further at once, every device would need the whole embedding table.
        hidden_BTD = self.embedded(tokens_BT, positions_BT, adapters_B)
        hidden_BTD = enter_region(hidden_BTD, placements[0].seen, self.backend)
        carry = (hidden_BTD, cache)
        (hidden_BTD, cache), _ = self.blocks(carry, layer_indices(self.config), step)
        return self.normed(hidden_BTD, adapters_B), cache

    def logits(
        self, hidden: Float[Array, "*rows D"], adapters_B: Int[Array, " B"] | None = None
    ) -> Float[Array, "*rows V"]:
        """Return the logits of hidden states, in float32 or wider; ``adapters_B`` is for the first axis of rows."""
        config = self.config
        if config.embedding_dim is not None:
            hidden = self.project_out(hidden)
        table = self.embed if config.tied_embeddings else self.head
        # Rows in bytes would cost a quarter more of perplexity here than in all blocks.
        backend = replace(self.backend, activations=None)
        logits = product(hidden, table(), backend, split=(TENSOR, None))
        if adapters_B is not None and (own := self._own(HEAD)) is not None:
            logits = own_logits(logits, hidden, own, adapters_B - 1, backend)
        if config.head_bias:
            logits = logits + jnp.broadcast_to(self.head_bias().astype(logits.dtype), logits.shape)
        if config.logit_scale is not None:
            logits = scale_by(config.logit_scale, logits, self.backend.platform)
        if config.final_softcap is not None:
            logits = self._rounded(config.final_softcap * jnp.tanh(logits / config.final_softcap))
        if config.vocab_padding:
            logits = jnp.where(jnp.arange(config.vocab_size) < config.num_tokens, logits, -jnp.inf)
        return logits

    def normed(
        self, hidden_BTD: Float[Array, "B T D"], adapters_B: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        """Return what the output matrix reads, of the hidden states after any layer."""
        return self.final_norm(hidden_BTD, adapters_B) if self.config.final_norm else hidden_BTD

    def embedded(
        self, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], adapters_B: Int[Array, " B"] | None = None
    ) -> Float[Array, "B T D"]:
        """Return the hidden states before the first layer."""
        config, backend = self.config, self.backend
        hidden_BTD = embed(self.embed(), tokens_BT, backend)
        if adapters_B is not None and (own := self._own(EMBED)) is not None:
            hidden_BTD = own_embeddings(hidden_BTD, tokens_BT, own, adapters_B - 1, backend)
        if config.embedding_scale is not None:
            # Rounded as the weights are: so it was in training, where sqrt(3072) came to 55.5.
            scale = jnp.asarray(config.embedding_scale, backend.param_dtype)
            hidden_BTD = self._rounded(hidden_BTD * scale.astype(hidden_BTD.dtype))
        if config.embedding_norm:
            hidden_BTD = self.embed_norm(hidden_BTD, adapters_B)
        if config.embedding_dim is not None:
            hidden_BTD = self.project_in(hidden_BTD)
        if config.learned_positions is not None:
            hidden_BTD = hidden_BTD + embed(self.positions(), positions_BT + config.learned_positions, backend)
        if config.sinusoids is not None:
            hidden_BTD = hidden_BTD + sinusoids(positions_BT + config.sinusoids, config.model_dim, hidden_BTD.dtype)
        return tap(self, "embedded_tokens", hidden_BTD.astype(backend.compute_dtype))

    def _own(self, table: str) -> Any:
        """Return what loaded adapters have for a table, None if none has a part in it."""
        loaded = loaded_stacks(self)
        return None if loaded is None else loaded.get(table)

    def _rounded(self, products: jax.Array) -> jax.Array:
        # What is added to them depends on the program.
        return rounded(products) if self.backend.platform == "cpu" else products

    def everything(self, tokens_BT, positions_BT, cache, placements, context_lengths_B):
        """Run both parts, so that initialising through it makes every parameter."""
        hidden_BTD, _ = self(tokens_BT, positions_BT, cache, placements, context_lengths_B)
        return self.logits(hidden_BTD)


class Bias(nn.Module):
    """A vector that is added to the logits."""

    features: int
    axis: str
    backend: Backend

    @nn.compact
    def __call__(self) -> Float[Array, " V"]:
        shape, dtype = (self.features,), jnp.dtype(self.backend.param_dtype)
        return parameter(self, "bias", nn.initializers.zeros, (self.axis,), shape, dtype)


def init_boxed(config: DecoderConfig, backend: Backend, key: jax.Array, cache: LayeredCache) -> Params:
    """Draw random parameters, each in a box that has its logical axes."""
    network = Network(config, backend)
    zero_B, one_BT = jnp.zeros((1,), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    placements = cache.place(zero_B, jnp.ones((1, 1, 1), bool))
    variables = network.init(key, one_BT, one_BT, cache, placements, zero_B, method=Network.everything)
    return cast(Params, variables["params"])
