"""The notebook runs from top to bottom, on a model that the tests have made."""

from pathlib import Path

import nbformat
import pytest

from tests.colab.conftest import NOTEBOOKS, Execute

NOTEBOOK = "quickstart.ipynb"
# Of the notebooks' own machinery.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.slow
def test_every_cell_runs_and_the_seed_decides(
    notebook: nbformat.NotebookNode, trained_folder: Path, execute: Execute
) -> None:
    (choice,) = [cell for cell in notebook.cells if cell.source == 'MODEL = "smollm2-135m-instruct"']
    choice.source = f"MODEL = {str(trained_folder)!r}"
    execute(notebook, NOTEBOOKS.parent)
    printed = ["".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in notebook.cells]
    (seeds,) = [text for text, cell in zip(printed, notebook.cells) if "def tell" in cell.source]
    first, second = seeds.splitlines()
    assert first.removeprefix("1 ") != second.removeprefix("2 ")
    assert any("tokens/s" in text for text in printed)
    assert not any(out.output_type == "error" for cell in notebook.cells for out in cell.get("outputs", []))
