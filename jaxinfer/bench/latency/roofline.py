"""The least time that a model's steps can take on a machine, from the bytes to read and the operations to compute."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.models.cache_rows import cached_width
from jaxinfer.models.config import DecoderConfig
from jaxinfer.models.layers import expert_stacks
from jaxinfer.notation import Params
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.few_bits.quantized_array import is_quantized


@dataclass(frozen=True)
class Cost:
    """Bytes to read from memory and operations to compute."""

    num_bytes: float
    operations: float

    def seconds(self, bytes_per_second: float, operations_per_second: float) -> float:
        """Return the longer of the two times: reading or computing."""
        return max(self.num_bytes / bytes_per_second, self.operations / operations_per_second)


def decode_cost(config: DecoderConfig, params: Params, backend: Backend, batch: int, length: float) -> Cost:
    """Return the cost of one plain step of ``batch`` rows over sequences of ``length`` tokens."""
    width = cached_width(config, backend)
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * width * np.dtype(backend.cache_dtype).itemsize * length
    kv_bytes /= 1 if config.latent is None else 2
    attention = 4 * config.num_layers * config.num_heads * width * length
    per_row = 2 * (_block_weights(config, params) + config.vocab_size * config.model_dim) + attention
    return Cost(float(_read_bytes(config, params, batch) + batch * kv_bytes), float(batch * per_row))


def prefill_cost(config: DecoderConfig, params: Params, backend: Backend, batch: int, num_tokens: int) -> Cost:
    """Return the cost of prompts of ``num_tokens``: causal attention, and the logits of the last token only."""
    blocks = 2 * _block_weights(config, params) * num_tokens
    attention = 2 * config.num_layers * config.num_heads * cached_width(config, backend) * num_tokens**2
    head = 2 * config.vocab_size * config.model_dim
    read = _read_bytes(config, params, batch * num_tokens)
    return Cost(float(read), float(batch * (blocks + attention + head)))


def _read_bytes(config: DecoderConfig, params: Params, num_tokens: int) -> int:
    """Return the bytes of all parameters, without embeddings of which a step reads one row only.

    Of experts, so many tokens are expected to read some.
    """
    total = _num_bytes(params)
    if config.experts is not None:
        total -= round(_num_bytes(expert_stacks(params["blocks"])) * (1 - config.experts.share_read(num_tokens)))
    return total if config.tied_embeddings else total - _num_bytes(params["embed"])


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _block_weights(config: DecoderConfig, params: Params) -> int:
    """Return the number of weights that each token is multiplied with."""
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params["blocks"], is_leaf=is_quantized))
    if config.experts is None:
        return total
    stacks = sum(math.prod(leaf.shape) for leaf in expert_stacks(params["blocks"]))
    return total - round(stacks * (1 - config.experts.share_read(1)))
