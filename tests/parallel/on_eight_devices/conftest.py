"""These tests need eight devices from the start of their process; `tests.parallel.eight_devices` runs them."""

import os
from collections.abc import Callable

import pytest

from tests.parallel.on_eight_devices.meshes import Single, make_single

collect_ignore_glob = [] if "device_count=8" in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]


@pytest.fixture(scope="session")
def single() -> Callable[[str], Single]:
    """Return a function that makes each model, with its texts, once."""
    made: dict[str, Single] = {}

    def get(name: str) -> Single:
        if name not in made:
            made[name] = make_single(name)
        return made[name]

    return get
