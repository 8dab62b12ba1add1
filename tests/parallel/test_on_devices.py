"""On meshes of several devices models write what they write on one: four devices, and eight in the wide run."""

import pytest

from tests.parallel.devices import FOLDER, run_on_devices

# Two processes at most, as each makes the models anew.
WIDE = (
    ("test_logits.py", "test_tokens.py"),
    (
        "test_bits.py",
        "test_pipeline.py",
        "test_sequence.py",
        "test_placement.py",
        "test_engine.py",
        "test_few_bits.py",
        "test_adapters.py",
        "test_experts.py",
        "test_quantized_sums.py",
        "test_rounded_rows.py",
    ),
)


def test_on_four_devices():
    run_on_devices(4, "not slow and not exhaustive")


@pytest.mark.slow
@pytest.mark.parametrize("files", WIDE, ids=["models", "parts"])
def test_on_eight_devices(files):
    run_on_devices(8, "slow", files)


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_all_on_eight_devices():
    run_on_devices(8, "exhaustive", timeout=None)


def test_every_file_of_the_folder_is_run():
    assert {file.name for file in FOLDER.glob("test_*.py")} == {file for files in WIDE for file in files}
