"""Describes the arrays of a step with their placement on a mesh; allocates nothing."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.few_bits import FewBits
from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.state import DecodeState, initial_state
from jaxinfer.decoding.strategies.draft_model import DraftModel
from jaxinfer.decoding.strategies.sum_of_drafters import SumOfDrafters
from jaxinfer.decoding.strategy import Strategy
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.decoder import abstract_params, create_cache
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.quantized_array import QuantizedArray, is_quantized
from jaxinfer.parallel.rules import batch_shardings, parameter_shardings
from jaxinfer.planning.few_bits import described_in_few_bits
from jaxinfer.sampling.arrays import sampling_arrays
from jaxinfer.sampling.params import SamplingParams

AnyMesh = Mesh | AbstractMesh


def placed_params(config: DecoderConfig, backend: Backend, mesh: AnyMesh, weights: FewBits | None = None) -> Params:
    """Describe a decoder's parameters with their placement; with ``weights``, kernels are in few bits."""
    params = placed(abstract_params(config, backend), parameter_shardings(config, backend, mesh))
    return params if weights is None else described_in_few_bits(params, weights)


def placed_state(
    config: DecoderConfig,
    backend: Backend,
    strategy: Strategy,
    batch: int,
    num_slots: int,
    mesh: AnyMesh,
    params: SamplingParams | None = None,
) -> DecodeState:
    """Describe, with its placement, a state of ``batch`` rows of ``num_slots`` slots, all of the same ``params``."""

    def build() -> DecodeState:
        headroom = step_headroom(strategy, backend)
        cache = create_cache(config, batch, num_slots, backend, headroom, features=strategy.features)
        sampling = sampling_arrays(
            [params or SamplingParams()] * batch, [0] * batch, config.eos_token_ids, config.num_tokens
        )
        return initial_state([[0]] * batch, [1] * batch, num_slots, strategy.max_depth, cache, sampling)

    return placed_batch(jax.eval_shape(build), mesh)


def placed_batch(structs: Any, mesh: AnyMesh) -> Any:
    """Describe the arrays of a batch with their placement."""
    return placed(structs, batch_shardings(structs, mesh))


def placed(structs: Any, placements: Any) -> Any:
    """Describe arrays with the given placements."""
    return jax.tree.map(_at, structs, placements)


def placed_drafter_params(strategy: Strategy, mesh: AnyMesh) -> Any:
    """Describe a strategy's own parameters with their placement: draft models are split, and what is described so.

    What else there is stands on every device.
    """
    if isinstance(strategy, SumOfDrafters):
        return tuple(placed_drafter_params(part, mesh) for part in strategy.parts)
    if isinstance(strategy, DraftModel) and strategy.config is not None and strategy.backend is not None:
        return placed_params(strategy.config, strategy.backend, mesh)
    return jax.tree.map(lambda leaf: _at(leaf, NamedSharding(mesh, _spec(leaf))), strategy.parameters)


def replicated(structs: Any, mesh: AnyMesh) -> Any:
    """Describe arrays that every device holds."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: _at(leaf, everywhere), structs)


def placements(structs: Any) -> Any:
    """Return the placements of described arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, structs)


def any_layout(structs: Any) -> Any:
    """Return the placements of described arrays, with the layout in memory left to the compiler.

    In the default layout, a shard whose length is not a multiple of 128 would be copied at every call.
    """
    return jax.tree.map(lambda sharding: layout.Format(layout.Layout.AUTO, sharding), placements(structs))


def device_bytes(structs: Any) -> int:
    """Return the bytes of described arrays that one device holds."""
    leaves = jax.tree.leaves(structs)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * _bits(leaf.dtype) // 8 for leaf in leaves)


def device_weights(params: Params) -> int:
    """Return the number of weights that one device multiplies by, in whatever bits; of sparse ones, all."""

    def held(leaf: Any) -> int:
        if not isinstance(leaf, QuantizedArray):
            return math.prod(leaf.sharding.shard_shape(leaf.shape))
        part = math.prod(leaf.codes.sharding.shard_shape(leaf.codes.shape))
        return math.prod(leaf.shape) * part // math.prod(leaf.codes.shape)

    return sum(map(held, jax.tree.leaves(params, is_leaf=is_quantized)))


def _spec(leaf: Any) -> PartitionSpec:
    return leaf.sharding.spec if isinstance(getattr(leaf, "sharding", None), NamedSharding) else PartitionSpec()


def _bits(dtype: Any) -> int:
    # NumPy counts a byte for each number of four bits, of which a TPU packs two into one.
    return 4 if dtype in (jnp.int4, jnp.uint4) else 8 * dtype.itemsize


def _at(struct: Any, placement: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=placement)
