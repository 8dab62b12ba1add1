"""What the tests of all notebooks share."""

from collections.abc import Callable
from pathlib import Path

import nbclient
import nbformat
import pytest

Execute = Callable[[nbformat.NotebookNode, Path], None]
NOTEBOOKS = Path(__file__).resolve().parents[2] / "colab"


@pytest.fixture
def notebook(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    """Return the notebook that the test's module names."""
    return nbformat.read(NOTEBOOKS / request.module.NOTEBOOK, as_version=4)


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch) -> Execute:
    """Return what runs every cell of a notebook in a folder, on the CPU and with the library of this repository."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS.parent))

    def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()

    return run
