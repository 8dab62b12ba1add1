"""The notebook about sparsity, long texts and tree search runs to its end and draws its charts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.colab.conftest import Execute
from tests.colab.test_guides import run

pytestmark = [
    pytest.mark.exhaustive,
    # Of the notebooks' own machinery.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def test_sparsity_and_search_are_measured(
    tiny_llama_folder: Callable[..., Path], execute: Execute, tmp_path: Path
) -> None:
    changes = {
        "CHARTS": f"Path({str(tmp_path)!r})",
        "SPARSITY": "'topk:16'",
        "PROMPT": "'The tide comes in twice a day. ' * 3",
        "LENGTHS": "[512]",
        "BUDGETS": "[64]",
        "DEPTHS, TEXTS": "[0.5], 1",
        "TEXTS_EACH": "[4]",
        "PROBLEMS": "2",
    }
    printed = run("sparsity_and_search.ipynb", tiny_llama_folder(model_dim=64, ffn_dim=128), execute, changes)
    for named in ("weights not read", "StreamingLLM", "attention of the best 3%", "best of n"):
        assert named in printed
    assert {path.name for path in tmp_path.glob("*.svg")} == {"needle.svg", "search.svg"}
