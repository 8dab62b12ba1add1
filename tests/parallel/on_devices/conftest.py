"""These tests need several devices from the start of their process; `tests.parallel.devices` runs them.

Named alone, as in ``pytest -n0 tests/parallel/on_devices/test_logits.py``, they get four.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.parallel.on_devices.meshes import Single, make_single

FOLDER = Path(__file__).parent
FLAG = "--xla_force_host_platform_device_count="


def pytest_configure(config: pytest.Config) -> None:
    """Give a process that runs nothing else its devices."""
    flags, named = os.environ.get("XLA_FLAGS", ""), [Path(name.partition("::")[0]) for name in config.args]
    if FLAG not in flags and named and all(path.resolve().is_relative_to(FOLDER) for path in named):
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}4".strip()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave the folder out where there is one device."""
    return None if FLAG in os.environ.get("XLA_FLAGS", "") else True


@pytest.fixture(scope="session")
def single() -> Callable[..., Single]:
    """Return a function that makes each model, of so many layers, with its texts, once."""
    return cache(make_single)
