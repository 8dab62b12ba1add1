"""The families' table is what the code says: every family has a row, and no file is longer than it promises."""

from jaxinfer.models.families.registry import FAMILIES
from tests.families_table import FOLDER, README, families_in_gguf, module_of_each, written


def test_the_table_is_what_the_code_says():
    assert module_of_each().keys() == FAMILIES.keys()
    assert len(families_in_gguf()) > 20
    assert written() in README.read_text(), "run python -m tests.families_table"


def test_each_family_is_a_file_of_under_100_lines():
    modules = {module.rpartition(".")[2] for module in module_of_each().values()}
    lengths = {name: len((FOLDER / f"{name}.py").read_text().splitlines()) for name in modules}
    assert {name for name, length in lengths.items() if length >= 100} == set()
