"""On meshes of eight devices, OPT and GPT-2 write what they write on one; and what belongs to no family."""

from tests.parallel.eight_devices import run_on_eight_devices


def test_exactness():
    run_on_eight_devices("test_exactness.py", "not llama and not gemma2")
