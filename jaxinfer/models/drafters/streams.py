"""Speculative streams: extra rows in a decoder's top layers that predict later tokens (Bhendawade et al., 2402.11131).

Before the top layers, stream j = 1 .. J of a token starts from the token's hidden state M as

    S_j = M + U V M + P_j

with low-rank matrices U and V and its own identifier P_j. It then runs through those layers like a token j places after
its own: it attends to what its token attends to, to the token, and to the token's streams 1 .. j. No token attends to a
stream. After the final norm and the output matrix, stream j predicts the token j + 1 places after its own.

Parameters are ``{"init": {"down": V [R, D], "up": U [D, R]}, "identifiers": P [J, D], "exit": {"down", "up"}}``.
``"exit"`` is a map of the same form with its own rank. It maps the hidden state before the top layers to an input of
the final norm and the output matrix, which then predict the next token; these predictions prune drafts before they get
streams. ``"blocks"`` are low-rank adapters of the top layers (`jaxinfer.models.adapters`), for streams only: tokens'
hidden states stay the same, bit by bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.interface import LayeredCache
from jaxinfer.models.adapters import adapter_shapes
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.layers import put
from jaxinfer.models.model import Model
from jaxinfer.notation import Array, Bool, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.matmul import linear


@dataclass(frozen=True)
class StreamsConfig:
    """The number of streams per token, how many of the last layers they run through, and the ranks of the two maps.

    ``adapter_rank`` is the rank of these layers' adapters; 0 means none.
    """

    num_streams: int = 3
    num_layers: int = 4
    rank: int = 8
    exit_rank: int = 8
    adapter_rank: int = 0

    def shapes(self, config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every parameter for a base model, by path."""
        width = config.model_dim
        adapters = adapter_shapes(config, self.num_layers, self.adapter_rank) if self.adapter_rank else {}
        return MappingProxyType(
            {
                "init.down": (self.rank, width),
                "init.up": (width, self.rank),
                "identifiers": (self.num_streams, width),
                "exit.down": (self.exit_rank, width),
                "exit.up": (width, self.exit_rank),
                **{f"blocks.{path}": shape for path, shape in adapters.items()},
            }
        )


class StreamsRun(NamedTuple):
    """The final hidden states of nodes and of each node's streams; ``cache`` is written but not committed."""

    hidden_BMD: Any
    streams_BMJD: Any
    cache: LayeredCache


def init_streams(streams: StreamsConfig, config: DecoderConfig, backend: Backend, key: jax.Array) -> Params:
    """Draw initial parameters for training: maps and adapters have no effect yet, identifiers differ a little."""
    stream_params: Params = {}
    for number, (path, shape) in enumerate(streams.shapes(config).items()):
        deviation = 0.0 if path.endswith(".up") else 0.02 if path == "identifiers" else shape[-1] ** -0.5
        drawn = deviation * jax.random.normal(jax.random.fold_in(key, number), shape)
        put(stream_params, path, drawn.astype(backend.param_dtype))
    return stream_params


def insert_streams(stream_params: Params, hidden_BMD: Float[Array, "B M D"], backend: Backend) -> Float[Array, "B T D"]:
    """Return the nodes and then, node by node, the initial states of their J streams: T = M * (1 + J) rows."""
    batch, _, width = hidden_BMD.shape
    streams_BMJD = begin_streams(stream_params, hidden_BMD, backend)
    return jnp.concatenate([hidden_BMD, streams_BMJD.reshape(batch, -1, width)], axis=1)


def begin_streams(
    stream_params: Params, hidden_BMD: Float[Array, "B M D"], backend: Backend
) -> Float[Array, "B M J D"]:
    """Return the streams of tokens as they enter the top layers."""
    first_BMD = _apply(stream_params["init"], hidden_BMD, backend)
    return first_BMD[:, :, None] + stream_params["identifiers"].astype(first_BMD.dtype)


