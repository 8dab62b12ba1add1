"""How many pages an engine has."""

import os

import jax
import jax.numpy as jnp

from jaxinfer.engine.config import EngineConfig
from jaxinfer.errors import InvalidOption
from jaxinfer.models.cache_rows import cache_lanes
from jaxinfer.models.decoder import Decoder

_CPU_SHARE, _CPU_MOST, _DEVICE_SHARE = 0.3, 2 << 30, 0.8


def count_pages(config: EngineConfig, decoder: Decoder, num_slots: int, features: int = 0, num_groups: int = 1) -> int:
    """Return the number of pages, page 0 included, for texts of up to ``num_slots`` slots.

    More than all rows and as many waiting texts could fill are not made. ``features`` counts the layers whose inputs
    stand on pages too. So many groups of devices have pages each; those of CPUs share one memory.
    """
    longest = -(-num_slots // config.page_size)
    if config.pages is not None:
        return config.pages + 1
    size, most = _bytes_held(config, decoder, features), 2 * config.max_rows * longest
    if _on_cpu(decoder):
        size *= num_groups
    if config.memory is None:
        room = min(_free_bytes() * _CPU_SHARE, _CPU_MOST) if _on_cpu(decoder) else _free_bytes() * _DEVICE_SHARE
    else:
        room = config.memory if config.memory >= 1 else _free_bytes() * config.memory
    pages = min(int(room // size), most)
    if pages < 2:
        raise InvalidOption(f"engine: memory for {int(room)} bytes is less than two pages of {int(size)}: give it more")
    return pages + 1


def page_bytes(config: EngineConfig, decoder: Decoder) -> int:
    """Return how many bytes a page takes in all layers."""
    model, backend = decoder.config, decoder.backend
    lanes = cache_lanes(model, backend)
    buffers = 2 if model.latent is None else 1
    return buffers * model.num_layers * config.page_size * lanes * jnp.dtype(backend.cache_dtype).itemsize


def _bytes_held(config: EngineConfig, decoder: Decoder, features: int) -> float:
    """Return how many bytes a page takes on a device of a mesh, and on a CPU's, which share one memory, on all."""
    backend, size = decoder.backend, page_bytes(config, decoder) / decoder.backend.kv_shards
    size += features * config.page_size * decoder.config.model_dim * jnp.dtype(backend.compute_dtype).itemsize
    return size * backend.mesh.size if backend.mesh is not None and _on_cpu(decoder) else size


def _on_cpu(decoder: Decoder) -> bool:
    return decoder.backend.platform == "cpu"


def _free_bytes() -> int:
    """Return the memory that is free where arrays live."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30
