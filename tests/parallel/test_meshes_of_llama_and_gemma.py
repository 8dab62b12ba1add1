"""On meshes of eight devices, llama and Gemma 2 write what they write on one."""

from tests.parallel.eight_devices import run_on_eight_devices


def test_exactness():
    run_on_eight_devices("test_exactness.py", "llama or gemma2")
