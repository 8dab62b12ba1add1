"""The notebook that judges kernels and strategies on a TPU runs on the CPU, and fails where they do."""

import json
from pathlib import Path

import nbclient
import nbformat
import pytest

from jaxinfer.decoding.registry import STRATEGIES
from pallas_kernels.measure import kernel_names
from tests.colab.conftest import Execute

NOTEBOOK = "validate_on_tpu.ipynb"
DTYPES = "float32", "bfloat16"
# Of the notebooks' own machinery.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.parametrize(
    ("names", "dtypes"),
    [
        pytest.param(("jacobi", "beam"), ("bfloat16",), marks=pytest.mark.slow),
        pytest.param(tuple(STRATEGIES), DTYPES, marks=pytest.mark.exhaustive),
    ],
    ids=len,
)
def test_it_checks_kernels_and_strategies_and_writes_a_report(
    names: tuple[str, ...],
    dtypes: tuple[str, ...],
    notebook: nbformat.NotebookNode,
    trained_folder: Path,
    tmp_path: Path,
    execute: Execute,
) -> None:
    """One strategy is made to write wrong tokens: that is said, the report is written, and the last cell fails."""
    (choice,) = [cell for cell in notebook.cells if cell.source.startswith("MODEL = ")]
    choice.source = f"MODEL, REPORT = {str(trained_folder)!r}, 'report.json'"
    (checks,) = [cell for cell in notebook.cells if "check_strategies(lm" in cell.source]
    checks.source = BROKEN + checks.source.replace("PROMPTS)", f"PROMPTS[:1], max_new_tokens=16, names={names})")
    for cell in notebook.cells:
        cell.source = cell.source.replace(f"for dtype in {DTYPES}:".replace("'", '"'), f"for dtype in {dtypes}:")
    (bits,) = [cell for cell in notebook.cells if "compare_bits(" in cell.source]
    bits.source = bits.source.replace("PROMPTS)", "PROMPTS, max_new_tokens=8, names=('layerskip',))")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="FAILED: jacobi"):
        execute(notebook, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {case["kernel"] for case in report["kernels"]["cases"]} == set(kernel_names())
    assert report["kernels"]["passes"]
    found = {outcome["strategy"]: outcome for outcome in report["strategies"]["strategies"]}
    assert set(found) == set(names)
    assert [name for name, outcome in found.items() if not outcome["passes"]] == ["jacobi"]
    assert "without explanation" in found["jacobi"]["failure"]
    assert sum(name.startswith("bits in") for name in report) == len(dtypes)
    for dtype in dtypes:
        assert report[f"bits in {dtype}"]["passes"]
        assert all(one["is_promised"] and one["bits_equal"] for one in report[f"bits in {dtype}"]["bits"])
    assert not report["passes"]


# In jacobi's place, drafts of untrained heads are all taken.
BROKEN = """
from dataclasses import replace
from jaxinfer.bench.identity import strategies as identity

heads = identity._MADE_UP["medusa"]
all_taken = lambda model: replace(heads(model), verify="typical", epsilon=0.0, delta=0.0)
identity._MADE_UP = {**identity._MADE_UP, "jacobi": all_taken}
"""
