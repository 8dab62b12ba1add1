"""Runs some of a model's layers over whole texts, several per row."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int
from jaxinfer.ops.masks import causal_ancestors, in_window
from train.loop.whole_text import WholeText


class Texts(NamedTuple):
    """B rows of T tokens with several texts each: tokens of one segment are one text, 0 is padding.

    Positions count from each text's own start.
    """

    tokens_BT: Any
    positions_BT: Any
    segments_BT: Any


def run_first(model: Model, texts: Texts, num_layers: int) -> Float[Array, "B T D"]:
    """Return the hidden states of texts before the last ``num_layers`` layers."""
    return run_before(model, texts, (model.config.num_layers - num_layers,))


def run_before(model: Model, texts: Texts, layers: tuple[int, ...]) -> Float[Array, "B T F"]:
    """Return the hidden states of texts before each of some layers, ascending, side by side.

    The number of layers is after the last and before the final norm, as `jaxinfer.cache.features` has it.
    """
    hidden_BTD = model.embedded(texts.tokens_BT, texts.positions_BT)
    cache = LayeredCache(tuple(WholeText(kind.window) for kind in model.config.kinds))
    start, found = 0, []
    for stop in layers:
        hidden_BTD, cache = run_texts(model, start, stop, hidden_BTD, texts, cache)
        found.append(hidden_BTD)
        start = stop
    return jnp.concatenate(found, axis=-1)


def run_texts(
    model: Model, start: int, stop: int, hidden_BTD: Float[Array, "B T D"], texts: Texts, cache: LayeredCache
) -> tuple[Float[Array, "B T D"], LayeredCache]:
    """Run the layers from ``start`` to before ``stop`` over texts, with any kind of cache."""
    batch, num_tokens, _ = hidden_BTD.shape
    segments_BT = texts.segments_BT
    relation_BTT = causal_ancestors(num_tokens)[None] & (segments_BT[:, :, None] == segments_BT[:, None, :])
    placements = place_texts(model.config, relation_BTT, texts.positions_BT, texts.positions_BT)
    lengths_B = jnp.full((batch,), num_tokens, jnp.int32)
    return model.run_layers(start, stop, hidden_BTD, texts.positions_BT, cache, placements, lengths_B)


def place_texts(
    config: DecoderConfig,
    relation_BTS: Bool[Array, "B T S"],
    positions_BT: Int[Array, "B T"],
    keys_at_BS: Int[Array, "B S"],
) -> tuple[Placement, ...]:
    """Return the placements of new tokens, with the part of ``relation_BTS`` that each kind of layer sees."""
    return tuple(
        Placement(positions_BT, relation_BTS & in_window(positions_BT, keys_at_BS, kind.window))
        for kind in config.kinds
    )
