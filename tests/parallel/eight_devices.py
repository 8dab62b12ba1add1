"""Runs tests on eight virtual devices, which a process has from its start or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import jax

FOLDER = Path(__file__).parent / "on_eight_devices"
_XLA_FLAGS = "--xla_force_host_platform_device_count=8"
if jax.__version_info__ < (0, 11):
    _XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"  # compiling what they emit takes a quarter of the time


def run_on_eight_devices(file: str, part: str = "") -> None:
    """Run a file of `tests.parallel.on_eight_devices`, or the part of it that pytest's ``-k`` selects."""
    # Kernels that are interpreted on several devices wait for each other in a pool of this many threads.
    flags = {"XLA_FLAGS": _XLA_FLAGS, "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    options = ["-k", part, "-n0", "-q", "-p", "no:cacheprovider", "--durations=10"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", FOLDER / file, *options],
        env={**os.environ, **flags},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert child.returncode == 0, child.stdout[-20000:] + child.stderr[-2000:]
    print(child.stdout)
