"""Layers in stages, on eight devices."""

from tests.parallel.eight_devices import run_on_eight_devices


def test_pipeline():
    run_on_eight_devices("test_pipeline.py")