def stream_relation(ancestors_BMM: Bool[Array, "#B M M"], num_streams: int) -> Bool[Array, "#B T T"]:
    """Return which of the nodes and streams each of them attends to, in the order of `insert_streams`.

    In every row, the number of ancestors is the depth below the root, as caches require.
    """
    batch, num_nodes, _ = ancestors_BMM.shape
    num_rows = num_nodes * num_streams
    own_earlier = np.kron(np.eye(num_nodes, dtype=bool), np.tri(num_streams, dtype=bool))
    unseen = jnp.zeros((batch, num_nodes, num_rows), bool)
    of_nodes = jnp.concatenate([ancestors_BMM, unseen], axis=2)
    earlier = jnp.broadcast_to(jnp.asarray(own_earlier), (batch, num_rows, num_rows))
    of_streams = jnp.concatenate([jnp.repeat(ancestors_BMM, num_streams, axis=1), earlier], axis=2)
    return jnp.concatenate([of_nodes, of_streams], axis=1)


def stream_positions(positions_BM: Int[Array, "B M"], num_streams: int) -> Int[Array, "B T"]:
    """Return the positions of nodes and their streams, in the order of `insert_streams`."""
    ahead_J = jnp.arange(1, num_streams + 1, dtype=positions_BM.dtype)
    streams_BMJ = positions_BM[:, :, None] + ahead_J
    return jnp.concatenate([positions_BM, streams_BMJ.reshape(positions_BM.shape[0], -1)], axis=1)


def run_streams(
    model: Model,
    stream_params: Params,
    num_layers: int,
    hidden_BMD: Float[Array, "B M D"],
    start_B: Int[Array, " B"],
    ancestors_BMM: Bool[Array, "#B M M"],
    positions_BM: Int[Array, "B M"],
    cache: LayeredCache,
    context_lengths_B: Int[Array, " B"],
) -> StreamsRun:
    """Run the last ``num_layers`` layers on nodes and their streams, then the final norm.

    ``hidden_BMD`` are the nodes' states before these layers; nodes and relation are as in `LayeredCache.place`. Streams
    are written to the cache after all nodes, so that keeping a path of nodes drops them.
    """
    num_streams, last = stream_params["identifiers"].shape[0], model.config.num_layers
    batch, num_nodes, width = hidden_BMD.shape
    # Rows from ``num_nodes`` on are streams.
    adapted = replace(model, decoder=Decoder(model.config, replace(model.decoder.backend, adapted_from=num_nodes)))
    rows_BTD = insert_streams(stream_params, hidden_BMD, model.decoder.backend).astype(hidden_BMD.dtype)
    positions_BT = stream_positions(positions_BM, num_streams)
    placements = cache.place(start_B, stream_relation(ancestors_BMM, num_streams))
    rows_BTD, cache = adapted.run_layers(
        last - num_layers,
        last,
        rows_BTD,
        positions_BT,
        cache,
        placements,
        context_lengths_B,
        stream_params.get("blocks"),
    )
    rows_BTD = model.normed(rows_BTD)
    streams_BMJD = rows_BTD[:, num_nodes:].reshape(batch, num_nodes, num_streams, width)
    return StreamsRun(rows_BTD[:, :num_nodes], streams_BMJD, cache)


def exit_logits(model: Model, stream_params: Params, hidden_BMD: Float[Array, "B M D"]) -> Float[Array, "B M V"]:
    """Predict the token after each node from its state before the top layers."""
    return model.logits(exit_states(model, stream_params, hidden_BMD))


def exit_states(model: Model, stream_params: Params, hidden_BMD: Float[Array, "B M D"]) -> Float[Array, "B M D"]:
    """Return the input of the output matrix for `exit_logits`."""
    return model.normed(_apply(stream_params["exit"], hidden_BMD, model.decoder.backend))


def _apply(low_rank: Params, hidden: Float[Array, "*rows D"], backend: Backend) -> Float[Array, "*rows D"]:
    inner = linear(hidden, low_rank["down"], None, backend)
    return hidden + linear(inner, low_rank["up"], None, backend)
