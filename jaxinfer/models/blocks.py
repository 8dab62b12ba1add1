"""All blocks of a decoder: unrolled, or scanned over stacked parameters."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxinfer.models.block import Block
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import Cycle, cycles, index_in_kind
from jaxinfer.models.step import Carry, Step
from jaxinfer.notation import Array, Int
from jaxinfer.ops.backend import Backend


def build_blocks(config: DecoderConfig, backend: Backend) -> nn.Module:
    """Return the module of all blocks, called like a scan: with ``(hidden, cache)``, `layer_indices` and a step."""
    if backend.scan_layers and config.num_layers > 1 and len(set(config.bodies)) == 1:
        return _scan(_block(backend), config.num_layers)(config, backend, 0, config.sparse_layers[0])
    return Blocks(config, backend)


def layer_indices(config: DecoderConfig) -> Int[Array, " L"]:
    """Return the indices that a scan over all layers iterates over."""
    return jnp.arange(config.num_layers, dtype=jnp.int32)


class Blocks(nn.Module):
    """Blocks in order. Single ones are named ``layer_0``, ``layer_1``, ...; scanned ones are named by their cycle."""

    config: DecoderConfig
    backend: Backend

    @nn.compact
    def __call__(self, carry: Carry, layers: Int[Array, " L"], step: Step) -> tuple[Carry, None]:
        config, backend = self.config, self.backend
        single = [Cycle(layer, layer + 1, 1) for layer in range(config.num_layers)]
        for cycle in cycles(config) if backend.scan_layers else single:
            if cycle.stop - cycle.start == 1:
                kind, index = index_in_kind(config, cycle.start)
                block = _block(backend)(
                    config, backend, kind, config.sparse_layers[cycle.start], name=f"layer_{cycle.start}"
                )
                carry, _ = block(carry, index, step)
            else:
                period = _scan(Period, cycle.repeats)(config, backend, cycle, name=cycle.name)
                carry, _ = period(carry, layers[: cycle.repeats], step)
        return carry, None


class Period(nn.Module):
    """The body of a scan over layers that differ in kind, or in having experts: a block for each layer of the cycle."""

    config: DecoderConfig
    backend: Backend
    cycle: Cycle

    @nn.compact
    def __call__(self, carry: Carry, repeat: Int[Array, ""] | int, step: Step) -> tuple[Carry, None]:
        start, _, period = self.cycle
        block, sparse = _block(self.backend), self.config.sparse_layers
        places = [index_in_kind(self.config, start + offset) for offset in range(period)]
        kinds = [kind for kind, _ in places]
        for offset, (kind, first) in enumerate(places):
            index = first + repeat * kinds.count(kind)
            body = block(self.config, self.backend, kind, sparse[start + offset], name=f"offset_{offset}")
            carry, _ = body(carry, index, step)
        return carry, None


def _block(backend: Backend) -> Any:
    # In a scan, the compiler cannot merge the body with its forward pass; elsewhere it would undo the recomputation.
    return nn.remat(Block, prevent_cse=not backend.scan_layers) if backend.remat_layers else Block


def _scan(body: Any, length: int) -> Any:
    return nn.scan(
        body,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]
        length=length,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
