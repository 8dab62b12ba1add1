"""The notebook about writing a kernel runs from top to bottom."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "colab" / "write_a_kernel.ipynb"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_repository_holds_no_outputs(notebook: nbformat.NotebookNode) -> None:
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.tpu_compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of the notebook's own machinery
def test_every_cell_runs_and_leaves_nothing_behind(
    notebook: nbformat.NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in a folder of its own, where its module is written to."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    printed = "".join("".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells)
    assert "no race" in printed
    assert printed.count("steps, ") == 3
    assert "bound by memory" in printed
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["normalise_kernel.py"]
