"""Counts, without a compiler, the memory and the least work of a deployment."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxinfer.decoding.fixed_rows import step_headroom
from jaxinfer.decoding.programs import prefill_chunk
from jaxinfer.models.active_columns import feed_forward_kernels
from jaxinfer.models.cache_rows import cached_width
from jaxinfer.models.config import DecoderConfig, Experts
from jaxinfer.models.decoder import create_cache
from jaxinfer.models.layers import BLOCKS, KERNEL, TRANSPOSED_KERNEL, expert_stacks
from jaxinfer.models.pipeline import pass_schedule
from jaxinfer.models.stages import Schedule
from jaxinfer.notation import Params
from jaxinfer.ops.logical_axes import split_rows
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.exchange import count_exchange
from jaxinfer.planning.latency import count_hops
from jaxinfer.planning.placement import device_bytes, device_weights, placed_params, placed_state
from jaxinfer.planning.roofline import Work


@dataclass(frozen=True)
class Footprint:
    """Bytes and counts of one device.

    ``read_bytes`` is the part of ``weights_bytes`` that every step reads: of an embedding table that is not also the
    output matrix, a step reads only a few rows. ``block_bytes`` are the weights of the layers, or of one stage's
    layers, ``block_weights`` the number of those that each token is multiplied with. ``multiplied_weights`` counts the
    output matrix too. ``expert_bytes`` are those of the experts, of which a pass reads a part, and ``expert_weights``
    the number of their weights that a token is expected to be multiplied with. ``dead_bytes`` and ``dead_weights`` are
    those of feed-forward layers that a sparse step leaves out, by the plan's live share. ``state_bytes`` holds the
    tokens and the rest of the decoding state.
    """

    weights_bytes: int
    read_bytes: int
    block_bytes: int
    block_weights: int
    multiplied_weights: int
    cache_bytes: int
    state_bytes: int
    expert_bytes: int = 0
    expert_weights: int = 0
    experts: Experts | None = None
    dead_bytes: int = 0
    dead_weights: int = 0

    @property
    def total_bytes(self) -> int:
        """The bytes held before anything is computed."""
        return self.weights_bytes + self.cache_bytes + self.state_bytes

    def unread_bytes(self, num_tokens: int) -> int:
        """Return the bytes of experts that so many tokens are expected to leave alone."""
        return 0 if self.experts is None else round(self.expert_bytes * (1 - self.experts.share_read(num_tokens)))


def count_footprint(deployment: Deployment) -> Footprint:
    """Count the bytes that one device holds, from the same descriptions that programs are compiled with."""
    config, backend = deployment.split
    mesh = deployment.mesh.abstract
    params = placed_params(config, backend, mesh, deployment.few_bits)
    state = placed_state(config, backend, deployment.strategy, deployment.rows, deployment.num_slots, mesh)
    weights = device_bytes(params)
    tables = [name for name in ("embed", "positions") if name in params]
    looked_up = sum(device_bytes(params[name]) for name in tables)
    head, blocks = (params[name] for name in ("embed" if config.tied_embeddings else "head", "blocks"))
    stacks, active = expert_stacks(blocks), device_weights(blocks)
    sparse = _read_by_blocks(blocks) if backend.reads_live_blocks else {}
    held = chosen = 0
    if config.experts is not None:
        held = device_weights({"stacks": stacks})
        chosen = round(held * config.experts.share_read(1))
    return Footprint(
        weights_bytes=weights,
        read_bytes=weights - looked_up + (device_bytes(head) if config.tied_embeddings else 0),
        block_bytes=device_bytes(blocks),
        block_weights=active - held + chosen,
        multiplied_weights=active - held + chosen + device_weights(head),
        cache_bytes=device_bytes(state.cache),
        state_bytes=device_bytes(state) - device_bytes(state.cache),
        expert_bytes=device_bytes(stacks),
        expert_weights=chosen,
        experts=config.experts,
        dead_bytes=round((1 - deployment.live_share) * device_bytes(sparse)),
        dead_weights=round((1 - deployment.live_share) * device_weights(sparse)),
    )


def _read_by_blocks(blocks: Params) -> Params:
    """Return the kernels of which a sparse step reads live blocks alone: the gate, or what has none, says which."""
    return {
        f"{name}.{part}": mlp[part][KERNEL if KERNEL in mlp[part] else TRANSPOSED_KERNEL]
        for name, mlp in feed_forward_kernels({BLOCKS: blocks}).items()
        for part in (("up", "down") if "gate" in mlp else ("down",))
    }


def pipeline_schedule(deployment: Deployment, tokens: int) -> Schedule:
    """Return the pipeline schedule of a pass over ``tokens`` new tokens per row, or over a chunk of them."""
    config, backend = deployment.split
    if backend.stages == 1:
        return Schedule(1, 1)
    headroom, slots = step_headroom(deployment.strategy, backend), deployment.num_slots
    cache = jax.eval_shape(lambda: create_cache(config, deployment.rows, slots, backend, headroom))
    blocks = placed_params(config, backend, deployment.mesh.abstract, deployment.few_bits)["blocks"]
    return pass_schedule(backend, blocks, cache, deployment.rows, min(tokens, prefill_chunk(backend, tokens)))


def decode_floor(footprint: Footprint, num_tokens: int = 1) -> int:
    """Return the bytes that a step of so many nodes must read: the weights that it needs and the cache, once."""
    unread = footprint.unread_bytes(num_tokens) + footprint.dead_bytes
    return footprint.read_bytes - unread + footprint.cache_bytes


def prefill_floor(deployment: Deployment, footprint: Footprint) -> int:
    """Return the bytes that prefill must move: it reads the weights once and writes the prompts' keys and values."""
    # Whichever device has a token, its experts may be any.
    tokens = deployment.prompt_tokens * deployment.rows // deployment.mesh.data
    written = footprint.cache_bytes * deployment.prompt_tokens // deployment.num_slots
    return footprint.read_bytes - footprint.unread_bytes(tokens) + written


