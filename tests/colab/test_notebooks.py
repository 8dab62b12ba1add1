"""Every notebook is valid, and the repository holds none of its outputs."""

import ast
import importlib.util

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.colab.conftest import NOTEBOOKS

OWN = ("jaxinfer", "pallas_kernels", "train")
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_repository_holds_no_outputs(path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_cells_compile_and_import_what_there_is(path) -> None:
    """Without running them; what a cell imports from this repository, it must find there."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(
            TransformerManager().transform_cell(cell.source.removeprefix("%%writefile normalise_kernel.py"))
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OWN):
                module = importlib.import_module(str(node.module))
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                # A name may be a module of its own.
                assert all(importlib.util.find_spec(f"{node.module}.{name}") for name in missing)
