"""Runs a range of a decoder's layers without copying their weights out of a stack."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.adapters import adapted
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layer_stack import block_of
from jaxinfer.models.layers import EXPERTS, Cycle, cycles, index_in_kind
from jaxinfer.models.step import Carry, Step
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend


def run_layers(
    config: DecoderConfig,
    backend: Backend,
    blocks: Params,
    carry: Carry,
    start: int,
    stop: int,
    step: Step,
    adapters: Params | None = None,
) -> Carry:
    """Run layers ``start .. stop - 1``; ``blocks`` holds all layers' parameters, in the decoder's form.

    ``adapters`` (`jaxinfer.models.adapters`) are for the layers of this range.
    """
    layer = start
    while layer < stop:
        cycle = _cycle_of(config, backend, layer)
        whole = (min(stop, cycle.stop) - layer) // cycle.period
        if cycle.stop - cycle.start > 1 and (layer - cycle.start) % cycle.period == 0 and whole > 0:
            carry = _run_periods(config, backend, blocks, carry, cycle, layer, whole, step, adapters, layer - start)
            layer += whole * cycle.period
        else:
            params = adapted(_parameters(backend, blocks, cycle, layer), adapters, layer - start)
            carry = _run_one(config, backend, params, carry, layer, step)
            layer += 1
    return carry


def _cycle_of(config: DecoderConfig, backend: Backend, layer: int) -> Cycle:
    if not backend.scan_layers:
        return Cycle(layer, layer + 1, 1)
    return next(cycle for cycle in cycles(config) if cycle.start <= layer < cycle.stop)


def _run_periods(
    config: DecoderConfig,
    backend: Backend,
    blocks: Params,
    carry: Carry,
    cycle: Cycle,
    layer: int,
    whole: int,
    step: Step,
    adapters: Params | None,
    first_adapter: int,
) -> Carry:
    """Scan over layer indices, which reads weights in place; slicing the stack first would copy them.

    The adapters of ``layer`` are at index ``first_adapter``.
    """
    places = [index_in_kind(config, cycle.start + offset) for offset in range(cycle.period)]
    kinds = [kind for kind, _ in places]
    first_repeat = (layer - cycle.start) // cycle.period

    def advance(carry: Carry, repeat: Any) -> tuple[Carry, None]:
        for offset, (kind, first) in enumerate(places):
            params = block_of(stack_of(blocks, cycle, offset), repeat, backend.reads_live_blocks)
            params = adapted(params, adapters, first_adapter + (repeat - first_repeat) * cycle.period + offset)
            index = first + repeat * kinds.count(kind)
            carry = apply_block(config, backend, kind, params, carry, index, step)
        return carry, None

    repeats = jnp.arange(first_repeat, first_repeat + whole, dtype=jnp.int32)
    carry, _ = jax.lax.scan(advance, carry, repeats)
    return carry


def layer_params(config: DecoderConfig, backend: Backend, blocks: Params, layer: int) -> Params:
    """Return one layer's parameters out of all layers', in the decoder's form."""
    return _parameters(backend, blocks, _cycle_of(config, backend, layer), layer)


def _run_one(config: DecoderConfig, backend: Backend, params: Params, carry: Carry, layer: int, step: Step) -> Carry:
    kind, index = index_in_kind(config, layer)
    return apply_block(config, backend, kind, params, carry, index, step)


def _parameters(backend: Backend, blocks: Params, cycle: Cycle, layer: int) -> Params:
    if cycle.stop - cycle.start == 1 and f"layer_{layer}" in blocks:
        return blocks[f"layer_{layer}"]
    repeat, offset = divmod(layer - cycle.start, cycle.period)
    return block_of(stack_of(blocks, cycle, offset), repeat, backend.reads_live_blocks)


def stack_of(blocks: Params, cycle: Cycle, offset: int) -> Params:
    return blocks[cycle.name][f"offset_{offset}"] if cycle.name in blocks else blocks


def apply_block(
    config: DecoderConfig, backend: Backend, kind: int, params: Params, carry: Carry, index: Any, step: Step
) -> Carry:
    # Imported here: a program that was compiled before needs no Linen.
    from jaxinfer.models.block import Block

    block = Block(config, backend, kind, EXPERTS in params["mlp"], parent=None)

    def run(params: Params, carry: Carry) -> Carry:
        return block.apply({"params": params}, carry, index, step)[0]  # pyright: ignore[reportReturnType]

    return jax.checkpoint(run)(params, carry) if backend.remat_layers else run(params, carry)
