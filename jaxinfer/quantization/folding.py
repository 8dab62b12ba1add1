"""Scales the inputs of linear layers without changing a block's output: what feeds them is divided by as much."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.folded import with_factors
from jaxinfer.models.layers import EXPERTS, KERNEL, TRANSPOSED_KERNEL, stored_kernel
from jaxinfer.notation import Array, Params
from jaxinfer.quantization.seen import Place

_QKV: tuple[Place, ...] = tuple(("attention", name) for name in ("query", "key", "value", "gate"))
# What multiplies the output of the feed-forward layer's norm; scores are multiplied so, but stay as wide as they are.
_WIDE: tuple[Place, ...] = tuple(
    ("mlp", *inside, name) for inside in ((), (EXPERTS,), ("shared",)) for name in ("gate", "up")
)
_SCORES: tuple[Place, ...] = (("mlp", "router"), ("mlp", "shared_gate"))
_NORM_FIRST = ("pre_norm", "sandwich", "parallel_norms")

# Chooses the factor of each input of some linear layers, which share their inputs.
Chooser = Callable[[Sequence[Place], Sequence[Array]], Array]


def scale_inputs(config: DecoderConfig, block: Mapping[str, Any], choose: Chooser) -> Params:
    """Return a block whose linear layers have scaled inputs, where something feeds them that can be divided.

    That is a norm that nothing else reads; the values, where each query head has its own; and of a feed-forward layer
    the factor beside its gate, or what a ReLU is applied to. ``choose`` gets kernels ``[N, K]``, and those of experts
    ``[E, N, K]``, whose inputs are scaled but for those of down. The block then has the factors, too
    (`jaxinfer.models.folded`).
    """
    for places, feeder in _fed(config):
        present = [place for place in places if holds(block, place)]
        if not present:
            continue
        factors_K = choose(present, [_kernel(block, place) for place in present])
        shares_norm = any(place in _WIDE for place in present)
        for place in (*present, *(place for place in _SCORES if shares_norm and holds(block, place))):
            block = _scaled(block, place, factors_K)
        block = with_factors(feeder(block, factors_K), present, factors_K)
    return dict(block)


def _fed(config: DecoderConfig) -> Iterator[tuple[Sequence[Place], Callable[[Any, Array], Params]]]:
    if config.norm not in ("plain_layer", "plain_rms"):
        if config.block == "parallel":
            yield (*_QKV, *_WIDE), _norm(config, "attention_norm")
        elif config.block in _NORM_FIRST:
            yield _QKV, _norm(config, "attention_norm")
            yield _WIDE, _norm(config, "mlp_norm")
    if config.inner_norms:  # between what could be divided and what would be multiplied
        return
    if config.num_heads == config.num_kv_heads and config.clip_qkv is None:
        yield (("attention", "output"),), _linear(("attention", "value"))
    if config.gated_mlp or config.activation == "relu":
        yield (("mlp", "down"),), _linear(("mlp", "up"))
        yield (("mlp", "shared", "down"),), _linear(("mlp", "shared", "up"))


def _norm(config: DecoderConfig, name: str) -> Callable[[Any, Array], Params]:
    def divide(block: Mapping[str, Any], factors_K: Array) -> Params:
        added = 1.0 - config.neutral_scale
        norm = dict(block[name])
        norm["scale"] = _as(norm["scale"], (added + norm["scale"].astype(jnp.float32)) / factors_K - added)
        if "bias" in norm:
            norm["bias"] = _as(norm["bias"], norm["bias"] / factors_K)
        return {**block, name: norm}

    return divide


def _linear(place: Place) -> Callable[[Any, Array], Params]:
    def divide(block: Mapping[str, Any], factors_N: Array) -> Params:
        block = _scaled(block, place, 1 / factors_N[:, None])
        linear = part_of(block, place)
        if "bias" not in linear:
            return block
        return with_part(block, place, {**linear, "bias": _as(linear["bias"], linear["bias"] / factors_N)})

    return divide


def holds(block: Mapping[str, Any], place: Place) -> bool:
    """Whether a block has a part in this place."""
    node: Any = block
    for name in place:
        if not isinstance(node, Mapping) or name not in node:
            return False
        node = node[name]
    return True


def part_of(block: Mapping[str, Any], place: Place) -> Any:
    """Return the part of a block in this place."""
    return functools.reduce(lambda node, name: node[name], place, block)


def with_part(block: Mapping[str, Any], place: Place, part: Any) -> Params:
    """Return a block with another part in this place."""
    first, *rest = place
    return {**block, first: with_part(block[first], tuple(rest), part) if rest else part}


def _kernel(block: Mapping[str, Any], place: Place) -> Array:
    linear = part_of(block, place)
    return stored_kernel(linear) if isinstance(linear, Mapping) else linear


def _scaled(block: Mapping[str, Any], place: Place, factors: Array) -> Params:
    """Return a block with the kernel ``[out, in]`` in one place multiplied, stored the way round that it was."""
    linear = part_of(block, place)
    if not isinstance(linear, Mapping):
        return with_part(block, place, _as(linear, linear.astype(jnp.float32) * factors))
    if "weights" in linear:  # of scores
        return with_part(block, place, {**linear, "weights": linear["weights"] * factors})
    kernel = stored_kernel(linear).astype(jnp.float32) * factors
    key, kernel = (KERNEL, kernel) if KERNEL in linear else (TRANSPOSED_KERNEL, kernel.T)
    return with_part(block, place, {**linear, key: _as(linear[key], kernel)})


def _as(like: Array, values: Array) -> Array:
    return values.astype(like.dtype)
