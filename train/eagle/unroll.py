"""The training-time test of EAGLE-3 (2503.01840): the drafter runs along texts, and then on its own outputs.

In step i, the place of token t reads token t + 1 + i and, from the second step on, its own output of the step before.
It attends as a draft at depth i would: to the places up to t as the target's features made them, and to itself in each
later step.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.cache.interface import Placement, Scores
from jaxinfer.models.drafters.eagle import EagleShape, fused, next_embeddings, run_layer
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import causal_ancestors
from train.eagle.rows import EagleRows
from train.features.text_pass import Texts, run_before
from train.loop.whole_text import WholeText


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=["window"])
@dataclass(frozen=True)
class Unrolled(WholeText):
    """A cache of the steps so far: the keys and values ``[B, T, K, H]`` of each."""

    keys: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()

    def attend(
        self,
        layer: Int[Array, ""] | int,
        placement: Placement,
        query_BTNH: Float[Array, "B T N H"],
        keys_BTKH: Float[Array, "B T K H"],
        values_BTKH: Float[Array, "B T K H"],
        scores: Scores,
        backend: Backend,
    ) -> tuple[Float[Array, "B T N H"], "Unrolled"]:
        """Attend to the first step's places by the placement's mask, and to the own place of the others."""
        keys, values = (*self.keys, keys_BTKH), (*self.values, values_BTKH)
        batch, num_tokens, num_heads, width = query_BTNH.shape
        query = query_BTNH.reshape(batch, num_tokens, keys_BTKH.shape[2], -1, width).astype(jnp.float32) * scores.scale
        first = jnp.einsum("btkgh,bskh->bkgts", query, keys[0].astype(jnp.float32))
        first = jnp.where(placement.mask_BTS[:, None, None], first, -jnp.inf)
        later = [jnp.einsum("btkgh,btkh->bkgt", query, each.astype(jnp.float32))[..., None] for each in keys[1:]]
        weights = jax.nn.softmax(jnp.concatenate([first, *later], axis=-1), axis=-1)
        mixed = jnp.einsum("bkgts,bskh->btkgh", weights[..., :num_tokens], values[0].astype(jnp.float32))
        for step, each in enumerate(values[1:]):
            own = weights[..., num_tokens + step].transpose(0, 3, 1, 2)
            mixed += own[..., None] * each.astype(jnp.float32)[:, :, :, None]
        mixed_BTNH = mixed.reshape(batch, num_tokens, num_heads, width).astype(query_BTNH.dtype)
        return mixed_BTNH, Unrolled(None, keys, values)


class Features(NamedTuple):
    """What the target computed of rows: its features for the drafter, and its final normed hidden states."""

    read_BTF: Float[Array, "B T F"]
    final_BTD: Float[Array, "B T D"]


def kept_layers(shape: EagleShape, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs training reads: the drafter's features, and what follows the last layer."""
    return tuple(sorted({*shape.layers, num_layers}))


def read_features(shape: EagleShape, model: Model, batch: EagleRows) -> Features:
    """Return the features of rows, from those that are kept or by a pass over them."""
    layers = kept_layers(shape, model.config.num_layers)
    if batch.hidden_BTF is None:
        hidden_BTF = run_before(model, Texts(*map(jnp.asarray, batch[:3])), layers)
    else:
        hidden_BTF = jnp.asarray(batch.hidden_BTF).astype(model.decoder.backend.compute_dtype)
    by_layer = dict(zip(layers, jnp.split(hidden_BTF, len(layers), axis=-1)))
    read_BTF = jnp.concatenate([by_layer[layer] for layer in shape.layers], axis=-1)
    return Features(read_BTF, model.normed(by_layer[model.config.num_layers]))


def ahead(values_BT: Any, steps: int) -> Any:
    """Return what stands so many places to the right; the row's start at its end."""
    return jnp.roll(jnp.asarray(values_BT), -steps, axis=1)


def is_asked(batch: EagleRows, step: int) -> Bool[Array, "B T"]:
    """Return where a step predicts a token that counts: the one step + 2 places on is of the same text."""
    segments_BT = jnp.asarray(batch.segments_BT)
    is_inside_T = jnp.arange(segments_BT.shape[1]) < segments_BT.shape[1] - step - 2
    is_same_BT = (ahead(segments_BT, step + 2) == segments_BT) & (segments_BT > 0)
    return is_inside_T & is_same_BT & ahead(batch.mask_BT, step + 2)


def unroll(
    shape: EagleShape, model: Model, params: Params, features_BTF: Float[Array, "B T F"], batch: EagleRows, steps: int
) -> list[Float[Array, "B T D"]]:
    """Return the layer's outputs in each step; the first draft of every place is what follows the first output."""
    backend, segments_BT = model.decoder.backend, jnp.asarray(batch.segments_BT)
    positions_BT, cache = jnp.asarray(batch.positions_BT), Unrolled()
    # Padding sees itself, lest it have nothing to see.
    is_text_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    slots_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1], dtype=jnp.int32), segments_BT.shape)
    placement = Placement(slots_BT, is_text_BTS & causal_ancestors(segments_BT.shape[1])[None])
    lengths_B = jnp.full(segments_BT.shape[:1], segments_BT.shape[1], jnp.int32)
    hidden_BTD, outputs = fused(shape, params, features_BTF, backend), []
    for step in range(steps):
        embedded_BTE = next_embeddings(model, params, ahead(batch.tokens_BT, step + 1))
        hidden_BTD, cache = run_layer(
            shape, params, backend, embedded_BTE, hidden_BTD, positions_BT + step, cache, placement, lengths_B
        )
        outputs.append(hidden_BTD)
    return outputs
