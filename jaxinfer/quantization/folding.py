"""Scales the inputs of linear layers without changing a block's output: what feeds them is divided by as much."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import KERNEL, TRANSPOSED_KERNEL, stored_kernel
from jaxinfer.notation import Array, Params

Place = tuple[str, str]
_QKV: tuple[Place, ...] = (("attention", "query"), ("attention", "key"), ("attention", "value"))
_WIDE: tuple[Place, ...] = (("mlp", "gate"), ("mlp", "up"))
_NORM_FIRST = ("pre_norm", "sandwich", "parallel_norms")

# Chooses the factor of each input of some linear layers, which share their inputs.
Chooser = Callable[[Sequence[Place], Sequence[Array]], Array]


def scale_inputs(config: DecoderConfig, block: Mapping[str, Any], choose: Chooser) -> Params:
    """Return a block whose linear layers have scaled inputs, where something feeds them that can be divided.

    That is a norm that nothing else reads; the values, where each query head has its own; and of a feed-forward layer
    the factor beside its gate, or what a ReLU is applied to.
    """
    for places, feeder in _fed(config):
        present = [place for place in places if place[1] in block[place[0]]]
        factors_K = choose(present, [stored_kernel(block[part][name]) for part, name in present])
        for place in present:
            block = _scaled(block, place, factors_K)
        block = feeder(block, factors_K)
    return dict(block)


def _fed(config: DecoderConfig) -> Iterator[tuple[Sequence[Place], Callable[[Any, Array], Params]]]:
    if config.norm != "plain_layer":
        if config.block == "parallel":
            yield (*_QKV, *_WIDE), _norm(config, "attention_norm")
        elif config.block in _NORM_FIRST:
            yield _QKV, _norm(config, "attention_norm")
            yield _WIDE, _norm(config, "mlp_norm")
    if config.num_heads == config.num_kv_heads:
        yield (("attention", "output"),), _linear(("attention", "value"))
    if config.gated_mlp or config.activation == "relu":
        yield (("mlp", "down"),), _linear(("mlp", "up"))


def _norm(config: DecoderConfig, name: str) -> Callable[[Any, Array], Params]:
    def divide(block: Mapping[str, Any], factors_K: Array) -> Params:
        added = 1.0 if config.norm == "rms_plus_one" else 0.0
        norm = dict(block[name])
        norm["scale"] = _as(norm["scale"], (added + norm["scale"].astype(jnp.float32)) / factors_K - added)
        if "bias" in norm:
            norm["bias"] = _as(norm["bias"], norm["bias"] / factors_K)
        return {**block, name: norm}

    return divide


def _linear(place: Place) -> Callable[[Any, Array], Params]:
    def divide(block: Mapping[str, Any], factors_N: Array) -> Params:
        block = _scaled(block, place, 1 / factors_N[:, None])
        part, name = place
        linear = block[part][name]
        if "bias" not in linear:
            return block
        linear = {**linear, "bias": _as(linear["bias"], linear["bias"] / factors_N)}
        return {**block, part: {**block[part], name: linear}}

    return divide


def _scaled(block: Mapping[str, Any], place: Place, factors: Array) -> Params:
    """Return a block with the kernel ``[out, in]`` in one place multiplied, stored the way round that it was."""
    part, name = place
    linear = dict(block[part][name])
    kernel = stored_kernel(linear).astype(jnp.float32) * factors
    key, kernel = (KERNEL, kernel) if KERNEL in linear else (TRANSPOSED_KERNEL, kernel.T)
    linear[key] = _as(linear[key], kernel)
    return {**block, part: {**block[part], name: linear}}


def _as(like: Array, values: Array) -> Array:
    return values.astype(like.dtype)
