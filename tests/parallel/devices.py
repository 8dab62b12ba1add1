"""Runs tests on several virtual devices, which a process has from its start or not at all."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "on_devices"


def several(count: int) -> dict[str, str]:
    """Return the variables of a process with so many devices, which compiles as this run's workers do."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}".strip()}


def run_on_devices(count: int, tests: str, timeout: float | None = 850) -> None:
    """Run those tests of `tests.parallel.on_devices` that pytest's ``-m`` selects.."""
    # Kernels that are interpreted on several devices wait for each other in a pool of this many threads.
    environment = {**os.environ, **several(count), "NPROC": "16"}
    options = [f"-m{tests}", "-n0", "-q", "-p", "no:cacheprovider", "--durations=15"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", FOLDER, *options],
        env=environment,
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert child.returncode == 0, child.stdout[-20000:] + child.stderr[-2000:]
    print(child.stdout)
