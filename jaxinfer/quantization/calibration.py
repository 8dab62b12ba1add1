"""Quantizes a decoder's layers one after the other, each on what the layers before it make of calibration texts."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.block import Block
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import Decoder, create_cache
from jaxinfer.models.experts import ROUTED
from jaxinfer.models.folded import with_factors
from jaxinfer.models.layers import EXPERTS, KERNEL, stored_kernel
from jaxinfer.models.linear import INPUTS
from jaxinfer.models.model import Model
from jaxinfer.models.step import build_step
from jaxinfer.notation import Array, Float, Int, Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.masks import causal_ancestors
from jaxinfer.quantization.experts import Routed, num_rounded, quantize_experts
from jaxinfer.quantization.folding import holds, part_of, with_part
from jaxinfer.quantization.seen import Method, Place, Seen, sums_of

# The linear layers of a block in the order in which they run: those of a group multiply the same numbers. A mixture
# has a shared expert in the place of the dense feed-forward layer's, if any.
STAGES: tuple[tuple[Place, ...], ...] = (
    (("attention", "query"), ("attention", "key"), ("attention", "value"), ("attention", "gate")),
    (("attention", "output"),),
    (("mlp", "gate"), ("mlp", "up")),
    (("mlp", "down"),),
    (("mlp", "shared", "gate"), ("mlp", "shared", "up")),
    (("mlp", "shared", "down"),),
)
# The tokens that run together; whole texts, at least one.
_TOGETHER = 4096


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
    left_out: Callable[[int], None] = lambda count: None,
) -> Iterator[Params]:
    """Yield the parameters of each layer with its kernels in few bits, and the factors that were folded into it.

    ``params`` are those of a decoder that does not scan its layers. The kernels of a stage are quantized once the
    stages before it are ("true-sequential"), and the texts' hidden states pass through quantized layers. One layer's
    weights are changed at a time. Layers that ``kept`` has are not quantized again. ``advance`` receives each layer
    that is done, ``left_out`` the number of a layer's experts that saw too few tokens, whose weights are rounded to the
    nearest.
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
        hidden, counts = zip(*(map(np.asarray, _run(alone, backend, block, each)) for each in hidden))
        left_out(num_rounded(np.sum(counts, axis=0)))
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
        places = [place for place in stage if holds(block, place)]
        if not places:
            continue
        seen = seen_by(block)(places[0])
        for place in places:
            linear = part_of(block, place)
            kernel = method.choose(place, stored_kernel(linear), seen)
            plain = {key: value for key, value in linear.items() if not key.endswith(KERNEL)}
            block = with_part(block, place, {**plain, KERNEL: kernel})
    if EXPERTS in block["mlp"]:
        assert config.experts is not None
        each = [np.concatenate(parts) for parts in zip(*(_routed(config, backend, block, part) for part in hidden))]
        mlp, factors = quantize_experts(block["mlp"], Routed(*each), config.experts, config.activation, method)
        block = {**block, "mlp": mlp}
        if factors is not None:
            block = with_factors(block, [("mlp", EXPERTS, "down")], factors)
    return block


def _layer_alone(config: DecoderConfig, layer: int) -> DecoderConfig:
    """Return the config of a decoder that has this layer only."""
    experts = config.experts and replace(config.experts, layer_pattern=(config.sparse_layers[layer],))
    alone = replace(config, num_layers=1, layer_pattern=(config.layers[layer],), experts=experts)
    if config.scores_by_depth:
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        before = config.layers[:layer].count(config.layers[layer])
        alone = replace(alone, attention_scale=scale / (before + 1), scores_by_depth=False)
    return alone


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _seen(
    config: DecoderConfig, backend: Backend, place: Place, block: Params, hidden_BTD: Float[Array, "B T D"]
) -> Seen:
    """Return sums over the inputs of one linear layer, or of a layer of experts, and the largest."""
    _, found = _apply(config, backend, block, hidden_BTD)
    if EXPERTS in place:
        inputs = found[INPUTS]["mlp"][ROUTED][-1][0]
    else:
        inputs = part_of(found[INPUTS], place)[INPUTS][-1]
    return sums_of(inputs.astype(jnp.float32).reshape(-1, inputs.shape[-1]))


def _routed(
    config: DecoderConfig, backend: Backend, block: Params, hidden_BTD: Float[np.ndarray, "B T D"]
) -> Iterator[np.ndarray]:
    """Yield a layer's tokens, each one's experts and their weights, as `Routed` has them."""
    for part in _sown(config, backend, block, hidden_BTD):
        yield np.asarray(part).reshape(-1, part.shape[-1])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sown(config: DecoderConfig, backend: Backend, block: Params, hidden_BTD: Float[Array, "B T D"]) -> Any:
    inputs_BTD, *chosen = _apply(config, backend, block, hidden_BTD)[1][INPUTS]["mlp"][ROUTED][-1]
    return inputs_BTD.astype(jnp.float32), *chosen


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    config: DecoderConfig, backend: Backend, block: Params, hidden_BTD: Float[Array, "B T D"]
) -> tuple[Array, Array]:
    """Return the block's output, and how many tokens each of its experts was given; none of a dense layer."""
    output_BTD, found = _apply(config, backend, block, hidden_BTD)
    if config.experts is None or EXPERTS not in block["mlp"]:
        return output_BTD, jnp.zeros((0,), jnp.int32)
    chosen = found[INPUTS]["mlp"][ROUTED][-1][1].reshape(-1)
    return output_BTD, jnp.bincount(chosen, length=config.experts.num_experts)


def _apply(config: DecoderConfig, backend: Backend, block: Params, hidden_BTD: Array) -> tuple[Array, Any]:
    """Run a decoder's only block on whole texts; return its output and what its linear layers multiplied."""
    batch, num_tokens, _ = hidden_BTD.shape
    cache = create_cache(config, batch, num_tokens, backend)
    lengths_B, start_B = jnp.full((batch,), num_tokens, jnp.int32), jnp.zeros((batch,), jnp.int32)
    placements = cache.place(start_B, causal_ancestors(num_tokens)[None], lengths_B, num_tokens)
    positions_BT = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), (batch, num_tokens))
    step = build_step(config, backend, positions_BT, placements, lengths_B)
    module = Block(config, backend, 0, config.sparse_layers[0], parent=None)
    (carry, _), found = cast(
        Any, module.apply({"params": block}, (jnp.asarray(hidden_BTD), cache), 0, step, mutable=[INPUTS])
    )
    return carry[0], found


def _positions(tokens_BT: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    return np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
