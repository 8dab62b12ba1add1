"""A tiny trained model, served once for all tests of a process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxinfer
from jaxinfer import LanguageModel
from tests.server.harness import SECONDS, Running, running


@pytest.fixture(scope="session")
def lm(trained_folder: Path) -> LanguageModel:
    return jaxinfer.load(trained_folder, max_len=200)


@pytest.fixture(scope="session")
def shared_server(lm: LanguageModel) -> Iterator[Running]:
    with running(lm, request_seconds=60.0, grace_seconds=0.1, max_body_bytes=20_000) as server:
        # Its programs are compiled first, which takes long where other work runs.
        server.until(lambda: server.get("/ready").status_code == 200, 6 * SECONDS)
        yield server


@pytest.fixture
def server(shared_server: Running) -> Iterator[Running]:
    """The shared server, which a test has to leave idle."""
    yield shared_server
    shared_server.until(lambda: shared_server.is_idle, SECONDS)
