"""Quantizes a decoder's layers one after the other, each on what the layers before it make of calibration texts."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.block import Block
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.layers import KERNEL, stored_kernel
from jaxinfer.models.linear import INPUTS
from jaxinfer.models.model import Model
from jaxinfer.models.step import build_step
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.quantization.folding import Place

# The linear layers of a block in the order in which they run: those of a group multiply the same numbers.
STAGES = (
    (("attention", "query"), ("attention", "key"), ("attention", "value")),
    (("attention", "output"),),
    (("mlp", "gate"), ("mlp", "up")),
    (("mlp", "down"),),
)
# The tokens that run together; whole texts, at least one.
_TOGETHER = 4096


class Seen(NamedTuple):
    """What the inputs of a linear layer were, in float32.

    That is the means of ``x x^T``, ``[K, K]``, and of ``|x|``, ``[K]``, and the largest ``|x|``, ``[K]``.
    """

    squares_KK: Any
    sizes_K: Any
    most_K: Any


@runtime_checkable
class Method(Protocol):
    """A way to choose the codes of one layer's weights."""

    def prepare(self, config: DecoderConfig, block: Params, seen: Callable[[Place], Seen]) -> Params:
        """Return a block with the same output that is quantized in its place; ``seen`` are its inputs as it was."""
        ...

    def choose(self, place: Place, kernel: Float[Array, "N K"], seen: Seen) -> QuantizedArray:
        """Return a kernel in few bits."""
        ...


@runtime_checkable
class Kept(Protocol):
    """Where layers that are done outlive an interruption."""

    def read(self, layer: int) -> Params | None:
        """Return a layer that is done, None if it is not."""
        ...

    def write(self, layer: int, block: Params) -> None:
        """Keep a layer that is done."""
        ...


def quantize_layers(
    decoder: Decoder,
    params: Params,
    texts_NT: Int[np.ndarray, "N T"],
    method: Method,
    kept: Kept | None = None,
    advance: Callable[[int], None] = lambda layer: None,
) -> Iterator[Params]:
    """Yield the parameters of each layer with its kernels in few bits.

    ``params`` are those of a decoder that does not scan its layers. The kernels of a stage are quantized once the
    stages before it are ("true-sequential"), and the texts' hidden states pass through quantized layers. One layer's
    weights are changed at a time. Layers that ``kept`` has are not quantized again. ``advance`` receives each layer
    that is done.
    """
    config, backend = decoder.config, decoder.backend
    count = max(1, _TOGETHER // texts_NT.shape[1])
    embed = jax.jit(lambda params, tokens_BT, positions_BT: Model(decoder, params).embedded(tokens_BT, positions_BT))
    outer = {name: value for name, value in params.items() if name != "blocks"}
    batches = [texts_NT[first : first + count] for first in range(0, len(texts_NT), count)]
    hidden = [np.asarray(embed({**outer, "blocks": {}}, batch, _positions(batch))) for batch in batches]
    for layer in range(config.num_layers):
        alone = _layer_alone(config, layer)
        block = None if kept is None else kept.read(layer)
        if block is None:
            block = _quantized(alone, backend, params["blocks"][f"layer_{layer}"], hidden, method)
            if kept is not None:
                kept.write(layer, block)
        hidden = [np.asarray(_run(alone, backend, block, each)) for each in hidden]
        advance(layer)
        yield block


def _quantized(
    config: DecoderConfig, backend: Backend, block: Params, hidden: Sequence[np.ndarray], method: Method
) -> Params:
    def seen_by(block: Params) -> Callable[[Place], Seen]:
        def seen(place: Place) -> Seen:
            squares, sizes, most = zip(*(_seen(config, backend, place, block, each) for each in hidden))
            count = sum(each.shape[0] * each.shape[1] for each in hidden)
            squares_KK, sizes_K = (functools.reduce(operator.add, each) / count for each in (squares, sizes))
            return Seen(squares_KK, sizes_K, functools.reduce(jnp.maximum, most))

        return seen

    block = method.prepare(config, block, seen_by(block))
    for stage in STAGES:
        places = [place for place in stage if place[1] in block[place[0]]]
        seen = seen_by(block)(places[0])
        for place in places:
            kernel = stored_kernel(block[place[0]][place[1]])
            block = _with_kernel(block, place, method.choose(place, kernel, seen))
    return block


def _layer_alone(config: DecoderConfig, layer: int) -> DecoderConfig:
    """Return the config of a decoder that has this layer only."""
    alone = replace(config, num_layers=1, layer_pattern=(config.layers[layer],))
    if config.scores_by_depth:
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        before = config.layers[:layer].count(config.layers[layer])
        alone = replace(alone, attention_scale=scale / (before + 1), scores_by_depth=False)
    return alone


def _with_kernel(block: Mapping[str, Any], place: Place, kernel: QuantizedArray) -> Params:
    part, name = place
    linear = {key: value for key, value in block[part][name].items() if not key.endswith(KERNEL)}
    return {**block, part: {**block[part], name: {**linear, KERNEL: kernel}}}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _seen(
    config: DecoderConfig, backend: Backend, place: Place, block: Params, hidden_BTD: Float[Array, "B T D"]
) -> Seen:
    """Return sums over the inputs of one linear layer, and the largest."""
    _, found = _apply(config, backend, block, hidden_BTD)
    part, name = place
    inputs = found[INPUTS][part][name][INPUTS][-1].astype(jnp.float32)
    rows = inputs.reshape(-1, inputs.shape[-1])
    squares_KK = jnp.matmul(rows.T, rows, precision=jax.lax.Precision.HIGHEST)
    sizes = jnp.abs(rows)
    return Seen(squares_KK, jnp.sum(sizes, axis=0), jnp.max(sizes, axis=0))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(config: DecoderConfig, backend: Backend, block: Params, hidden_BTD: Float[Array, "B T D"]) -> Array:
    return _apply(config, backend, block, hidden_BTD)[0]


def _apply(config: DecoderConfig, backend: Backend, block: Params, hidden_BTD: Array) -> tuple[Array, Any]:
    """Run a decoder's only block on whole texts; return its output and what its linear layers multiplied."""
    batch, num_tokens, _ = hidden_BTD.shape
    cache = create_cache(config, batch, num_tokens, backend)
    lengths_B, start_B = jnp.full((batch,), num_tokens, jnp.int32), jnp.zeros((batch,), jnp.int32)
    placements = cache.place(start_B, causal_ancestors(num_tokens)[None], lengths_B, num_tokens)
    positions_BT = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (batch, num_tokens))
    step = build_step(config, backend, positions_BT, placements, lengths_B)
    module = Block(config, backend, 0, parent=None)
    (carry, _), found = cast(
        Any, module.apply({"params": block}, (jnp.asarray(hidden_BTD), cache), 0, step, mutable=[INPUTS])
    )
    return carry[0], found


def _positions(tokens_BT: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    return np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
