"""How wide a decoder's heads stand in a cache."""

from jaxinfer.errors import InvalidOption
from jaxinfer.models.config import DecoderConfig
from jaxinfer.ops.backend import Backend
from jaxinfer.ops.rows_in_bytes import holds_bytes

# Eight heads of any multiple of 16 lanes fill whole tiles of a TPU, which kernels read together.
_JOINED_LANES = 16


def cached_width(config: DecoderConfig, backend: Backend) -> int:
    """Return the width of a head as a cache holds it.

    A row of latent attention is filled up with zeros to whole tiles, as a TPU's memory does anyway: where each device
    has its own copy, zeros after all copies would not do. Heads with further lanes are filled up to a number of them of
    which few heads fill whole tiles. Raises InvalidOption for a cache in bytes of such heads.
    """
    width, tile = config.head_dim + alibi_lanes(config, backend), 1
    if config.latent is not None:
        tile = backend.lane_tile
    elif config.alibi is not None and backend.lane_tile > 1:
        tile = _JOINED_LANES
    return -(-width // tile) * tile


def alibi_lanes(config: DecoderConfig, backend: Backend) -> int:
    """Return P, in how many lanes a key says how far its position moves scores (`jaxinfer.models.alibi`)."""
    if config.alibi is None:
        return 0
    if holds_bytes(backend.cache_dtype):
        raise InvalidOption(
            f"cache_dtype: keys of {config.family} hold their positions (ALiBi), of which 8 bits keep too little: "
            "leave it out"
        )
    is_wide = {backend.compute_dtype, backend.cache_dtype} <= {"float32", "float64"}
    return 1 if is_wide else 3


def cache_lanes(config: DecoderConfig, backend: Backend) -> int:
    """Return the lanes per slot of a decoder's cache."""
    return backend.cache_lanes(config.num_kv_heads, cached_width(config, backend))
