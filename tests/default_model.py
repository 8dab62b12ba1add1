"""Finds the default model where `jaxinfer fetch` puts it: a test neither downloads nor waits for a network."""

from pathlib import Path

import pytest

from jaxinfer.checkpoint.hub.fetch import DEFAULT_MODEL, default_cache_dir


def default_model_path() -> Path:
    """Return the path of the default model's GGUF file, or skip the calling test where it was not fetched."""
    path = default_cache_dir() / DEFAULT_MODEL.file_name
    if not path.is_file() or path.stat().st_size != DEFAULT_MODEL.num_bytes:
        pytest.skip("default model absent: run `jaxinfer fetch` first")
    return path
