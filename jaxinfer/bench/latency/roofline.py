"""The least time that a model's steps can take on a machine, from the bytes to read and the operations to compute."""

import math
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer.models.config import DecoderConfig
from jaxinfer.notation import Params
from jaxinfer.ops.few_bits.quantized_array import is_quantized


@dataclass(frozen=True)
class Cost:
    """Bytes to read from memory and operations to compute."""

    num_bytes: float
    operations: float

    def seconds(self, bytes_per_second: float, operations_per_second: float) -> float:
        """Return the longer of the two times: reading or computing."""
        return max(self.num_bytes / bytes_per_second, self.operations / operations_per_second)


def decode_cost(config: DecoderConfig, params: Params, cache_itemsize: int, batch: int, length: float) -> Cost:
    """Return the cost of one plain step of ``batch`` rows over sequences of ``length`` tokens."""
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * cache_itemsize * length
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * length
    per_row = 2 * (_block_weights(params) + config.vocab_size * config.model_dim) + attention
    return Cost(float(_read_bytes(config, params) + batch * kv_bytes), float(batch * per_row))


def prefill_cost(config: DecoderConfig, params: Params, batch: int, num_tokens: int) -> Cost:
    """Return the cost of prompts of ``num_tokens``: causal attention, and the logits of the last token only."""
    blocks = 2 * _block_weights(params) * num_tokens
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * num_tokens**2
    head = 2 * config.vocab_size * config.model_dim
    return Cost(float(_read_bytes(config, params)), float(batch * (blocks + attention + head)))


def _read_bytes(config: DecoderConfig, params: Params) -> int:
    """Return the bytes of all parameters, without embeddings of which a step reads one row only."""
    total = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(params))
    if config.tied_embeddings:
        return total
    return total - sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(params["embed"]))


def _block_weights(params: Params) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params["blocks"], is_leaf=is_quantized))
