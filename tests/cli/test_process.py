"""What only a process of its own can show: what it imports, its signals, and its compilation cache."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Outcome

ROOT = Path(__file__).resolve().parents[2]

# Of a folder of safetensors and of one that convert wrote.
LATE_IMPORTS = """
import sys
from jaxinfer.cli.main import main

for arguments in (["--help"], ["--version"], ["generate", "--help"], ["chat", "--help"], ["bench", "latency", "--help"],
                  ["convert", "--help"], ["serve", "--help"], ["serve", "--port", "x"], ["serve", "--api-key", ""],
                  ["generate"], ["generate", "x", "--bogus"], ["generate", "x", "--max-new-tokens", "-1"]):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, arguments
    assert not {"jax", "flax", "rich", "tokenizers", "orbax", "tensorstore"} & set(sys.modules), arguments

import jaxinfer
jaxinfer.load(sys.argv[1])
assert not {"orbax", "tensorstore"} & set(sys.modules)
jaxinfer.load(sys.argv[2])
assert "orbax" not in sys.modules
"""


def child(home: Path, *arguments: str) -> dict:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PYTHONWARNINGS"))}
    return {
        "args": [sys.executable, *arguments],
        "cwd": ROOT,
        "env": {**kept, "HOME": str(home)},
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }


@pytest.mark.slow
def test_help_and_mistakes_do_not_wait_for_jax_nor_loading_for_orbax(
    run: Callable[..., Outcome], tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    assert run("convert", tiny_llama_folder(), tmp_path / "made").code == 0
    arguments = ("-c", LATE_IMPORTS, str(tiny_llama_folder()), str(tmp_path / "made"))
    done = subprocess.run(**child(tmp_path, *arguments), check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_an_interrupt_ends_cleanly_and_damaged_cache_entries_are_healed(
    tiny_llama_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Interrupt a first run in mid-text, truncate what it cached, and see a second run answer in silence.

    The text is so long that it takes seconds: the interrupt falls into it, however late it is sent.
    """
    model = tiny_llama_folder(max_position=4096)
    command = ["-m", "jaxinfer", "generate", "The quick", "--model", str(model)]
    command += ["--ignore-eos", "--max-new-tokens", "3000"]
    # A run in the background of a shell ignores interrupts and would hand that on to its children.
    of_this_process = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(**child(tmp_path, *command))
    finally:
        signal.signal(signal.SIGINT, of_this_process)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (130, b"\n")

    folder = tmp_path / ".cache" / "jaxinfer"
    entries = {path: path.read_bytes() for path in [*folder.rglob("*.program"), *folder.rglob("*-cache")]}
    assert any(path.suffix == ".program" for path in entries)
    for path, content in entries.items():
        path.write_bytes(content[: len(content) // 2])
    done = subprocess.run(**child(tmp_path, *command), check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(first + rest)
    assert len(done.stdout) > len(first + rest)
    assert all(path.stat().st_size > len(content) * 3 // 4 for path, content in entries.items())
