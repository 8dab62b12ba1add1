"""How wide a decoder's heads stand in a cache."""

from jaxinfer.models.config import DecoderConfig
from jaxinfer.ops.backend import Backend


def cached_width(config: DecoderConfig, backend: Backend) -> int:
    """Return the width of a head as a cache holds it.

    A row of latent attention is filled up with zeros to whole tiles, as a TPU's memory does anyway: where each device
    has its own copy, zeros after all copies would not do.
    """
    tile = 1 if config.latent is None else backend.lane_tile
    return -(-config.head_dim // tile) * tile


def cache_lanes(config: DecoderConfig, backend: Backend) -> int:
    """Return the lanes per slot of a decoder's cache."""
    return backend.cache_lanes(config.num_kv_heads, cached_width(config, backend))
