"""The notebook about writing a kernel runs from top to bottom."""

from pathlib import Path

import nbformat
import pytest

from tests.colab.conftest import Execute

NOTEBOOK = "write_a_kernel.ipynb"
# Of the notebooks' own machinery.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_every_cell_runs_and_leaves_nothing_behind(
    notebook: nbformat.NotebookNode, tmp_path: Path, execute: Execute
) -> None:
    """It runs in a folder of its own, where its module is written to."""
    execute(notebook, tmp_path)
    printed = "".join("".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells)
    assert "no race" in printed
    assert printed.count("steps, ") == 3
    assert "bound by memory" in printed
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["normalise_kernel.py"]