def estimate_step(deployment: Deployment, footprint: Footprint, nodes: int = 1) -> Work:
    """Return the least work of one step that verifies ``nodes`` nodes per row after a full cache."""
    rows = deployment.rows // _row_devices(deployment)
    attended = _seen(deployment.split.config, deployment.num_slots) // deployment.mesh.sequence
    work = _pass(deployment, footprint, footprint.cache_bytes, rows, nodes, attended, rows * nodes)
    schedule = pipeline_schedule(deployment, nodes)
    dead = footprint.dead_bytes * schedule.ticks
    dead_flops = 2 * rows * nodes * footprint.dead_weights * schedule.ticks // schedule.microbatches
    return replace(work, hbm_bytes=work.hbm_bytes - dead, flops=work.flops - dead_flops)


def estimate_prefill(deployment: Deployment, footprint: Footprint) -> Work:
    """Return the least work of prefill: causal attention, and the logits of the last token only."""
    tokens, rows = deployment.prompt_tokens, deployment.rows // _row_devices(deployment)
    written = footprint.cache_bytes * tokens // deployment.num_slots
    attended = _seen(deployment.split.config, tokens) // 2
    # The mesh's sequence axis splits the tokens.
    return _pass(deployment, footprint, written, rows, -(-tokens // deployment.mesh.sequence), attended, rows)


def _row_devices(deployment: Deployment) -> int:
    """Return the number of devices that split the rows."""
    mesh = deployment.mesh
    axes = split_rows(deployment.rows, mesh.abstract, deployment.split.backend.rows_over_experts)
    return mesh.data * mesh.expert if isinstance(axes, tuple) else mesh.data


def _seen(config: DecoderConfig, slots: int) -> int:
    """Return how many slots a token attends to, summed over the layers."""
    return sum(slots if kind.window is None else min(kind.window, slots) for kind in config.layers)


def _pass(
    deployment: Deployment, footprint: Footprint, cache_bytes: int, rows: int, tokens: int, attended: int, drawn: int
) -> Work:
    """Count a pass over new tokens of a device's rows, ``drawn`` of which need logits.

    Idle ticks of a pipeline stage count too.
    """
    config, backend = deployment.split
    mesh = deployment.mesh
    schedule = pipeline_schedule(deployment, tokens)
    ticks, count = schedule.ticks, schedule.microbatches
    weights = footprint.block_weights
    attention = 4 * config.num_heads * cached_width(config, backend) * attended // mesh.tensor // mesh.pipeline
    # How many devices' tokens its experts get.
    sharing = mesh.expert if _row_devices(deployment) > mesh.data else 1
    flops = rows * tokens * (2 * weights + attention) * ticks // count
    flops += rows * tokens * (sharing - 1) * 2 * footprint.expert_weights
    flops += drawn * 2 * (footprint.multiplied_weights - weights)
    unread = footprint.unread_bytes(rows * tokens * sharing // count)
    hbm_bytes = footprint.read_bytes + (ticks - 1) * footprint.block_bytes + cache_bytes * ticks // count
    hbm_bytes -= unread * ticks
    # Tensor axis: two all-reduces per layer and one of the embeddings. Pipeline: hidden states between stages and at
    # the end.
    hidden = rows * tokens * config.model_dim * jnp.dtype(backend.compute_dtype).itemsize
    sent, collectives = 0, {}
    groups: dict[tuple[str, int], int] = {}
    if mesh.tensor > 1:
        inside = 2 * config.num_layers // mesh.pipeline * ticks
        size = hidden * inside // count + hidden
        collectives["all-reduce"] = inside + 1, size
        groups["all-reduce", mesh.tensor] = inside + 1
        sent += 2 * size * (mesh.tensor - 1) // mesh.tensor
    if sharing > 1:
        layers = sum(config.sparse_layers)
        for kind, (times, buffer, size) in count_exchange(config, backend, rows * tokens, sharing).items():
            collectives[kind] = times * layers, buffer * layers
            groups[kind, sharing] = times * layers
            sent += size * layers
    elif mesh.expert > 1:
        # The results of experts, in float32, once a layer that has any.
        sums, before = collectives.get("all-reduce", (0, 0))
        layers = sum(config.sparse_layers) // mesh.pipeline * ticks
        size = rows * tokens * config.model_dim * 4 * layers // count
        collectives["all-reduce"] = sums + layers, before + size
        groups["all-reduce", mesh.expert] = groups.get(("all-reduce", mesh.expert), 0) + layers
        sent += 2 * size * (mesh.expert - 1) // mesh.expert
    if mesh.pipeline > 1:
        sums, size = collectives.get("all-reduce", (0, 0))
        collectives["all-reduce"] = sums + 1, size + hidden
        collectives["collective-permute"] = ticks, hidden * ticks // count
        groups["all-reduce", mesh.pipeline] = groups.get(("all-reduce", mesh.pipeline), 0) + 1
        groups["collective-permute", mesh.pipeline] = ticks
        sent += 2 * hidden * (mesh.pipeline - 1) // mesh.pipeline + hidden * ticks // count
    return Work(hbm_bytes, flops, sent, collectives, count_hops(groups, deployment.topology))
