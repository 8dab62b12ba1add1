"""A forward pass that also returns its intermediate results."""

from typing import Any, cast

import jax

from jaxinfer.cache.interface import LayeredCache, Placement
from jaxinfer.models.decoder import Decoder, output_logits
from jaxinfer.models.network import Network
from jaxinfer.models.taps import TAPS, tapped
from jaxinfer.notation import Array, Int, Params


def tapped_forward(
    decoder: Decoder,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    cache: LayeredCache,
    placements: tuple[Placement, ...],
    context_lengths_B: Int[Array, " B"],
) -> tuple[list[tuple[str, jax.Array]], LayeredCache]:
    """Run `jaxinfer.models.decoder.forward`; return what was tapped and the logits, named and in order, and the cache.

    Names are paths such as ``blocks.layer_3.attention.queries``; arrays are ``[B, T, ...]``. Layers in a scan or on
    stages of a pipeline have no taps.
    """
    network = Network(decoder.config, decoder.backend)
    inputs = (tokens_BT, positions_BT, cache, placements, context_lengths_B)
    (hidden_BTD, cache), found = cast(Any, network.apply({"params": params}, *inputs, mutable=[TAPS]))
    logits_BTV = output_logits(decoder, params, hidden_BTD)
    return [*tapped(found.get(TAPS, {})), ("logits", logits_BTV)], cache
