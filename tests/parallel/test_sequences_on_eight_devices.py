"""Prompts and caches split over devices, and checkpoints of split models."""

from tests.parallel.eight_devices import FOLDER, run_on_eight_devices


def test_sequence():
    run_on_eight_devices("test_sequence.py")


def test_saving():
    run_on_eight_devices("test_saving.py")


def test_every_file_of_the_folder_is_run():
    run = {"test_exactness.py", "test_pipeline.py", "test_saving.py", "test_sequence.py"}
    assert {file.name for file in FOLDER.glob("test_*.py")} == run
