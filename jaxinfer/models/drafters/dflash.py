"""DFlash: a small network that drafts a whole block of tokens in one pass (2602.06036).

A block of N places holds the current token and N - 1 times the mask token, embedded by the target's table. It runs
through a few Qwen3 layers in which its places see each other, in both directions, and the text before them. Of the text
they see no hidden states of their own: the target's, before several of its layers, become one state a token,

    context = RMSNorm(fc [h_1; h_2; ...])

and every layer makes its keys and values of that same state by its own key and value matrices. The target's output
matrix reads what the layers and a norm make of places 1 .. N - 1: at place k the token k places after the current one.

Parameters are ``{"decoder": {"blocks", "final_norm"}, "fc": {"kernel" [D, F]}, "hidden_norm": {"scale"}}``. Layers
with a window, which some published drafters have, see only the block's places up to their own, as they were trained.
"""

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import Cache, LayeredCache, Placement
from jaxinfer.cache.slots import slots_for
from jaxinfer.models.config import DecoderConfig, LayerKind, Rope
from jaxinfer.models.decoder import Decoder, abstract_params, create_cache
from jaxinfer.models.layer_range import layer_params
from jaxinfer.models.layers import KERNEL, TRANSPOSED_KERNEL, index_in_kind
from jaxinfer.models.model import Model
from jaxinfer.models.step import build_step
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.ops.matmul import linear

# What the drafter has of a decoder: the tables are the target's.
_OF_DECODER = ("blocks", "final_norm")


@dataclass(frozen=True)
class DFlashConfig:
    """The layers, how many places a block has, the token that marks unknown ones, and which features are read.

    ``features`` are layers of the target in the order in which ``fc`` reads the states before them.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token: int
    features: tuple[int, ...]

    @property
    def features_dim(self) -> int:
        """The width of what ``fc`` reads."""
        return len(self.features) * self.decoder.model_dim


@dataclass(frozen=True)
class Drafter:
    """A DFlash network with its parameters, for use inside a traced function."""

    dflash: DFlashConfig
    backend: Backend
    params: Params

    @property
    def model(self) -> Model:
        """The layers and the norm after them."""
        return Model(Decoder(self.dflash.decoder, self.backend), self.params["decoder"])

    def create_cache(self, batch: int, num_slots: int, catch_up: int) -> LayeredCache:
        """Return an empty cache for the context of texts of up to so many tokens, and a block after it.

        Up to ``catch_up`` tokens of a text are written at once where a block was before.
        """
        size = self.dflash.block_size
        return create_cache(
            self.dflash.decoder, batch, slots_for(num_slots + size), self.backend, headroom=size + catch_up
        )

    def context(self, features_BTF: Float[Array, "B T F"]) -> Float[Array, "B T D"]:
        """Return one state for each token of the features of several layers."""
        from jaxinfer.models.norm import Norm

        joined_BTD = linear(features_BTF, self.params["fc"][KERNEL], None, self.backend)
        norm = Norm(self.dflash.decoder, self.backend, parent=None)
        return cast(jax.Array, norm.apply({"params": self.params["hidden_norm"]}, joined_BTD))

    def extend(
        self,
        features_BTF: Float[Array, "B T F"],
        start_B: Int[Array, " B"],
        cache: LayeredCache,
        context_lengths_B: Int[Array, " B"],
        counts_B: Int[Array, " B"] | None = None,
    ) -> LayeredCache:
        """Write the keys and values of T tokens of a text, the first of them at ``start_B``, where blocks see them.

        Only the first ``counts_B`` of a row are meant (None: all); others may be written and must be written over.
        """
        num_tokens = features_BTF.shape[1]
        placements = cache.place(start_B, causal_ancestors(num_tokens)[None], counts_B)
        positions_BT = start_B[:, None] + jnp.arange(num_tokens, dtype=start_B.dtype)
        return self.write(self.context(features_BTF), positions_BT, cache, placements, context_lengths_B)

    def write(
        self,
        context_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        cache: LayeredCache,
        placements: tuple[Placement, ...],
        context_lengths_B: Int[Array, " B"],
    ) -> LayeredCache:
        """Write every layer's keys and values of tokens to any kind of cache."""
        from jaxinfer.models.block import Attention

        config = self.dflash.decoder
        step = build_step(config, self.backend, positions_BT, placements, context_lengths_B)
        for layer in range(config.num_layers):
            kind, index = index_in_kind(config, layer)
            params = layer_params(config, self.backend, self.params["decoder"]["blocks"], layer)["attention"]
            attention = Attention(config, self.backend, kind, parent=None)
            # What the tokens themselves would read is used by nobody, so no program computes it.
            _, part = attention.apply({"params": params}, context_BTD, cache.parts[kind], index, step)
            cache = cache.with_part(kind, cast(Cache, part))
        return cache

    def run_block(
        self,
        target: Model,
        tokens_B: Int[Array, " B"],
        start_B: Int[Array, " B"],
        cache: LayeredCache,
        context_lengths_B: Int[Array, " B"],
    ) -> Float[Array, "B N D"]:
        """Return what the target's output matrix reads at every place of blocks that begin with these tokens.

        ``start_B`` is how many tokens stand before. What the block writes to the cache is of no use to the next one.
        """
        size = self.dflash.block_size
        positions_BN = start_B[:, None] + jnp.arange(size, dtype=start_B.dtype)
        hidden_BND = self.embedded_blocks(target, tokens_B[:, None], positions_BN[:, None])[:, 0]
        relations = (
            jnp.ones((1, size, size), bool) if kind.window is None else causal_ancestors(size)[None]
            for kind in self.dflash.decoder.kinds
        )
        placements = tuple(part.place(start_B, relation) for part, relation in zip(cache.parts, relations))
        return self.run(hidden_BND, positions_BN, cache, placements, context_lengths_B)

    def embedded_blocks(
        self, target: Model, tokens_BC: Int[Array, "B C"], positions_BCN: Int[Array, "B C N"]
    ) -> Float[Array, "B C N D"]:
        """Return the states with which blocks begin that start with these tokens, several in a row."""
        shape = positions_BCN.shape
        masks = jnp.full((*shape[:2], shape[2] - 1), self.dflash.mask_token, tokens_BC.dtype)
        blocks_BCN = jnp.concatenate([tokens_BC[..., None], masks], axis=-1)
        flat = (array.reshape(shape[0], -1) for array in (blocks_BCN, positions_BCN))
        return target.embedded(*flat).reshape(*shape, -1)

    def run(
        self,
        hidden_BTD: Float[Array, "B T D"],
        positions_BT: Int[Array, "B T"],
        cache: LayeredCache,
        placements: tuple[Placement, ...],
        context_lengths_B: Int[Array, " B"],
    ) -> Float[Array, "B T D"]:
        """Run all layers and the norm on blocks' places."""
        hidden_BTD = hidden_BTD.astype(self.backend.compute_dtype)
        layers = 0, self.dflash.decoder.num_layers
        hidden_BTD, _ = self.model.run_layers(*layers, hidden_BTD, positions_BT, cache, placements, context_lengths_B)
        return self.model.normed(hidden_BTD)


