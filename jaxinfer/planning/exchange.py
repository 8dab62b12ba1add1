"""What a layer of experts exchanges where the mesh's axis `expert` splits rows too: an estimate without a compiler."""

from collections.abc import Mapping

import jax.numpy as jnp

from jaxinfer.models.config import DecoderConfig
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.quantized_sums import bytes_of, splits_into_blocks
from jaxinfer.ops.token_exchange import choose_exchange


def count_exchange(
    config: DecoderConfig, backend: Backend, tokens: int, devices: int
) -> Mapping[str, tuple[int, int, int]]:
    """Return, of each kind of collective of a layer, its count, its buffers' bytes, and the bytes that a device sends.

    ``tokens`` are those of each of ``devices``, and go to all experts alike.
    """
    experts, width = config.experts, config.model_dim
    assert experts is not None
    item, others = jnp.dtype(backend.compute_dtype).itemsize, devices - 1
    if choose_exchange(tokens, experts.per_token, width, devices, backend) == "all_to_all":
        numbers, rows = devices * experts.num_experts * 4, tokens * experts.per_token * width * (item + 4)
        return {
            "all-gather": (1, numbers, numbers * others // devices),
            "ragged-all-to-all": (2, rows, rows * others // devices),
        }
    # A token, the experts that it chose, and their weights; and the sums.
    gathered = devices * tokens * (width * item + 8 * experts.per_token)
    to_all = {"all-gather": (2, gathered, gathered * others // devices)}
    if backend.collectives == "int8" and splits_into_blocks(width, devices):
        # Codes, and their scales.
        parts = sum(bytes_of(devices * tokens * width))
        return {**to_all, "all-to-all": (2, parts, parts * others // devices)}
    sums = tokens * width * 4
    return {**to_all, "reduce-scatter": (1, sums, sums * others)}
