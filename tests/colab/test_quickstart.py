"""The notebook runs from top to bottom, on a model that the tests have made."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "colab" / "quickstart.ipynb"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_repository_holds_no_outputs(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of the notebook's own machinery
def test_every_cell_runs_and_the_seed_decides(
    notebook: nbformat.NotebookNode, trained_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (choice,) = [cell for cell in notebook.cells if cell.source == 'MODEL = "smollm2-135m-instruct"']
    choice.source = f"MODEL = {str(trained_folder)!r}"
    resources = {"metadata": {"path": str(NOTEBOOK.parents[1])}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    printed = ["".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells]
    (seeds,) = [text for text, cell in zip(printed, notebook.cells) if "def tell" in cell.source]
    first, second = seeds.splitlines()
    assert first.removeprefix("1 ") != second.removeprefix("2 ")
    assert any("tokens/s" in text for text in printed)
    assert not any(out.output_type == "error" for cell in notebook.cells for out in cell.get("outputs", []))
