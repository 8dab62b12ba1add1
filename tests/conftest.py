"""What all tests share: strict array shapes, one compilation cache a run, and models that are made once."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.toys import write_tiny_llama, write_trained_llama


@pytest.fixture(scope="session", autouse=True)
def compilation_cache() -> Iterator[None]:
    """Keep compiled programs for this run only: equal programs of different tests are compiled once."""
    folder = tempfile.mkdtemp(prefix="jaxinfer-tests-")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a random llama with changed `DecoderConfig` fields, once for each choice."""
    made: dict[Any, Path] = {}

    def write(seed: int = 0, **changes: Any) -> Path:
        key = (seed, tuple(sorted(changes.items())))
        if key not in made:
            made[key] = write_tiny_llama(tmp_path_factory.mktemp("llama"), seed, **changes)
        return made[key]

    return write


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that was trained on a small text in this run."""
    return write_trained_llama(tmp_path_factory.mktemp("trained"))
