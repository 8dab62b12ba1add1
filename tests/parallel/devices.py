"""Runs tests on several virtual devices, which a process has from its start or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import jax

FOLDER = Path(__file__).parent / "on_devices"


def run_on_devices(count: int, tests: str, files: tuple[str, ...] = (), timeout: float | None = 850) -> None:
    """Run those tests of `tests.parallel.on_devices` that pytest's ``-m`` selects, of some files or of all."""
    flags = f"--xla_force_host_platform_device_count={count}"
    if jax.__version_info__ < (0, 11):
        flags += " --xla_cpu_use_fusion_emitters=false"  # compiling what they emit takes a quarter of the time
    # Kernels that are interpreted on several devices wait for each other in a pool of this many threads.
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "NPROC": "16"}
    options = [f"-m{tests}", "-n0", "-q", "-p", "no:cacheprovider", "--durations=15"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *(FOLDER / file for file in files or ("",)), *options],
        env=environment,
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert child.returncode == 0, child.stdout[-20000:] + child.stderr[-2000:]
    print(child.stdout)
