"""The notebooks that show strategies, meshes, serving and few bits run to their end, and hold to what they claim."""

from collections.abc import Callable, Mapping
from pathlib import Path

import nbformat
import pytest

from tests.colab.conftest import NOTEBOOKS, Execute

# Of the notebooks' own machinery.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def run(name: str, folder: Path, execute: Execute, changes: Mapping[str, str]) -> str:
    """Execute a notebook with some assignments changed, and return what it printed. Cells assert what they claim."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    changes = {"MODEL": repr(str(folder)), **changes}
    found = {key: [one for one in notebook.cells if f"\n{key} = " in f"\n{one.source}"] for key in changes}
    for key, value in changes.items():
        # What comes after overrides what the cell says.
        found[key][0].source += f"\n{key} = {value}"
    execute(notebook, NOTEBOOKS.parent)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert not any(out.output_type == "error" for out in outputs)
    return "".join(out.get("text", "") for out in outputs)


def test_strategies_write_the_same_text_in_fewer_steps(trained_folder: Path, execute: Execute) -> None:
    changes = {
        "PROMPT": "'The quick fox followed the river.\\nThe quick'",
        "NEW_TOKENS": "40",
        "STRATEGIES": "['prompt_lookup', 'token_recycling']",
    }
    printed = run("strategies.ipynb", trained_folder, execute, changes)
    gained = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("prompt_lookup")]
    assert len(gained) == 2
    assert gained[0] > 1


@pytest.mark.tpu_compile
def test_meshes_write_the_tokens_of_one_device(tiny_llama_folder: Callable[..., Path], execute: Execute) -> None:
    changes = {
        "MESHES": "['data=2,tensor=4']",
        "PLANS": "[('llama-2-7b', 'v5e:1x1', 'tensor=1', 64)]",
    }
    printed = run("many_devices.ipynb", tiny_llama_folder(num_layers=1), execute, changes)
    assert "8 devices" in printed
    assert "llama-2-7b on v5e:1x1: does not fit" in printed


def test_load_changes_no_answer(tiny_llama_folder: Callable[..., Path], execute: Execute) -> None:
    changes = {"MAX_LEN": "150", "MAX_ROWS": "2", "SYSTEM": "'Be patient. ' * 7"}
    printed = run("serving.ipynb", tiny_llama_folder(num_layers=1), execute, changes)
    assert "16 of 16 answers are equal in every bit" in printed
    assert "84 of 97 tokens found" in printed


def test_few_bits_are_measured(tiny_llama_folder: Callable[..., Path], execute: Execute) -> None:
    changes = {"FORMS": "['int8', 'int4:group=32']", "DTYPE": "'float32'"}
    printed = run("few_bits.ipynb", tiny_llama_folder(model_dim=64, ffn_dim=128), execute, changes)
    starts = ("float32", "int8", "int4:group=32")
    table = [line.split() for line in printed.splitlines() if len(line.split()) == 6 and line.split()[0] in starts]
    megabytes, divergences = ([float(line[column]) for line in table] for column in (1, 4))
    assert megabytes[2] < 0.8 * megabytes[1] < 0.3 * megabytes[0]
    assert 0 == divergences[0] < divergences[1] < divergences[2]
