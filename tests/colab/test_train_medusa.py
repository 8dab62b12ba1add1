"""The notebook about training heads runs from prompts to a comparison, on a tiny model."""

from pathlib import Path

import nbformat
import pytest

from tests.colab.conftest import NOTEBOOKS, Execute
from tests.toys import fable

NOTEBOOK = "train_medusa.ipynb"
# Of the notebooks' own machinery.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.slow
def test_heads_are_trained_and_change_no_token(
    notebook: nbformat.NotebookNode, trained_folder: Path, tmp_path: Path, execute: Execute
) -> None:
    """The last cell asserts that texts are equal; more than a token a step says that the heads learned something."""
    (choice,) = [cell for cell in notebook.cells if cell.source.startswith("MODEL = ")]
    choice.source = TOY.format(model=str(trained_folder), work=str(tmp_path / "work"))
    (prompts,) = [cell for cell in notebook.cells if "prompts = [task" in cell.source]
    prompts.source += f"\nprompts = {[line[:12] for line in fable(44, seed=9).splitlines()]!r}"
    (measured,) = [cell for cell in notebook.cells if cell.source.startswith("import time")]
    measured.source = measured.source.replace("new_tokens=96", "new_tokens=24")
    (source,) = [cell for cell in notebook.cells if 'SOURCE = ".."' in cell.source]
    source.source = source.source.replace('SOURCE = ".."', 'SOURCE = "."')
    execute(notebook, NOTEBOOKS.parent)
    (table,) = ["".join(out.get("text", "") for out in cell.outputs) for cell in notebook.cells[-2:-1]]
    rows = {line[:24].strip(): float(line[24:].split()[0]) for line in table.splitlines()}
    assert rows["plain"] == 1.0
    assert rows["heads, 16 nodes"] > 1.2


TOY = """
MODEL, WORK, IS_CHAT = {model!r}, Path({work!r}), False
NUM_PROMPTS, ANSWER_TOKENS = 44, 32
HEADS = ["--hydra", "--inner", "64", "--heads", "3", "--epochs", "30", "--learning-rate", "3e-3"]
"""
