"""What a deployment must hold and do at least, counted without a compiler."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.planning.deployment import Deployment
from jaxinfer.planning.placement import device_bytes, placed_params, placed_state
from jaxinfer.planning.roofline import Work


@dataclass(frozen=True)
class Footprint:
    """Bytes and numbers of one device.

    ``read_bytes`` is the part of ``weights_bytes`` that every step reads: an embedding table that is not the output
    matrix too gives a few rows only. ``multiplied_weights`` are those that each token is multiplied with.
    ``state_bytes`` is the text and what is known of it.
    """

    weights_bytes: int
    read_bytes: int
    multiplied_weights: int
    cache_bytes: int
    state_bytes: int

    @property
    def total_bytes(self) -> int:
        """What must be held before anything is computed."""
        return self.weights_bytes + self.cache_bytes + self.state_bytes


def count_footprint(deployment: Deployment) -> Footprint:
    """Count what one device holds, from the descriptions that programs are compiled with."""
    config, backend = deployment.split
    mesh = deployment.mesh.abstract
    params = placed_params(config, backend, mesh)
    state = placed_state(config, backend, deployment.strategy, deployment.batch, deployment.num_slots, mesh)
    itemsize = jnp.dtype(backend.param_dtype).itemsize
    weights = device_bytes(params)
    tables = [name for name in ("embed", "positions") if name in params]
    looked_up = sum(device_bytes(params[name]) for name in tables)
    head = device_bytes(params["embed" if config.tied_embeddings else "head"])
    return Footprint(
        weights_bytes=weights,
        read_bytes=weights - looked_up + (head if config.tied_embeddings else 0),
        multiplied_weights=(device_bytes(params["blocks"]) + head) // itemsize,
        cache_bytes=device_bytes(state.cache),
        state_bytes=device_bytes(state) - device_bytes(state.cache),
    )


def decode_floor(footprint: Footprint) -> int:
    """Return the bytes that a step must read: weights and cache once."""
    return footprint.read_bytes + footprint.cache_bytes


def prefill_floor(deployment: Deployment, footprint: Footprint) -> int:
    """Return the bytes that prefill must move: weights read once, and the prompts' keys and values written."""
    return footprint.read_bytes + footprint.cache_bytes * deployment.prompt_tokens // deployment.num_slots


def estimate_step(deployment: Deployment, footprint: Footprint, nodes: int = 1) -> Work:
    """Return the least work of one step that verifies so many nodes a row, a full cache before them."""
    rows = deployment.batch // deployment.mesh.data
    attended = _seen(deployment.split.config, deployment.num_slots) // deployment.mesh.sequence
    flops = rows * nodes * (2 * footprint.multiplied_weights + _attention_flops(deployment, attended))
    return _with_sums(deployment, decode_floor(footprint), flops, rows * nodes)


def estimate_prefill(deployment: Deployment, footprint: Footprint) -> Work:
    """Return the least work of prefill: causal attention, and the logits of the last tokens only."""
    config, tokens = deployment.split.config, deployment.prompt_tokens
    rows = deployment.batch // deployment.mesh.data
    head = config.vocab_size * (config.embedding_dim or config.model_dim) // deployment.mesh.tensor
    attended = _seen(config, tokens) // 2
    tokens = -(-tokens // deployment.mesh.sequence)
    flops = rows * tokens * (2 * (footprint.multiplied_weights - head) + _attention_flops(deployment, attended))
    return _with_sums(deployment, prefill_floor(deployment, footprint), flops + rows * 2 * head, rows * tokens)


def _seen(config: DecoderConfig, slots: int) -> int:
    """Return how many slots the layers of a token see, all layers together."""
    return sum(slots if kind.window is None else min(kind.window, slots) for kind in config.layers)


def _attention_flops(deployment: Deployment, attended: int) -> int:
    config = deployment.split.config
    return 4 * config.num_heads * config.head_dim * attended // deployment.mesh.tensor


def _with_sums(deployment: Deployment, hbm_bytes: int, flops: int, tokens: int) -> Work:
    """Add the sums over the tensor axis: two a layer, and one of the embeddings."""
    config, tensor = deployment.split.config, deployment.mesh.tensor
    if tensor == 1:
        return Work(hbm_bytes, flops, 0, {})
    count = 2 * config.num_layers + 1
    size = count * tokens * config.model_dim * jnp.dtype(deployment.split.backend.compute_dtype).itemsize
    return Work(hbm_bytes, flops, 2 * size * (tensor - 1) // tensor, {"all-reduce": (count, size)})