def dflash_for(
    config: DecoderConfig,
    num_layers: int = 1,
    block_size: int = 16,
    mask_token: int = 0,
    features: tuple[int, ...] = (),
    ffn_dim: int | None = None,
) -> DFlashConfig:
    """Return a DFlash network for a model of this config: layers of its sizes, with rotary positions.

    Without ``features`` it reads those that published drafters of three layers, or of more, read.
    """
    ropes = [kind.rope for kind in config.kinds if kind.rope is not None]
    theta = max((rope.theta for rope in ropes), default=10000.0)
    num_kv_heads, head_dim = config.own_heads
    decoder = DecoderConfig(
        family="qwen3",
        vocab_size=config.num_tokens,
        num_layers=num_layers,
        model_dim=config.model_dim,
        ffn_dim=ffn_dim or config.ffn_dim,
        num_heads=config.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=config.max_position,
        norm_eps=config.norm_eps,
        layer_pattern=(LayerKind(Rope(theta, head_dim)),),
        qk_norm="head",
        tied_embeddings=True,
    )
    features = features or default_features(config.num_layers, max(num_layers, 3))
    return DFlashConfig(decoder, block_size, mask_token, features)


def default_features(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs drafters of so many layers read, by the rule of the published ones.

    They are evenly spaced from the input of the third layer to that of the last but one.
    """
    last = num_target_layers - 3
    places = [num_target_layers // 2] if num_layers == 1 else np.linspace(1, last, num_layers).round().astype(int)
    return tuple(sorted({min(max(int(place), 0), max(num_target_layers - 2, 0)) + 1 for place in places}))


def abstract_dflash(dflash: DFlashConfig, backend: Backend) -> Params:
    """Describe the parameters as a tree of ``jax.ShapeDtypeStruct``."""
    width, dtype = dflash.decoder.model_dim, jnp.dtype(backend.param_dtype)
    whole = abstract_params(dflash.decoder, backend)
    return {
        "decoder": {name: whole[name] for name in _OF_DECODER},
        "fc": {KERNEL: jax.ShapeDtypeStruct((width, dflash.features_dim), dtype)},
        "hidden_norm": {"scale": jax.ShapeDtypeStruct((width,), dtype)},
    }


def init_dflash(dflash: DFlashConfig, backend: Backend, seed: int) -> Params:
    """Draw initial parameters for training: what a layer adds is small, as its last matrices begin near zero."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [key.key for key in path]
        if names[-1] == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        if names[-1] == "bias":
            return jnp.zeros(leaf.shape, leaf.dtype)
        width = leaf.shape[-2 if names[-1] == TRANSPOSED_KERNEL else -1]
        deviation = width**-0.5 * (0.1 if names[-2] in ("output", "down") else 1.0)
        return jnp.asarray(deviation * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_dflash(dflash, backend))
